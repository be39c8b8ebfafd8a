"""blocktrain generate: the model continues a prompt; characters appear as soon as their bytes are there.
Next: model/stack.py, which draws the bytes."""

from __future__ import annotations

import codecs
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.options import require_positive
from blocktrain.errors import ConfigError


class Mode(StrEnum):
    AUTOREGRESSIVE = "autoregressive"
    SWEEP = "sweep"


def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a trained run.")],
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = "",
    max_bytes: Annotated[int, typer.Option(metavar="N", help="How many bytes to write.")] = 200,
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed writes the same text.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest byte; above 1 is more daring.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest bytes of this mass only.")] = 1.0,
    mode: Annotated[
        Mode, typer.Option(help="A byte at a time, or all in one sweep through the blocks.")
    ] = Mode.AUTOREGRESSIVE,
) -> None:
    """Let a trained model write."""
    _check(max_bytes, temperature, top_p)

    import torch

    from blocktrain.cli.scoring import open_trained
    from blocktrain.train.run import load_model

    model = load_model(open_trained(run))
    start = prompt.encode("utf-8", "surrogateescape")  # whatever bytes the shell passed
    generator = torch.Generator().manual_seed(seed)
    drawn: Iterable[int]
    if mode is Mode.SWEEP:
        drawn = model.sweep(start, max_bytes, generator)
    else:
        drawn = model.generate(start, max_bytes, generator, temperature, top_p)
    for text in characters(chain(start, drawn)):
        print(harmless(text) if sys.stdout.isatty() else text, end="", flush=True)
    print()


def characters(stream: Iterable[int]) -> Iterator[str]:
    """Whole characters as their last bytes come; bytes that are none become �."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for byte in stream:
        if text := decoder.decode(bytes([byte])):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text


def harmless(text: str) -> str:
    """Without the control characters by which a model could steer the terminal."""
    return "".join("�" if unicodedata.category(each) == "Cc" and each not in "\n\t" else each for each in text)


def _check(max_bytes: int, temperature: float, top_p: float) -> None:
    require_positive("--max-bytes", max_bytes)
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"--temperature {temperature} is out of range: give 0 or more")
    if not 0 < top_p <= 1:
        raise ConfigError(f"--top-p {top_p} is out of range: give more than 0 and at most 1")
