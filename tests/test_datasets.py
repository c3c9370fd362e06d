"""Data sets: every kind read right, every malformed one refused by name, and orders to be reproduced."""

from __future__ import annotations

import gzip
import io
import os
import struct
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.random import PCG64, Generator
from PIL import Image
from sklearn.datasets import load_digits as sklearn_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import TensorDataset

from pbsim.datasets import Dataset, augment_batch, epoch_order, extent, from_user, load, sample_order
from pbsim.datasets.idx import read_idx
from pbsim.errors import UserError

DATA = Path(os.environ.get("PBSIM_DATA", Path(__file__).parents[2] / "shared" / "data"))
needs_mnist = pytest.mark.skipif(not (DATA / "mnist-t10k").is_dir(), reason=f"no mnist-t10k/ in {DATA}")
needs_cifar = pytest.mark.skipif(not (DATA / "cifar10-images.zip").is_file(), reason=f"no cifar10-images.zip in {DATA}")


def table(kind: str, **keys: Any) -> Any:
    """A `[data]` table, with the defaults of pbsim.config.workload.Data."""
    names = ("path", "shape", "classes", "train_samples", "test_samples", "normalize")
    return SimpleNamespace(**{"kind": kind, **dict.fromkeys(names), "augment": [], **keys})


def loaded(kind: str, base: Path | None = None, seed: int = 0, **keys: Any) -> Dataset:
    return load(table(kind, **keys), seed=seed, where="workload.toml", base=base)


def refusal(kind: str, base: Path | None = None, **keys: Any) -> str:
    with pytest.raises(UserError) as caught:
        loaded(kind, base, **keys)
    return str(caught.value)


def refused_by_user(data: object) -> str:
    with pytest.raises(UserError) as caught:
        from_user(data)
    return str(caught.value)


@pytest.fixture(autouse=True)
def _no_data_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PBSIM_DATA", raising=False)


# Digits and random


def test_digits_and_their_split_are_those_of_scikit_learn() -> None:
    pixels, target = sklearn_digits(return_X_y=True)
    images = (pixels / 16).reshape(-1, 1, 8, 8)
    split = train_test_split(images, target, test_size=0.2, stratify=target, random_state=0)
    digits = loaded("digits")
    for ours, theirs in zip((digits.x_train, digits.x_test, digits.y_train, digits.y_test), split, strict=True):
        assert np.array_equal(ours, theirs)


def test_digits_are_scaled_and_split_with_every_class_in_proportion() -> None:
    digits = loaded("digits")
    assert (digits.shape, digits.classes) == ((1, 8, 8), 10)
    assert (digits.train_samples, digits.test_samples) == (1437, 360)  # 20 % of 1797, rounded up
    assert (digits.x_train.dtype, digits.y_train.dtype) == (np.float32, np.int64)
    assert (digits.x_train.min(), digits.x_train.max()) == (0, 1)
    assert np.bincount(digits.y_test).min() >= 34
    assert np.array_equal(digits.x_train, loaded("digits", seed=1).x_train)


def test_fewer_samples_are_the_first_ones() -> None:
    every, few = loaded("digits"), loaded("digits", train_samples=7, test_samples=3)
    assert (few.train_samples, few.test_samples) == (7, 3)
    assert np.array_equal(few.x_train, every.x_train[:7])
    assert np.array_equal(few.y_test, every.y_test[:3])


def test_more_samples_than_there_are_is_refused_for_both_sets_at_once() -> None:
    message = refusal("digits", train_samples=1438, test_samples=361)
    assert "data.train_samples = 1438" in message
    assert "1437" in message
    assert "data.test_samples = 361" in message


def test_digits_take_no_path() -> None:
    assert "data.path" in refusal("digits", path="digits.npz")


def test_random_data_have_the_shape_asked_for_and_depend_on_the_seed_alone() -> None:
    one = loaded("random", shape=(3, 4, 5), classes=4, train_samples=30, test_samples=6, seed=1)
    again = loaded("random", shape=(3, 4, 5), classes=4, train_samples=30, test_samples=6, seed=1)
    other = loaded("random", shape=(3, 4, 5), classes=4, train_samples=30, test_samples=6, seed=2)
    assert one.x_train.shape == (30, 3, 4, 5)
    assert one.x_test.shape == (6, 3, 4, 5)
    assert one.classes == 4
    assert set(one.y_train) <= set(range(4))
    assert np.array_equal(one.x_train, again.x_train)
    assert not np.array_equal(one.x_train, other.x_train)


