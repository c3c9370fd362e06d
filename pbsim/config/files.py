"""TOML in, typed tables out: finding files, applying `--set`, and saying everything that is wrong at once."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args

import tomli_w
from pydantic import BaseModel, ValidationError

from pbsim.config.base import Table
from pbsim.config.hardware import Hardware
from pbsim.config.run import Settings
from pbsim.config.workload import Workload
from pbsim.errors import Problem, UserError, user_error

T = TypeVar("T", bound=Table)
FOLDERS: dict[type[Table], str] = {Hardware: "hwconfigs", Workload: "workloads"}
KEYS_OF_A_KIND = {  # in tables whose `kind` decides which further keys there are
    "decay": ("at", "factor", "power"),
    "datapath": (
        *("macs_per_cycle", "overhead_cycles", "vector_length", "sram_elements_per_mac"),
        *("rows", "cols", "dataflow", "weights"),
        *("forward_cycles", "input_gradient_cycles", "weight_gradient_cycles", "update_cycles"),
    ),
}
TABLES: dict[str, type[Table]] = {"hardware": Hardware, "workload": Workload, "run": Settings}


@dataclass
class Source:
    """A file as it was read: plain dictionaries, before validation.

    `where` is the file as the user named it, `base` its folder; `overrides` are the keys that `--set` changed.
    """

    document: dict[str, Any]
    where: str
    base: Path | None = None
    overrides: set[str] = field(default_factory=set)
    included: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Keys whose value was read from another file: that file, and the key there."""

    def place_of(self, key: str) -> tuple[str, str]:
        """The file and key at which a user finds a value, for errors."""
        return self.included.get(key, ("--set" if _is_overridden(key, self) else self.where, key))


def shipped(kind: type[Table]) -> dict[str, Path]:
    """The files of a kind that come with pbsim, by name."""
    package = Path(__file__).resolve().parent.parent
    for root in (package, package.parent):  # an installed wheel, or a checkout
        folder = root / FOLDERS[kind]
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.toml"))}
    raise FileNotFoundError(f"pbsim is installed without its {FOLDERS[kind]}")


def find(kind: type[Table], name: str) -> Path:
    """A user's file, or a shipped one by its name without a path."""
    path = Path(name)
    if path.is_file():
        return path
    known = shipped(kind)
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise user_error(
        name,
        "",
        "",
        f"no such file, and no shipped {kind.__name__.lower()} of that name{hint}; shipped: {', '.join(known)}",
    )


def read_source(kind: type[Table], given: str | Path | Mapping[str, Any] | Table) -> Source:
    """Read a file, a name, a dictionary or a table into plain dictionaries."""
    if isinstance(given, Table):
        return Source(plain(given), kind.__name__.lower())
    if isinstance(given, Mapping):
        return Source(builtin(given), kind.__name__.lower())
    path = find(kind, str(given))
    return Source(read_toml(path), str(path), path.resolve().parent)


