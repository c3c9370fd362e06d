"""Images in a folder per class, on disk or in a zip file.

The layout is torchvision's: `train/<class>/<image>` and `test/<class>/<image>`, classes numbered in the order
of their names. Samples are ordered in turn over the classes (first image of every class, second image of
every class, ...), so that the first n samples hold every class, and only those n images are read.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, zip_longest
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from pbsim.datasets.dataset import Dataset, Labels, Pixels, sizes, to_unit_range
from pbsim.datasets.location import Source
from pbsim.errors import Problem, UserError, user_error

if TYPE_CHECKING:
    from pbsim.config.workload import Data

SOURCE = Source(
    names=("image_folder", "image_folder.zip", "cifar10-images.zip"),
    contents="a folder or .zip file with train/CLASS/IMAGE and test/CLASS/IMAGE, for every class and image",
)
_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_GREY_MODES = {"1", "L", "LA"}
_COLOUR_MODES = {"P", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"}

Classes: TypeAlias = dict[str, list[str]]
"""The names of the images in each class folder."""

Read: TypeAlias = Callable[[str], bytes]
"""Gives the content of a file of a folder or zip file."""


@contextmanager
def _open(path: Path) -> Iterator[tuple[list[str], Read]]:
    """Give the names of all files and folders (which end in a slash) below `path`, and how to read a file."""
    if path.is_dir():
        yield _names(path), lambda name: (path / name).read_bytes()
        return
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise user_error(str(path), "", "", f"is neither a folder nor a zip file: {error}") from error
    with archive:
        yield archive.namelist(), archive.read


def _names(root: Path) -> list[str]:
    found: list[str] = []
    for folder, folders, files in os.walk(root, followlinks=True):
        inside = Path(folder).relative_to(root)
        found += [f"{(inside / name).as_posix()}/" for name in folders]
        found += [(inside / name).as_posix() for name in files]
    return found


def read_image_folder(path: Path, data: Data, where: str) -> Dataset:
    """Return the images below `path`, a folder or a zip file, as (1 or 3, H, W) in [0, 1].

    The first training image decides size and channels (1 for grey, else 3) of all. Transparency is dropped.
    Hidden files and files that by their name are no images are not looked at.

    Raises
    ------
    UserError
        If the layout is another, or an image cannot be read or differs from the first in size or channels.
    """
    with _open(path) as (all_names, read):
        names = sorted(set(all_names))
        train, test = _classes(names, "train"), _classes(names, "test")
        _check_layout(train, test, names, path)
        train_order, test_order = _in_turn(train), _in_turn(test)
        train_count, test_count = sizes(data, len(train_order), len(test_order), where)
        chosen = train_order[:train_count] + test_order[:test_count]
        pixels = _read_images(read, [image for _, image in chosen], path)
    numbers = {name: number for number, name in enumerate(train)}
    labels: Labels = np.array([numbers[name] for name, _ in chosen], np.int64)
    return Dataset(
        to_unit_range(pixels[:train_count]),
        labels[:train_count],
        to_unit_range(pixels[train_count:]),
        labels[train_count:],
        len(train),
    )


def _classes(names: Sequence[str], split: str) -> Classes:
    """Return the class folders of `train` or `test` and their images, all by name."""
    classes: Classes = {}
    for name in names:
        parts = PurePosixPath(name).parts
        if len(parts) < 2 or parts[0] != split or any(part.startswith(".") for part in parts):
            continue
        if name.endswith("/"):
            classes.setdefault(parts[1], [])
        elif len(parts) > 2 and PurePosixPath(name).suffix.lower() in _SUFFIXES:
            classes.setdefault(parts[1], []).append(name)
    return dict(sorted(classes.items()))


def _check_layout(train: Classes, test: Classes, names: Sequence[str], path: Path) -> None:
    problems: list[Problem] = []
    for split, classes in (("train", train), ("test", test)):
        if not any(classes.values()):
            top = sorted({PurePosixPath(name).parts[0] for name in names if PurePosixPath(name).parts})
            found = ", ".join(top[:10]) or "nothing"
            problems.append(
                Problem(str(path), f"{split}/", "", f"no images; should be {SOURCE.contents}; found: {found}")
            )
    if any(train.values()):
        problems += [
            Problem(str(path), f"train/{name}", "", "no images; every class needs some")
            for name, images in train.items()
            if not images
        ]
        problems += [
            Problem(str(path), f"test/{name}", "", "there is no such class in train/")
            for name, images in test.items()
            if images and name not in train
        ]
    if problems:
        raise UserError(problems)


def _in_turn(classes: Classes) -> list[tuple[str, str]]:
    """Return (class, image) in turn over the classes; one that has run out is passed over."""
    rows = zip_longest(*([(name, image) for image in images] for name, images in classes.items()))
    return [entry for entry in chain.from_iterable(rows) if entry is not None]


def _read_images(read: Read, names: Sequence[str], path: Path) -> Pixels:
    """Return images of one size, uint8 (n, C, H, W)."""
    first = _decode(read, names[0], path)
    pixels = np.empty((len(names), *first.shape), np.uint8)
    for index, name in enumerate(names):
        image = _decode(read, name, path)
        if image.shape != first.shape:
            raise user_error(
                str(path),
                name,
                f"(C, H, W) = {image.shape}",
                f"all images should have that of {names[0]}, {first.shape}",
            )
        pixels[index] = image
    return pixels


def _decode(read: Read, name: str, path: Path) -> Pixels:
    """Return one image, uint8 (C, H, W)."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(read(name)), formats=_FORMATS) as image:
            mode = image.mode
            if mode in _GREY_MODES:
                return np.asarray(image.convert("L"), np.uint8)[None]
            if mode in _COLOUR_MODES:
                return np.asarray(image.convert("RGB"), np.uint8).transpose(2, 0, 1)
    except Exception as error:  # zipfile and Pillow raise errors of a dozen types for damaged files
        raise user_error(str(path), name, "", f"cannot be read as an image: {error}") from error
    raise user_error(str(path), name, f"mode {mode}", "should be grey or colour with 8 bits per channel")