def test_random_data_are_standard_normal_and_can_be_learned() -> None:
    data = loaded("random", shape=(64,))
    assert (data.train_samples, data.test_samples, data.classes) == (1000, 200, 10)
    assert data.x_train.dtype == np.float32
    assert abs(data.x_train.mean()) < 0.1
    assert abs(data.x_train.std() - 1) < 0.1
    means = np.stack([data.x_train[data.y_train == label].mean(0) for label in range(10)])
    nearest = np.linalg.norm(data.x_test[:, None] - means, axis=2).argmin(1)
    assert (nearest == data.y_test).mean() > 0.9


def test_random_data_without_a_shape_are_refused() -> None:
    assert "workload.toml: data.shape" in refusal("random")


def test_a_workload_may_give_the_extent_of_its_data_without_them() -> None:
    assert extent(table("image_folder", shape=[3, 224, 224], train_samples=1281167)) == ((3, 224, 224), 1281167)
    assert extent(table("image_folder", shape=[3, 224, 224])) is None
    assert extent(table("digits", train_samples=5)) is None
    made_up = loaded("random", shape=[2, 3])
    assert extent(table("random", shape=[2, 3])) == (made_up.shape, made_up.train_samples)


# What the workload says of its data


def test_normalization_is_per_channel_after_scaling() -> None:
    raw = loaded("random", shape=(2, 3, 3))
    by = SimpleNamespace(mean=[1.0, -2.0], std=[2.0, 0.5])
    normal = loaded("random", shape=(2, 3, 3), normalize=by)
    assert np.allclose(normal.x_train[:, 0], (raw.x_train[:, 0] - 1) / 2, atol=1e-6)
    assert np.allclose(normal.x_test[:, 1], (raw.x_test[:, 1] + 2) / 0.5, atol=1e-5)
    assert normal.x_train.dtype == np.float32


def test_contradictions_are_all_named_at_once() -> None:
    by = SimpleNamespace(mean=[0.0] * 3, std=[1.0] * 3)
    message = refusal("digits", shape=(1, 28, 28), classes=9, normalize=by)
    assert "data.shape = [1, 28, 28]" in message
    assert "data.classes = 9" in message
    assert "data.normalize" in message


def test_more_classes_than_labels_widen_the_data_set() -> None:
    assert loaded("digits", classes=16).classes == 16


def test_augmentation_of_feature_vectors_is_refused() -> None:
    assert "data.augment" in refusal("random", shape=(5,), augment=["flip"])


# Where data lie


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("mnist", "train-images-idx3-ubyte"),
        ("cifar10", "data_batch_1.bin"),
        ("image_folder", "train/CLASS/IMAGE"),
        ("npz", "x_train"),
    ],
)
def test_missing_data_say_where_they_were_looked_for_and_what_to_put_there(
    kind: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unset = refusal(kind)
    assert "data.path" in unset
    assert unset.index("[data] path") < unset.index("$PBSIM_DATA is not set") < unset.index(wanted)
    monkeypatch.setenv("PBSIM_DATA", str(tmp_path))
    assert str(tmp_path) in refusal(kind)
    given = refusal(kind, tmp_path, path="nothing")
    assert str(tmp_path / "nothing") in given
    assert wanted in given


def test_missing_cifar_says_how_to_take_images_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--set data.kind=image_folder --set data.path=PATH" in refusal("cifar10")
    assert "image_folder" not in refusal("npz")
    monkeypatch.setenv("PBSIM_DATA", str(tmp_path))
    for name in ("archive.zip", "cifar10-images.zip", "text.zip"):
        (tmp_path / name).touch()
    assert f"--set data.path={tmp_path / 'cifar10-images.zip'}" in refusal("cifar10")
    assert "image_folder" in refusal("cifar10", path="nothing")


def test_a_path_is_relative_to_the_workload_and_else_the_variable_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "data.npz", **arrays())
    assert loaded("npz", tmp_path, path="data.npz").train_samples == 6
    assert loaded("npz", None, path=str(tmp_path / "data.npz")).train_samples == 6
    monkeypatch.setenv("PBSIM_DATA", str(tmp_path))
    assert loaded("npz", tmp_path / "elsewhere").train_samples == 6