def builtin(value: Any) -> Any:
    """Dictionaries and lists from Python with numbers of Python in place of numpy's; copies."""
    if isinstance(value, Mapping):
        return {key: builtin(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(builtin, value)) if type(value) in (list, tuple) else value
    is_scalar = hasattr(value, "dtype") and hasattr(value, "item") and getattr(value, "ndim", None) == 0
    return value.item() if is_scalar else value


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise user_error(str(path), "", "", f"cannot be read: {error.strerror}") from None
    except ValueError as error:  # TOML, UTF-8, or an integer of thousands of digits
        raise user_error(str(path), "", "", f"is not valid TOML: {error}") from None


def with_regions(source: Source) -> Source:
    """A hardware file that names a file of regions as its placement, with the regions in its place.

    Raises
    ------
    UserError : that file cannot be read, or holds anything but a list `regions`.
    """
    pipeline = source.document.get("pipeline")
    name = pipeline.get("placement") if isinstance(pipeline, Mapping) else None
    if not isinstance(name, str) or not name.endswith(".toml"):
        return source
    path = (source.base or Path.cwd()) / Path(name).expanduser()
    table = read_toml(path)
    problems = [
        Problem(str(path), key, repr(value), "unknown key; known: regions")
        for key, value in table.items()
        if key != "regions"
    ]
    regions = table.get("regions")
    if not isinstance(regions, list):
        given = "" if regions is None else repr(regions)
        problems.append(Problem(str(path), "regions", given, "should be a list with [row, col, rows, cols] per stage"))
    if problems:
        raise UserError(problems)
    document = {**source.document, "pipeline": {**source.document["pipeline"], "placement": regions}}
    included = {**source.included, "pipeline.placement": (str(path), "regions")}
    return Source(document, source.where, source.base, source.overrides, included)


def validate(kind: type[T], source: Source) -> T:
    """Turn dictionaries into a typed table; raises `UserError` with every problem."""
    try:
        return kind.model_validate(source.document)
    except ValidationError as error:
        raise UserError(problems_of(kind, error, source)) from None


def validate_all(*pairs: tuple[type[Table], Source]) -> list[Table]:
    """Validate several files and report the problems of all of them together."""
    tables: list[Table] = []
    problems: list[Problem] = []
    for kind, source in pairs:
        try:
            tables.append(validate(kind, source))
        except UserError as error:
            problems.extend(error.problems)
    if problems:
        raise UserError(problems)
    return tables


def problems_of(kind: type[Table], error: ValidationError, source: Source) -> list[Problem]:
    """Problems in the user's words: one per key, the alternatives of a union gathered into one line."""
    gathered: dict[str, tuple[str, list[str]]] = {}
    for item in error.errors(include_url=False):
        key = key_of(source.document, item["loc"])
        if item["type"] == "missing":
            value, allowed = "", "is missing"
        elif item["type"] == "extra_forbidden":
            value, allowed = repr(item["input"]), f"unknown key{_suggestion(kind, item['loc'])}"
        elif item["type"] == "union_tag_invalid":
            discriminator = item["ctx"]["discriminator"].strip("'")
            key, value = f"{key}.{discriminator}", repr(item["ctx"]["tag"])
            allowed = f"should be one of {item['ctx']['expected_tags']}"
        elif item["type"] == "union_tag_not_found":
            value, allowed = repr(item["input"]), f"needs the key {item['ctx']['discriminator']}"
        elif item["type"] in ("model_type", "model_attributes_type", "dict_type"):
            value, allowed = repr(item["input"]), "should be a table"
        else:
            value = repr(item["input"])
            allowed = item["msg"].removeprefix("Value error, ").replace("Input should", "should", 1)
        gathered.setdefault(key, (value, []))[1].append(allowed)
    within = [key for key in gathered if not any(other.startswith(f"{key}[") for other in gathered)]
    return [
        Problem(
            "--set" if _is_overridden(key, source) else source.where, key, gathered[key][0], _join(gathered[key][1])
        )
        for key in within
    ]


def _is_overridden(key: str, source: Source) -> bool:
    """Whether a key, or a table or list that it stands in, was given by `--set`."""
    return any(key == given or key.startswith((f"{given}.", f"{given}[")) for given in source.overrides)


def _join(alternatives: list[str]) -> str:
    unique = list(dict.fromkeys(alternatives))
    return unique[0] + "".join(f", or {text.removeprefix('should ')}" for text in unique[1:])


def key_of(document: Any, location: tuple[int | str, ...]) -> str:
    """The dotted path of a validation error, without the names pydantic adds for the members of unions."""
    key, here = "", document
    for position, part in enumerate(location):
        last = position == len(location) - 1
        if isinstance(part, int) and isinstance(here, list):
            key, here = f"{key}[{part}]", here[part]
        elif isinstance(here, Mapping) and (part in here or (last and not _is_union_name(part))):
            key, here = f"{key}.{part}" if key else str(part), here.get(part)
    return key


def _is_union_name(part: int | str) -> bool:
    return isinstance(part, str) and ("[" in part or part in ("str", "int", "float"))


def _suggestion(kind: type[Table], location: tuple[int | str, ...]) -> str:
    model: type[BaseModel] | None = kind
    parts = [str(part) for part in location[:-1]]
    while parts and model is not None:
        members = _members(model, parts[0])
        tagged = [m for m in members if len(parts) > 1 and parts[1] in _tags(m)]
        model, parts = (tagged[0], parts[2:]) if tagged else (members[0] if len(members) == 1 else None, parts[1:])
    known = list(model.model_fields) if model else []
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}" if known else ""


def _members(model: type[BaseModel], part: str) -> list[type[BaseModel]]:
    """The tables that may stand under a key: one, or the alternatives of a tagged union."""
    annotation = model.model_fields[part].annotation if part in model.model_fields else None
    candidates = [annotation, *get_args(annotation)]
    return [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]


def _tags(model: type[BaseModel]) -> tuple[str, ...]:
    """The values of `kind` by which a tagged union chooses this table."""
    return get_args(model.model_fields["kind"].annotation) if "kind" in model.model_fields else ()


