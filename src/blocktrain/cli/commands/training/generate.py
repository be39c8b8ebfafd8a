"""blocktrain generate: a model continues a prompt, in this process or behind a gateway. Characters appear as soon as
they are known. Next: serve/decode/decoder.py, the decoding modes; cli/shared/gateway_client.py, for gateways."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import unicodedata
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktrain.cli.console import say
from blocktrain.cli.options import read_secret, require_positive
from blocktrain.errors import ConfigError
from blocktrain.sampling_settings import READABLE_TEMPERATURE
from blocktrain.serve.decode.request import Mode

if TYPE_CHECKING:
    from blocktrain.cli.shared.gateway_client import Output, Show
    from blocktrain.serve.decode.request import Request

MAX_BYTES = 200
ADDRESS = re.compile(r"[\w.-]+:\d+(/.*)?")  # HOST:PORT


def generate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run directory, or the URL of a gateway.")],
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "",
    max_bytes: Annotated[int | None, typer.Option(metavar="N", help="Bytes to generate. Default: 200.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help="How many tokens to generate: bytes, unless the model has a tokenizer."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed. The same seed gives the same text.")] = 0,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 takes the likeliest token; higher values vary more. Default: 0.7, or 1 for a sweep."),
    ] = None,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens with this total probability.")] = 1.0,
    mode: Annotated[
        Mode,
        typer.Option(
            metavar="MODE",
            help="autoregressive: one token per traversal of the blocks. speculative: several tokens, drafted by the "
            "first blocks and checked by all. sweep: an exact beginning, then all tokens in one traversal.",
        ),
    ] = Mode.AUTOREGRESSIVE,
    candidates: Annotated[
        int | None, typer.Option(metavar="M", help="For a sweep: draft M outputs and let all blocks choose.")
    ] = None,
    draft_bytes: Annotated[
        int | None, typer.Option(metavar="K", help="Draft K tokens per traversal. Default: the fastest length.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Stop before this text. Repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document with the text and its cost.")] = False,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="BLOCKTRAIN_API_KEY", help="API key for a gateway; @FILE or - for stdin.", callback=read_secret
        ),
    ] = None,
) -> None:
    """Generate text with a trained model.

    For an unfinished run, the last saved weights are used."""
    from blocktrain.cli.shared.gateway_client import generate_remotely, is_url
    from blocktrain.serve.decode.request import Request

    start = prompt.encode("utf-8", "surrogateescape")  # whatever bytes the shell passed
    if temperature is None:  # a sweep of a model that denoises has none
        temperature = 1.0 if mode is Mode.SWEEP and candidates is None else READABLE_TEMPERATURE
    longest, longest_bytes = _limits(max_tokens, max_bytes)
    request = Request(start, longest, mode, temperature, top_p, seed, candidates, draft_bytes)
    show: Show = (lambda text: None) if as_json else _show
    if is_url(run):
        output = generate_remotely(run, request, stop or [], show, api_key, longest_bytes)
    elif ADDRESS.fullmatch(run) and not Path(run).exists():
        raise ConfigError(f"{run} is not a directory: if a gateway answers there, write http://{run}")
    else:
        output = asyncio.run(_generate_here(Path(run), request, longest_bytes, stop or [], show))
    print(json.dumps(asdict(output), indent=2) if as_json else "")
    if unread := output.prompt_bytes_unread:
        end = f"it read the last {len(start) - unread}"
        say(f"the prompt has {len(start)} bytes, which is more than the model reads: {end}")


def _limits(max_tokens: int | None, max_bytes: int | None) -> tuple[int, int | None]:
    """The most tokens and, if that is limited too, bytes. A token has at least one byte."""
    if max_tokens is None:
        max_bytes = MAX_BYTES if max_bytes is None else max_bytes
        return max_bytes, max_bytes
    require_positive("--max-bytes", max_bytes)
    return max_tokens, max_bytes


async def _generate_here(run: Path, request: Request, longest_bytes: int | None, stop: list[str], show: Show) -> Output:
    """In this process. The first blocks are their own segment, so that they can draft."""
    from blocktrain.cli.shared.gateway_client import Output
    from blocktrain.cli.shared.scoring import half_trained
    from blocktrain.io.checkpoint import RunDirectory
    from blocktrain.serve.decode.decoder import decode
    from blocktrain.serve.decode.request import DecodeStats, TextStream
    from blocktrain.serve.segment.local import LocalForward
    from blocktrain.text import load_run_tokenizer

    if so_far := half_trained(run):
        tokenizer = load_run_tokenizer(RunDirectory.open(run))
        forward = LocalForward.of(so_far.spec, so_far.tensors, "unfinished", tokenizer)
    else:
        forward = LocalForward.open(run)
    text, written, stats, stream = "", 0, DecodeStats(), TextStream(stop)
    async with aclosing(decode(forward, request)) as steps:
        async for step in steps:
            if step.stats.traversals == 1:
                show(request.prompt.decode("utf-8", "replace"))  # not earlier: a refused request prints nothing
            data = forward.info.tokenizer.decode(token.value for token in step.written)
            data = data if longest_bytes is None else data[: longest_bytes - written]
            new = stream.feed(data)
            text, written, stats = text + new, written + len(data), step.stats
            show(new)
            if stream.stopped_by is not None or written == longest_bytes:
                break
    rest = stream.finish()
    show(rest)
    per_traversal = written / max(1, stats.traversals)
    cost = (written, stats.traversals, per_traversal, stats.seconds, stats.prompt_bytes_unread, stats.written)
    return Output(text + rest, *cost, stats.exact)


def harmless(text: str) -> str:
    """Without control characters, which could control the terminal."""
    return "".join("�" if unicodedata.category(each) == "Cc" and each not in "\n\t" else each for each in text)


def _show(text: str) -> None:
    print(harmless(text) if sys.stdout.isatty() else text, end="", flush=True)