# MNIST


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_mnist(folder: Path, train: int = 5, test: int = 3, size: int = 4) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    files = {}
    for split, count in (("train", train), ("t10k", test)):
        files[f"{split}-images-idx3-ubyte"] = generator.integers(0, 256, (count, size, size), np.uint8)
        files[f"{split}-labels-idx1-ubyte"] = generator.integers(0, 10, count, np.uint8)
    for number, (name, array) in enumerate(files.items()):
        if number % 2:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(array)))
        else:
            (folder / name).write_bytes(idx_bytes(array))
    return files


@given(array=hnp.arrays(np.uint8, hnp.array_shapes(max_dims=4, max_side=5)), compressed=st.booleans())
def test_idx_files_are_read_as_they_were_written(
    array: np.ndarray, compressed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / ("array.gz" if compressed else "array")
    file.write_bytes(gzip.compress(idx_bytes(array)) if compressed else idx_bytes(array))
    assert np.array_equal(read_idx(file), array)
    assert read_idx(file).shape == array.shape


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda content: content[:-1], "length = 23 bytes: truncated: dimensions [3, 4] make 24 bytes"),
        (lambda content: content + b"x", "length = 25 bytes: too long: dimensions [3, 4] make 24 bytes"),
        (lambda content: content[:9], "length = 9 bytes: truncated"),
        (lambda content: b"\0\0\x0d" + content[3:], "magic number = 0x00000d02"),
        (lambda content: b"\0\0\x08\0" + content[4:], "magic number = 0x00000800"),
        (lambda content: content[:2], "magic number = 0x0000"),
        (lambda content: b"", "magic number = nothing"),
    ],
)
def test_malformed_idx_files_are_named_with_what_was_found(change: Any, found: str, tmp_path: Path) -> None:
    file = tmp_path / "array-idx2-ubyte"
    file.write_bytes(change(idx_bytes(np.zeros((3, 4), np.uint8))))
    with pytest.raises(UserError) as caught:
        read_idx(file)
    assert str(file) in str(caught.value)
    assert found in str(caught.value)


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(bytes(100))[:-9]])
def test_a_damaged_gz_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "array.gz").write_bytes(content)
    with pytest.raises(UserError, match=r"array\.gz"):
        read_idx(tmp_path / "array.gz")


def test_mnist_has_one_channel_in_the_unit_range(tmp_path: Path) -> None:
    files = write_mnist(tmp_path)
    data = loaded("mnist", tmp_path, path=".")
    assert (data.shape, data.train_samples, data.test_samples, data.classes) == ((1, 4, 4), 5, 3, 10)
    images = files["train-images-idx3-ubyte"]
    assert np.array_equal(data.x_train[:, 0], images.astype(np.float32) / np.float32(255))
    assert data.y_test.tolist() == files["t10k-labels-idx1-ubyte"].tolist()
    assert np.array_equal(loaded("mnist", tmp_path, path=".", train_samples=2).x_train, data.x_train[:2])


def test_mnist_is_found_in_torchvisions_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    write_mnist(tmp_path / "MNIST" / "raw")
    monkeypatch.setenv("PBSIM_DATA", str(tmp_path))
    assert loaded("mnist").train_samples == 5


@pytest.mark.parametrize(
    ("name", "array", "found"),
    [
        ("train-images-idx3-ubyte", np.zeros((5, 16), np.uint8), "dimensions = [5, 16]"),
        ("train-images-idx3-ubyte", np.zeros((0, 4, 4), np.uint8), "dimensions = [0, 4, 4]"),
        ("train-images-idx3-ubyte", np.zeros((4, 4, 4), np.uint8), "has 4 images"),
        ("t10k-images-idx3-ubyte", np.zeros((3, 5, 5), np.uint8), "dimensions = [3, 5, 5]"),
    ],
)
def test_mnist_files_that_do_not_belong_together_are_refused(
    name: str, array: np.ndarray, found: str, tmp_path: Path
) -> None:
    write_mnist(tmp_path)
    (tmp_path / name).write_bytes(idx_bytes(array))
    message = refusal("mnist", tmp_path, path=".")
    assert found in message
    assert name in message


