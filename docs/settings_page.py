"""Writes docs/settings.md from the code: every setting with its default, its range, what it does and when to
change it. What it does is the comment behind or above the field in settings.py; settings_when.toml says when. A test
compares page and code.

    python docs/settings_page.py
"""

from __future__ import annotations

import inspect
import json
import re
import tomllib
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from blocktrain.cli.commands.training.presets import COLUMNS, cells, cost_of, notes
from blocktrain.presets import PRESETS
from blocktrain.spec import TABLES, RunSpec, Settings

PAGE = Path(__file__).with_name("settings.md")
WHEN: dict[str, str] = tomllib.loads(Path(__file__).with_name("settings_when.toml").read_text())
HEAD = """# Settings

Every setting of a run, made from the code by `docs/settings_page.py`. Write a setting into the TOML file of a run, or
change it with `--set`, for example `--set train.steps=100`. A wrong key or value is refused with what is allowed. Equal
settings train equal weights. [The command line page](cli.md#settings) has an example of a file.

"""
SIGNS = {Ge: "at least {}", Gt: "above {}", Le: "at most {}", Lt: "below {}"}
FIELD = re.compile(r"^((?:    # .+\n)*)    (\w+): [^\n#]*?(?:  # (.+))?$", re.MULTILINE)


def page() -> str:
    parts = [HEAD, "## Top level\n\n", table("", RunSpec, [key for key in RunSpec.model_fields if key not in TABLES])]
    for name, kinds in TABLES.items():
        for kind in kinds:
            title = f'{name} (kind = "{kind.model_fields["kind"].default}")' if "kind" in kind.model_fields else name
            intro = " ".join((kind.__doc__ or "").split())
            parts.append(f"\n## {title}\n\n{intro}\n\n{table(f'{name}.', kind, list(kind.model_fields))}")
    return "".join([*parts, presets()])


def table(prefix: str, settings: type[Settings], keys: list[str]) -> str:
    sentences = comments(settings)
    rows = ["| key | default | allowed | what it does | change it when |", "| --- | --- | --- | --- | --- |"]
    for key in keys:
        field = settings.model_fields[key]
        cells = (f"`{prefix}{key}`", default(field), allowed(field), sentences[key], WHEN[prefix + key])
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def comments(settings: type[Settings]) -> dict[str, str]:
    """The comment behind each field, or the lines of comment above it."""
    found = FIELD.findall(inspect.getsource(settings))
    return {key: behind or " ".join(above.replace("#", "").split()) for above, key, behind in found}


def allowed(field: FieldInfo) -> str:
    return _kinds(field.annotation, field.metadata)


def _kinds(annotation: Any, limits: Any = ()) -> str:
    """ "a whole number, at least 1, or a list of them" """
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in inner)
    if origin in (Union, types.UnionType):
        return ", or ".join(_kinds(each) for each in inner)
    if origin is tuple:
        return f"a list: {_kinds(inner[0])}, each"
    if hasattr(annotation, "__metadata__"):
        return _kinds(
            annotation.__origin__, [x for each in annotation.__metadata__ for x in getattr(each, "metadata", [each])]
        )
    names = {bool: "`true` or `false`", int: "a whole number", float: "a number", str: "text", type(None): "left out"}
    values = [(SIGNS[type(each)], next(iter(vars_of(each)))) for each in limits if type(each) in SIGNS]
    return ", ".join([names[annotation], *(f"{words.format(plain_number(value))}" for words, value in values)])


def plain_number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def vars_of(limit: Ge | Gt | Le | Lt) -> list[float]:
    return [value for name in ("ge", "gt", "le", "lt") if isinstance(value := getattr(limit, name, None), int | float)]


def default(field: FieldInfo) -> str:
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return "left out" if value is None else f"`{json.dumps(value)}`"


def presets() -> str:
    """What each preset changes."""
    rows = ["| preset | changes |", "| --- | --- |"]
    plain = RunSpec().model_dump(mode="json")
    for name, spec in PRESETS.items():
        changed = [
            f"`{table}.{key} = {json.dumps(value)}`"
            for table, settings in spec.model_dump(mode="json").items()
            if isinstance(settings, dict)
            for key, value in settings.items()
            if value != plain[table].get(key)
        ]
        rows.append(f"| `{name}` | {', '.join(changed) or 'nothing'} |")
    return (
        "\n## Presets\n\nA preset is a complete set of settings. What each changes of the defaults:\n\n"
        + "\n".join(rows)
        + "\n\n"
        + takes()
    )


def takes() -> str:
    """What each preset takes, as `blocktrain presets` prints it."""
    excuse = "<!-- not measured: computed from the shapes -->"
    head = [*COLUMNS[:-1], f"{COLUMNS[-1]}{excuse}"]
    rows = [head, ["---"] * len(COLUMNS), *(cells(cost_of(name, spec)) for name, spec in PRESETS.items())]
    lines = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"What each takes, as `blocktrain presets` computes it:\n\n{lines}\n\n" + "".join(
        f"- {line[0].upper()}{line[1:]}.{excuse}\n" for line in notes()
    )


if __name__ == "__main__":
    PAGE.write_text(page())
