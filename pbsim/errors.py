"""What a user did wrong, said completely: every problem of a file at once, and never as a traceback."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes
    ----------
    where : the file (or the argument) it stands in.
    key : dotted path of the key, or the place within the file or model; may be empty.
    value : what stands there, as the user wrote it; may be empty.
    allowed : what is allowed there, or what is wrong and how to mend it.
    """

    where: str
    key: str
    value: str
    allowed: str

    def __str__(self) -> str:
        place = f"{self.where}: {self.key}" if self.key else self.where
        given = f" = {self.value}" if self.value else ""
        return f"{place}{given}: {self.allowed}"


class UserError(Exception):
    """All problems found in what a user handed in; the command line prints them and exits with status 2."""

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def user_error(where: str, key: str, value: object, allowed: str) -> UserError:
    """Make a `UserError` of a single problem."""
    return UserError(Problem(where, key, "" if value == "" else str(value), allowed))