def test_mnist_labels_beyond_the_classes_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(np.full(5, 10, np.uint8))))
    assert "train-labels-idx1-ubyte.gz: labels = 10" in refusal("mnist", tmp_path, path=".")
    assert loaded("mnist", tmp_path, path=".", classes=11).classes == 11


@needs_mnist
def test_the_real_mnist_test_files_are_read() -> None:
    images = read_idx(DATA / "mnist-t10k" / "t10k-images-idx3-ubyte.gz")
    labels = read_idx(DATA / "mnist-t10k" / "t10k-labels-idx1-ubyte.gz")
    assert (images.shape, labels.shape) == ((10_000, 28, 28), (10_000,))
    assert labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert np.bincount(labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


@needs_mnist
def test_a_folder_with_the_mnist_test_files_only_names_the_missing_ones() -> None:
    message = refusal("mnist", DATA, path="mnist-t10k", train_samples=1)
    assert "lacks train-images-idx3-ubyte[.gz], train-labels-idx1-ubyte[.gz];" in message


# CIFAR-10, binary


def write_cifar(folder: Path, records: int = 2) -> np.ndarray:
    folder.mkdir(exist_ok=True)
    generator = np.random.default_rng(0)
    batches = generator.integers(0, 256, (6, records, 3073), np.uint8)
    batches[:, :, 0] %= 10
    for number in range(5):
        batches[number].tofile(folder / f"data_batch_{number + 1}.bin")
    batches[5].tofile(folder / "test_batch.bin")
    return batches


def test_cifar_is_read_from_its_folder_or_the_one_above(tmp_path: Path) -> None:
    batches = write_cifar(tmp_path / "cifar-10-batches-bin")
    data = loaded("cifar10", tmp_path, path="cifar-10-batches-bin")
    assert (data.shape, data.train_samples, data.test_samples, data.classes) == ((3, 32, 32), 10, 2, 10)
    assert data.y_train.tolist() == batches[:5, :, 0].ravel().tolist()
    # red, then green, then blue, each row by row: pixel (c, h, w) is byte 1 + 1024 c + 32 h + w
    assert data.x_train[3, 1, 2, 5] == np.float32(batches[1, 1, 1 + 1024 + 2 * 32 + 5] / np.float32(255))
    assert np.array_equal(loaded("cifar10", tmp_path, path=".").x_test, data.x_test)


def test_missing_cifar_files_are_all_named(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    (tmp_path / "test_batch.bin").unlink()
    assert "lacks data_batch_3.bin, test_batch.bin;" in refusal("cifar10", tmp_path, path=".")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (bytes(3074), "length = 3074 bytes"),
        (b"", "length = 0 bytes"),
        (bytes(3073) + b"\x0a" + bytes(3072), "label of record 1 = 10"),
    ],
)
def test_malformed_cifar_files_are_named(content: bytes, found: str, tmp_path: Path) -> None:
    write_cifar(tmp_path)
    (tmp_path / "data_batch_4.bin").write_bytes(content)
    message = refusal("cifar10", tmp_path, path=".")
    assert "data_batch_4.bin" in message
    assert found in message


# Image folders


