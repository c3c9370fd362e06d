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
    """

    names: tuple[str, ...]
    contents: str


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
    return (
        f"set `path` in [data], or ${VARIABLE} to a folder with {' or '.join(source.names)}, "
        f"and put there {source.contents}"
    )
