"""docs/files.md says of every key of a user's files what the models say of it, and of no other; its examples are valid.

`python tests/test_files_documentation.py` prints all tables as they should be, to be pasted after a model has changed.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pbsim.config import Hardware, Settings, Source, Workload, read_source, shipped, validate
from pbsim.config.base import Table
from pbsim.config.hardware import Energy
from pbsim.datasets.arrays import KEYS
from pbsim.network.partition import RULES
from pbsim.optim import scale_recipe

PAGE = Path(__file__).resolve().parent.parent / "docs" / "files.md"


def referred(schema: dict[str, Any]) -> list[str]:
    """Names of the tables that a key's value may be."""
    alternatives = [schema, *schema.get("anyOf", []), *schema.get("oneOf", [])]
    return [one["$ref"].rpartition("/")[2] for one in alternatives if "$ref" in one]


def tables_of(kind: type[Table]) -> dict[str, dict[str, Any]]:
    """Heading to JSON schema of every table of a file, in the order of its keys; alternatives go by their `kind`."""
    root = kind.model_json_schema()
    found: dict[str, dict[str, Any]] = {}

    def visit(path: str, schema: dict[str, Any]) -> None:
        found[path] = schema
        for key, value in schema["properties"].items():
            names = referred(value)
            for name in names:
                inner = root["$defs"][name]
                place = f"{path}.{key}".lstrip(".")
                if name == "EnergyEntry":
                    place = f"{path}.ACTION"
                elif len(names) > 1:
                    place = f'{place}, kind = "{inner["properties"]["kind"]["const"]}"'
                visit(place, inner)

    visit("", root)
    return found


def number(limit: float) -> str:
    return "2^63" if limit == 2**63 else f"{int(limit):,}" if limit == int(limit) else f"{limit:g}"


def type_of(schema: dict[str, Any]) -> str:
    """A key's type in words."""
    if "anyOf" in schema:
        return " or ".join(type_of(one) for one in schema["anyOf"] if one.get("type") != "null")
    if referred(schema):
        return "table"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        return f"list of {type_of(schema['items'])}" if schema.get("items") else "list"
    name = {"object": "table", "boolean": "true or false"}.get(schema["type"], schema["type"])
    most = schema.get("maximum", schema.get("le", 2**31 - 1))
    limits = {
        "from {}": schema.get("minimum"),
        "above {}": schema.get("exclusiveMinimum"),
        "below {}": schema.get("exclusiveMaximum"),
        "to {}": None if most == 2**31 - 1 else most,
    }
    parts = [words.format(number(limit)) for words, limit in limits.items() if limit is not None]
    return " ".join([name, *parts])


def default_of(key: str, schema: dict[str, Any], required: list[str]) -> str:
    """A key's default in TOML, or a word for it."""
    if key in required:
        return "required"
    default = schema.get("default")
    if default is None:
        return "absent"
    if default == {} and not referred(schema):
        return "`{}`"
    if isinstance(default, dict):
        return f'`{{ kind = "{default["kind"]}" }}`' if "kind" in default else "its defaults"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f'`"{default}"`' if isinstance(default, str) else f"`{default}`"


def table_of(schema: dict[str, Any]) -> list[str]:
    """The lines of a table of the page."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, value in schema["properties"].items():
        meaning = " ".join(value.get("description", "").split())
        required = schema.get("required", [])
        lines.append(f"| `{key}` | {type_of(value)} | {default_of(key, value, required)} | {meaning} |")
    return lines


FILES: dict[str, type[Table]] = {"hardware": Hardware, "workload": Workload, "run": Settings}
EVERY = [(file, path, schema) for file, kind in FILES.items() for path, schema in tables_of(kind).items()]


def heading(file: str, path: str) -> str:
    if file == "run":
        return "[run]"
    if not path:
        return {"hardware": "Keys of the hardware file itself", "workload": "Keys of the workload file itself"}[file]
    name, comma, kind = path.partition(", ")
    return f"[{name}]{comma}{kind}"


def documented() -> dict[str, list[str]]:
    """The lines of the first table under every heading."""
    sections = re.split(r"^#+ (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {
        title.replace("`", ""): re.sub(r"\A[^|]*?(?=^\|)", "", body, flags=re.MULTILINE).split("\n\n")[0].splitlines()
        for title, body in zip(sections[::2], sections[1::2], strict=True)
    }


@pytest.mark.parametrize(("file", "path", "schema"), EVERY, ids=[heading(file, path) for file, path, _ in EVERY])
def test_every_key_is_documented_as_the_models_have_it(file, path, schema):
    assert documented()[heading(file, path)] == table_of(schema)


def test_no_other_table_is_documented():
    keyed = {title for title, lines in documented().items() if lines[:1] == ["| key | type | default | meaning |"]}
    assert keyed == {heading(file, path) for file, path, _ in EVERY}


@pytest.mark.parametrize(("file", "path", "schema"), EVERY, ids=[heading(file, path) for file, path, _ in EVERY])
def test_every_key_has_a_docstring(file, path, schema):
    assert [key for key, value in schema["properties"].items() if not value.get("description")] == []


def test_the_examples_are_valid_and_use_every_table():
    examples = [
        tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    ]
    machines = [example for example in examples if "mesh" in example]
    networks = [example for example in examples if "model" in example]
    assert machines
    assert networks
    for kind, found in ((Hardware, machines), (Workload, networks)):
        for example in found:
            validate(kind, Source(example, "example"))
    assert set(Hardware.model_fields) <= set(machines[0])
    assert set(Workload.model_fields) <= set(networks[0])
    for example in examples:
        if example not in machines and example not in networks:  # a table alone, in a shipped file
            kind, name = (Hardware, "mesh") if set(example) <= set(Hardware.model_fields) else (Workload, "digits_cnn")
            validate(kind, Source(read_source(kind, name).document | example, "example"))


def test_the_numbers_of_the_scaled_recipe_are_those_of_the_page():
    recipe = scale_recipe(validate(Workload, read_source(Workload, "digits_cnn")).training, 1)
    text = PAGE.read_text(encoding="utf-8")
    assert f"{recipe.lr:.3e}".replace("e-0", "e-") in text
    assert f"{recipe.momentum:.4f}" in text


def test_arrays_partition_rules_actions_and_shipped_files_are_named():
    text = PAGE.read_text(encoding="utf-8")
    actions = [name for name in Energy.model_fields if name != "table"]
    names = [*KEYS, *RULES, *actions, *shipped(Hardware), *shipped(Workload)]
    assert [name for name in names if f"`{name}`" not in text] == []


if __name__ == "__main__":
    for file, path, schema in EVERY:
        print(f"\n### {heading(file, path)}\n\n" + "\n".join(table_of(schema)))