def image_bytes(value: int, mode: str = "RGB", size: tuple[int, int] = (4, 3), kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    colour: Any = value if len(Image.new(mode, (1, 1)).getbands()) == 1 else (value, 20, 30, 40)[: len(mode)]
    Image.new(mode, size, colour).save(file, kind)
    return file.getvalue()


def write_images(base: Path, as_zip: bool, files: dict[str, bytes]) -> Path:
    """Write files into a folder, or a zip with a comment; a name that ends in a slash is a folder."""
    if as_zip:
        with zipfile.ZipFile(base / "images.zip", "w") as archive:
            archive.comment = b"where this comes from"
            for name, content in files.items():
                archive.writestr(name, content)
        return base / "images.zip"
    for name, content in files.items():
        file = base / "images" / name
        if name.endswith("/"):
            file.mkdir(parents=True)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    return base / "images"


def two_classes() -> dict[str, bytes]:
    return {
        "train/dog/1.png": image_bytes(1),
        "train/cat/2.PNG": image_bytes(12),
        "train/cat/1.png": image_bytes(11),
        "train/cat/3.png": image_bytes(13),
        "test/dog/1.png": image_bytes(2),
        "test/cat/1.png": image_bytes(14),
    }


@pytest.mark.parametrize("as_zip", [False, True])
def test_images_come_in_turn_from_classes_numbered_by_name(as_zip: bool, tmp_path: Path) -> None:
    strays = {
        "train/cat/notes.txt": b"x",
        "train/cat/.hidden.png": b"x",
        "train/.trash/1.png": b"x",
        "__MACOSX/train/cat/._1.png": b"x",
        "README": b"x",
        "test/bird/labels.csv": b"x",
    }
    path = write_images(tmp_path, as_zip, two_classes() | strays)
    data = loaded("image_folder", path=str(path))
    assert (data.shape, data.classes) == ((3, 3, 4), 2)
    assert data.y_train.tolist() == [0, 1, 0, 0]
    assert (data.x_train[:, 0, 0, 0] * 255).round().tolist() == [11, 1, 12, 13]
    assert (data.x_train[0, :, 2, 3] * 255).round().tolist() == [11, 20, 30]
    assert data.y_test.tolist() == [0, 1]
    few = loaded("image_folder", path=str(path), train_samples=2)
    assert np.array_equal(few.x_train, data.x_train[:2])


def test_a_slice_reads_only_its_own_images(tmp_path: Path) -> None:
    path = write_images(tmp_path, True, two_classes() | {"train/cat/3.png": b"damaged"})
    assert loaded("image_folder", path=str(path), train_samples=3).y_train.tolist() == [0, 1, 0]


@pytest.mark.parametrize("mode", ["L", "LA", "1"])
def test_grey_images_have_one_channel(mode: str, tmp_path: Path) -> None:
    names = ("train/a/1.png", "test/a/1.png")
    path = write_images(tmp_path, False, dict.fromkeys(names, image_bytes(1, mode)))
    assert loaded("image_folder", path=str(path)).shape == (1, 3, 4)


@pytest.mark.parametrize("mode", ["RGBA", "P"])
def test_colour_images_have_three_channels(mode: str, tmp_path: Path) -> None:
    names = ("train/a/1.png", "test/a/1.png")
    path = write_images(tmp_path, False, dict.fromkeys(names, image_bytes(1, mode)))
    assert loaded("image_folder", path=str(path)).shape == (3, 3, 4)


@pytest.mark.parametrize("as_zip", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("train/dog/1.png", b"no image", "train/dog/1.png: cannot be read as an image"),
        ("train/dog/1.png", image_bytes(1)[:50], "train/dog/1.png: cannot be read as an image"),
        ("test/cat/1.jpg", image_bytes(1, kind="JPEG")[:-9], "test/cat/1.jpg: cannot be read as an image"),
        ("train/dog/1.png", image_bytes(1, size=(3, 4)), "train/dog/1.png = (C, H, W) = (3, 4, 3)"),
        ("test/dog/1.png", image_bytes(1, "L"), "test/dog/1.png = (C, H, W) = (1, 3, 4)"),
        ("train/dog/1.png", image_bytes(1, "I;16"), "train/dog/1.png = mode I;16"),
        ("test/bird/1.png", image_bytes(1), "test/bird: there is no such class in train/"),
        ("train/bird/", b"", "train/bird: no images"),
    ],
)
def test_malformed_images_and_folders_are_named(
    as_zip: bool, name: str, content: bytes, found: str, tmp_path: Path
) -> None:
    path = write_images(tmp_path, as_zip, two_classes() | {name: content})
    message = refusal("image_folder", path=str(path))
    assert found in message
    assert str(path) in message


@pytest.mark.parametrize("as_zip", [False, True])
def test_a_folder_of_another_layout_says_what_was_found(as_zip: bool, tmp_path: Path) -> None:
    path = write_images(tmp_path, as_zip, {"pets/train/cat/1.png": image_bytes(1)})
    message = refusal("image_folder", path=str(path))
    assert "train/: no images" in message
    assert "test/: no images" in message
    assert "found: pets" in message


