"""blocktrain generate: a model continues a prompt, in this process or behind a gateway; characters appear as soon as
their bytes are there. Next: serve/decode/exact.py, the ways to write; remote.py, the way through a gateway."""

from __future__ import annotations

import asyncio
import json
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktrain.serve.decode.mode import Mode

if TYPE_CHECKING:
    from blocktrain.serve.decode.exact import Request

Show = Callable[[str], None]


@dataclass(frozen=True)
class Output:
    """What was written and what it took, for --json."""

    text: str
    bytes: int
    traversals: int
    bytes_per_traversal: float
    seconds: float


def generate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The directory of a trained run, or a gateway's URL.")],
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = "",
    max_bytes: Annotated[int, typer.Option(metavar="N", help="How many bytes to write.")] = 200,
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed writes the same text.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest byte; above 1 is more daring.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest bytes of this mass only.")] = 1.0,
    mode: Annotated[
        Mode,
        typer.Option(
            help="A byte a traversal of the blocks; several, drafted by the first blocks and checked by all; or all in "
            "one sweep."
        ),
    ] = Mode.AUTOREGRESSIVE,
    candidates: Annotated[
        int | None, typer.Option(metavar="M", help="For a sweep: draft so many outputs, let all blocks choose.")
    ] = None,
    draft_bytes: Annotated[
        int | None, typer.Option(metavar="K", help="Draft so many bytes for one traversal, instead of what pays best.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Stop before this text. Repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document with what it took.")] = False,
    api_key: Annotated[
        str | None, typer.Option(envvar="BLOCKTRAIN_API_KEY", help="For a gateway that asks for one.")
    ] = None,
) -> None:
    """Let a trained model write."""
    from blocktrain.cli.shared.remote import is_url, write_remotely
    from blocktrain.serve.decode.exact import Request

    start = prompt.encode("utf-8", "surrogateescape")  # whatever bytes the shell passed
    request = Request(start, max_bytes, mode, temperature, top_p, seed, candidates, draft_bytes)
    show: Show = _ignore if as_json else _show
    if is_url(run):
        output = write_remotely(run, request, stop or [], show, api_key)
    else:
        output = asyncio.run(_write_here(Path(run), request, stop or [], show))
    print(json.dumps(asdict(output), indent=2) if as_json else "")


async def _write_here(run: Path, request: Request, stop: list[str], show: Show) -> Output:
    """In this process; the first blocks are a segment of their own, so that they can draft."""
    from contextlib import aclosing

    from blocktrain.cli.shared.scoring import open_trained
    from blocktrain.serve.decode.exact import DecodeStats, decode
    from blocktrain.serve.decode.text_stream import TextStream
    from blocktrain.serve.segment.segment import LocalForward

    forward = LocalForward.open(open_trained(run).path)
    text, stats, stream = "", DecodeStats(), TextStream(stop)
    async with aclosing(decode(forward, request)) as steps:
        async for step in steps:
            if step.stats.traversals == 1:
                show(request.prompt.decode("utf-8", "replace"))  # only now: a refused request prints nothing
            new = stream.feed(byte.value for byte in step.written)
            text, stats = text + new, step.stats
            show(new)
            if stream.stopped_by is not None:
                break
    rest = stream.finish()
    show(rest)
    return Output(text + rest, stats.written, stats.traversals, stats.bytes_per_traversal, stats.seconds)


def harmless(text: str) -> str:
    """Without the control characters by which a model could steer the terminal."""
    return "".join("�" if unicodedata.category(each) == "Cc" and each not in "\n\t" else each for each in text)


def _show(text: str) -> None:
    print(harmless(text) if sys.stdout.isatty() else text, end="", flush=True)


def _ignore(text: str) -> None:
    pass