def apply_overrides(assignments: Sequence[str], sources: Mapping[str, Source]) -> None:
    """Apply `key.path=value` to whichever of hardware, workload and run has that key.

    Raises `UserError` for a key that none has or more than one has (then it wants a prefix).
    """
    problems = []
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        path, text = path.strip(), text.strip()
        parts = path.split(".")
        owners = [name for name in sources if parts[0] == name and _accepts(TABLES[name], parts[1:])]
        if owners:
            parts = parts[1:]
        else:
            owners = [name for name in sources if _accepts(TABLES[name], parts)]
        if not equals or not path:
            problems.append(Problem("--set", assignment, "", "should be key.path=value"))
        elif not owners:
            problems.append(Problem("--set", path, text, f"no such key{_closest(path, sources)}"))
        elif len(owners) > 1:
            options = ", ".join(f"{name}.{path}" for name in owners)
            problems.append(Problem("--set", path, text, f"stands in more than one place: write one of {options}"))
        else:
            source, value = sources[owners[0]], toml_value(text)
            given = source.document.get(parts[0]) if owners[0] == "run" else None
            if given not in (None, value) and parts[0] not in source.overrides:
                problems.append(Problem("--set", path, text, f"contradicts {source.where}, which has {given!r}"))
                continue
            if isinstance(value, str) and _is_path(parts, value):
                value = str(Path(value).expanduser().absolute())  # a path from a shell starts where the shell is
            assign(source.document, parts, value, path)
            source.overrides.add(".".join(parts))
    if problems:
        raise UserError(problems)


def _is_path(parts: Sequence[str], value: str) -> bool:
    """Whether a key that stands in a file is a path relative to it."""
    return parts == ["data", "path"] or (parts == ["pipeline", "placement"] and value.endswith(".toml"))


def _accepts(model: type[BaseModel], parts: Sequence[str]) -> bool:
    if not parts or parts[0] not in model.model_fields:
        return False
    if len(parts) == 1:
        return True
    members = _members(model, parts[0])
    if members:
        return any(_accepts(m, parts[1:]) or m.model_config.get("extra") == "allow" for m in members)
    return "dict" in str(model.model_fields[parts[0]].annotation)


def _closest(path: str, sources: Mapping[str, Source]) -> str:
    known = [key for name in sources for key in _all_keys(TABLES[name])]
    close = [k for k in known if k.split(".")[-1] == path][:1] or difflib.get_close_matches(path, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _all_keys(model: type[BaseModel], prefix: str = "") -> Iterable[str]:
    for name in model.model_fields:
        yield prefix + name
        for member in _members(model, name):
            yield from _all_keys(member, f"{prefix}{name}.")


def assign(document: dict[str, Any], parts: Sequence[str], value: Any, key: str) -> None:
    """Set a nested key, making the tables on the way (copies: a caller's dictionary is not changed)."""
    for part in parts[:-1]:
        inner = document.get(part, {})
        if not isinstance(inner, Mapping):
            raise user_error("--set", key, value, f"{part} is not a table here")
        document[part] = dict(inner)
        document = document[part]
    if parts[-1] == "kind" and document.get("kind") not in (None, value):
        for other in KEYS_OF_A_KIND.get(parts[-2], ()):  # another kind has other keys: those of the old one go
            document.pop(other, None)
    document[parts[-1]] = value


def toml_value(text: str) -> Any:
    """A TOML value, or the bare text where it is none (`lockstep` for `"lockstep"`)."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text


def plain(table: BaseModel) -> dict[str, Any]:
    """A table as dictionaries, defaults filled in, without what is not set."""
    return table.model_dump(mode="python", exclude_none=True)


def dump_resolved(hardware: Hardware, workload: Workload, settings: Settings) -> str:
    """The text of `config.toml`: all that a rerun needs."""
    return tomli_w.dumps({"hardware": plain(hardware), "workload": plain(workload), "run": plain(settings)})


def read_either(name: str) -> tuple[Table, Source]:
    """Read and validate a file or shipped name, of either kind; raises `UserError` with its problems."""
    kinds: tuple[type[Table], ...] = (Hardware, Workload)
    path = Path(name)
    if not path.is_file():
        known = [(kind, shipped(kind)) for kind in kinds]
        found = [(kind, files[name]) for kind, files in known if name in files]
        if not found:
            names = ", ".join(stem for _, files in known for stem in files)
            raise user_error(
                name,
                "",
                "",
                f"no such file, and no shipped hardware or workload of that name; shipped: {names}",
            )
        kind, path = found[0]
    else:
        document = read_toml(path)
        likeness = {kind: len(document.keys() & kind.model_fields.keys() - {"name"}) for kind in kinds}
        kind = max(kinds, key=lambda k: likeness[k])
        if not likeness[kind]:
            raise user_error(
                name,
                "",
                "",
                "is neither a hardware file ([mesh], [core] ...) nor a workload ([model], [data] ...)",
            )
    source = Source(read_toml(path), name, path.resolve().parent)
    return validate(kind, with_regions(source) if kind is Hardware else source), source


def first_comment(path: Path) -> str:
    """The first sentence of a file's opening comment."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return " ".join(lines).partition(": ")[0].partition(". ")[0].rstrip(".")