def test_a_file_that_is_no_zip_is_refused(tmp_path: Path) -> None:
    (tmp_path / "images.zip").write_bytes(b"PK no")
    assert "neither a folder nor a zip file" in refusal("image_folder", tmp_path, path="images.zip")


def test_a_damaged_zip_entry_is_named(tmp_path: Path) -> None:
    path = write_images(tmp_path, True, two_classes())
    content = bytearray(path.read_bytes())
    content[content.index(b"train/dog/1.png") + 40] ^= 255  # within the stored image: its checksum is now wrong
    path.write_bytes(content)
    assert "train/dog/1.png: cannot be read" in refusal("image_folder", path=str(path))


@needs_cifar
def test_a_slice_of_the_real_cifar_images_holds_every_class() -> None:
    data = loaded("image_folder", DATA, path="cifar10-images.zip", train_samples=50, test_samples=20)
    assert (data.shape, data.classes) == ((3, 32, 32), 10)
    assert np.bincount(data.y_train).tolist() == [5] * 10
    assert np.bincount(data.y_test).tolist() == [2] * 10
    assert 0.3 < data.x_train.mean() < 0.7


@needs_cifar
def test_the_real_cifar_images_are_all_counted() -> None:
    message = refusal("image_folder", DATA, path="cifar10-images.zip", train_samples=10**6, test_samples=10**6)
    assert "at most 50000" in message
    assert "at most 10000" in message


# Arrays: npz files and what a program hands over


def arrays(**changes: Any) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    given = {
        "x_train": generator.integers(0, 256, (6, 2, 3, 3), np.uint8),
        "y_train": np.array([0, 1, 2, 3, 0, 1], np.uint8),
        "x_test": generator.standard_normal((4, 2, 3, 3)),
        "y_test": np.array([0, 1, 4, 2]),
        **changes,
    }
    return {key: value for key, value in given.items() if value is not None}


def saved(folder: Path, **changes: Any) -> str:
    np.savez(folder / "data.npz", **arrays(**changes))
    return str(folder / "data.npz")


def test_npz_values_are_used_as_they_stand(tmp_path: Path) -> None:
    data = loaded("npz", path=saved(tmp_path, note="more keys do no harm"))
    expected = arrays()
    assert np.array_equal(data.x_train, expected["x_train"])
    assert np.array_equal(data.x_test, expected["x_test"])  # float64, to the last bit
    assert (data.x_train.dtype, data.x_test.dtype) == (np.float32, np.float64)
    assert (data.y_train.dtype, data.classes) == (np.int64, 5)


def test_classes_of_an_npz_slice_are_those_of_the_whole_file(tmp_path: Path) -> None:
    data = loaded("npz", path=saved(tmp_path), train_samples=2, test_samples=1)
    assert (data.train_samples, data.test_samples, data.classes) == (2, 1, 5)


def test_float_targets_are_a_regression(tmp_path: Path) -> None:
    path = saved(tmp_path, y_train=np.ones((6, 2)), y_test=np.zeros((4, 2)))
    data = loaded("npz", path=path)
    assert (data.y_train.dtype, data.y_train.shape, data.classes) == (np.float64, (6, 2), 0)
    assert "data.classes" in refusal("npz", path=path, classes=2)


MALFORMED: list[tuple[dict[str, Any], list[str]]] = [
    ({"x_train": None, "y_test": None}, ["x_train: is missing", "y_test: is missing"]),
    ({"y_train": np.zeros(5, int)}, ["y_train = 5 samples: x_train has 6 samples"]),
    ({"y_test": np.array([0, -1, 0, 0])}, ["y_test", "the least is -1"]),
    ({"y_test": np.array([0, 2**63, 0, 0], np.uint64)}, ["y_test", str(2**63)]),
    ({"x_test": np.zeros((4, 2, 3, 4))}, ["x_test = samples of shape [2, 3, 4]", "[2, 3, 3]"]),
    ({"x_train": np.full((6, 2, 3, 3), "a")}, ["x_train = <U1", "should be numbers"]),
    ({"x_train": np.full((6, 2, 3, 3), np.nan)}, ["x_train", "finite"]),
    ({"x_train": np.full((6, 2, 3, 3), 1e39)}, ["x_train", "finite float32"]),
    ({"x_train": np.zeros(6)}, ["x_train = float64 of shape [6]"]),
    ({"x_test": np.zeros((0, 2, 3, 3)), "y_test": np.zeros(0, int)}, ["x_test", "at least one sample"]),
    ({"y_train": np.zeros(6)}, ["y_train = float64 of shape [6]", "integer labels"]),
    ({"y_train": np.zeros((6, 1), int)}, ["y_train = int64 of shape [6, 1]", "integer labels"]),
    ({"y_train": np.zeros((6, 2))}, ["y_test = labels: y_train has targets of 2"]),
    ({"x_train": None, "y_train": np.zeros(6, complex), "x_test": np.zeros((3, 9))}, ["x_train", "complex128", "3"]),
]


