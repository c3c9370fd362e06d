"""Where the files of a data set lie: at `[data] path`, or else below the folder `$PBSIM_DATA` names.

Large data sets are not part of a workload, and no workload should name a folder of one person's machine. A
workload without `path` therefore finds its data by fixed names below `$PBSIM_DATA`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pbsim.errors import UserError, user_error

VARIABLE = "PBSIM_DATA"


@dataclass(frozen=True)
class Source:
    """What the files of a kind of data are.

    Attributes
    ----------
    names : where they may lie below `$PBSIM_DATA`, first found first taken.
    contents : what has to be there, in words.
    images : whether the same may be had as a folder or zip of images.
    """

    names: tuple[str, ...]
    contents: str
    images: bool = False


def find(source: Source, path: str | None, base: Path | None, where: str) -> Path:
    """Return the folder or file that holds the data.

    Parameters
    ----------
    source : what to look for.
    path : the workload's `[data] path`; relative to `base`. If given, nothing else is searched.
    base : folder of the workload file; None for the working directory.
    where : name of the workload file, for errors.

    Raises
    ------
    UserError
        If there is nothing; it says where it looked and what to put there.
    """
    if path is not None:
        place = (base or Path()) / Path(path).expanduser()
        if place.exists():
            return place
        raise user_error(where, "data.path", path, f"there is no {place}; {_remedy(source)}")
    root = os.environ.get(VARIABLE)
    if root:
        for name in source.names:
            if (place := Path(root).expanduser() / name).exists():
                return place
    raise _not_found(source, root, where)


def _not_found(source: Source, root: str | None, where: str) -> UserError:
    searched = f"${VARIABLE} ({root}) holds no {' or '.join(source.names)}"
    looked = searched if root else f"${VARIABLE} is not set"
    return user_error(where, "data.path", "", f"looked at [data] path: not given; {looked}; {_remedy(source)}")


def _remedy(source: Source) -> str:
    remedy = (
        f"set `path` in [data], or ${VARIABLE} to a folder with {' or '.join(source.names)}, "
        f"and put there {source.contents}"
    )
    if source.images:
        remedy += (
            "; or take a folder or zip of images, train/CLASS/IMAGE and test/CLASS/IMAGE: "
            f"--set data.kind=image_folder --set data.path={_zip_at_hand()}"
        )
    return f"{remedy}; or made-up samples: --set data.kind=random"


def _zip_at_hand() -> str:
    """A zip file below `$PBSIM_DATA` that may be one of images, or a word for it."""
    root = os.environ.get(VARIABLE)
    zips = sorted(Path(root).expanduser().glob("*.zip")) if root else []
    likely = [path for path in zips if "image" in path.name or "cifar" in path.name] or zips
    return str(likely[0]) if likely else "PATH"