@pytest.mark.parametrize(("changes", "found"), MALFORMED)
def test_all_that_is_wrong_with_an_npz_file_is_named(changes: dict[str, Any], found: list[str], tmp_path: Path) -> None:
    path = saved(tmp_path, **changes)
    message = refusal("npz", path=path)
    assert all(text in message for text in [path, *found])


@pytest.mark.parametrize(("changes", "found"), MALFORMED)
def test_all_that_is_wrong_with_a_programs_arrays_is_named(changes: dict[str, Any], found: list[str]) -> None:
    assert all(text in refused_by_user(arrays(**changes)) for text in found)


def test_pickled_arrays_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, y_train=np.array([object()] * 6))
    assert "y_train: cannot be read as an array of numbers" in refusal("npz", path=path)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_damaged_npz_entry_is_named(compressed: bool, tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    (np.savez_compressed if compressed else np.savez)(path, **arrays())
    content = bytearray(path.read_bytes())
    start = content.index(b"x_train.npy") + 40
    content[start : start + 8] = bytes(8)
    path.write_bytes(content)
    assert "x_train" in refusal("npz", path=str(path))


def test_a_file_that_is_no_npz_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("x_train, y_train")
    (tmp_path / "cut.npz").write_bytes(Path(saved(tmp_path)).read_bytes()[:300])
    (tmp_path / "empty.npz").touch()
    for name in ("text.npz", "cut.npz", "empty.npz", "."):
        assert "is not an npz file" in refusal("npz", tmp_path, path=name)
    np.save(tmp_path / "single.npy", np.zeros(3))
    assert "is a single array" in refusal("npz", tmp_path, path="single.npy")


def test_a_program_may_hand_over_arrays_or_tensors() -> None:
    given = arrays()
    from_dict = from_user(given)
    from_tuple = from_user(tuple(given.values()))
    from_tensors = from_user([torch.tensor(value).requires_grad_(value.dtype.kind == "f") for value in given.values()])
    for data in (from_dict, from_tuple, from_tensors):
        assert data.classes == 5
        assert data.x_test.dtype == np.float64
        assert np.array_equal(data.x_test, given["x_test"])
        assert data.y_train.tolist() == given["y_train"].tolist()
    assert from_user(from_dict) is from_dict


def test_bfloat16_tensors_are_taken() -> None:
    x = torch.arange(8, dtype=torch.bfloat16).reshape(4, 2)
    assert from_user((x, torch.arange(4), x, torch.arange(4))).x_train.tolist() == x.tolist()


def test_a_program_may_hand_over_a_pair_of_torch_datasets() -> None:
    tensors = [torch.tensor(value) for value in arrays(x_test=np.zeros((4, 2, 3, 3), np.float32)).values()]
    data = from_user((TensorDataset(*tensors[:2]), TensorDataset(*tensors[2:])))
    assert (data.train_samples, data.test_samples, data.classes) == (6, 4, 5)
    assert np.array_equal(data.x_train, tensors[0].float().numpy())
    targets = TensorDataset(torch.zeros(3, 2), torch.ones(3, 1))
    assert from_user([targets, targets]).classes == 0


def test_a_single_torch_dataset_is_refused_for_lack_of_a_test_set() -> None:
    message = refused_by_user(TensorDataset(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)))
    assert "needs a test set beside the training set" in message


GOOD = [(np.zeros(2), 0), (np.zeros(2), 1)]


@pytest.mark.parametrize(
    ("train", "found"),
    [
        ([], "train = 0 samples"),
        ([(np.zeros(2), 0), np.zeros(2)], "train[1] = ndarray"),
        ([(np.zeros(2), 0), (np.zeros(3), 0)], "train[1] = shapes [(3,), ()]"),
        ([(Image.new("RGB", (2, 2)), 0)], "train[0]"),
    ],
)
def test_malformed_items_of_a_torch_dataset_are_named(train: list[Any], found: str) -> None:
    assert found in refused_by_user((train, GOOD))


@pytest.mark.parametrize("data", [None, 3, "digits", np.zeros(3), (np.zeros((2, 2)), np.zeros(2)), (1, 2, 3)])
def test_anything_else_is_refused_with_what_is_allowed(data: object) -> None:
    assert "should be (x_train, y_train, x_test, y_test)" in refused_by_user(data)


def test_ragged_lists_are_refused() -> None:
    assert "x_train: cannot be read" in refused_by_user(arrays(x_train=[[1, 2], [3]]))


# Order


def test_an_epochs_order_is_the_documented_permutation() -> None:
    order = epoch_order(3, 2, 100)
    assert order.dtype == np.int64
    assert np.array_equal(order, Generator(PCG64([3, 2])).permutation(100))


@given(seed=st.integers(0, 2**40), n=st.integers(1, 12), first=st.integers(0, 40), count=st.integers(0, 40))
def test_sample_order_is_a_slice_of_all_epochs(seed: int, n: int, first: int, count: int) -> None:
    whole = np.concatenate([epoch_order(seed, epoch, n) for epoch in range(80 // n + 1)])
    order = sample_order(seed, n, first, count)
    assert order.dtype == np.int64
    assert np.array_equal(order, whole[first : first + count])


def test_a_returned_order_may_be_changed_by_its_owner() -> None:
    sample_order(0, 10, 0, 10)[:] = 0
    assert sorted(sample_order(0, 10, 0, 10)) == list(range(10))


# Augmentation


def augmented_one_by_one(x: np.ndarray, padding: int, flip: bool, seed: int, epoch: int, index: int) -> np.ndarray:
    """The docstring's recipe, pixel by pixel."""
    generator = Generator(PCG64([seed, epoch, index]))
    row = column = 0
    if padding:
        row = generator.integers(0, 2 * padding + 1)
        column = generator.integers(0, 2 * padding + 1)
    flipped = flip and generator.random() < 0.5
    result = np.zeros_like(x)
    channels, height, width = x.shape
    for c, h, w in np.ndindex(channels, height, width):
        source_h, source_w = h + row - padding, w + column - padding
        if 0 <= source_h < height and 0 <= source_w < width:
            result[c, h, width - 1 - w if flipped else w] = x[c, source_h, source_w]
    return result


@given(
    augment=st.sampled_from([["crop:1"], ["crop:4"], ["flip"], ["crop:2", "flip"], ["flip", "crop:2"]]),
    seed=st.integers(0, 2**33),
    epochs=st.lists(st.integers(0, 5), min_size=3, max_size=3),
    indices=st.lists(st.integers(0, 10**6), min_size=3, max_size=3),
)
def test_augmentation_follows_its_documented_draws(
    augment: list[str], seed: int, epochs: list[int], indices: list[int]
) -> None:
    x = np.arange(1, 3 * 2 * 3 * 5 + 1, dtype=np.float32).reshape(3, 2, 3, 5)
    before = x.copy()
    result = augment_batch(x, augment, seed, np.array(epochs), np.array(indices))
    padding = max((int(name[5:]) for name in augment if name.startswith("crop")), default=0)
    for sample, epoch, index, one in zip(x, epochs, indices, result, strict=True):
        assert np.array_equal(one, augmented_one_by_one(sample, padding, "flip" in augment, seed, epoch, index))
    assert np.array_equal(x, before)
    assert result.dtype == np.float32


def test_no_augmentation_still_returns_a_new_array() -> None:
    x = np.ones((1, 1, 2, 2), np.float32)
    result = augment_batch(x, [], 0, np.array([0]), np.array([0]))
    assert np.array_equal(result, x)
    assert not np.shares_memory(result, x)
