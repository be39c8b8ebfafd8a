"""blocktrain generate: a model continues a prompt, in this process or behind a gateway. Characters appear as soon as
their bytes are known. Next: serve/decode/decoder.py, the decoding modes; cli/shared/gateway_client.py, for gateways."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import unicodedata
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktrain.cli.console import say
from blocktrain.cli.options import read_secret
from blocktrain.errors import ConfigError
from blocktrain.sampling_settings import READABLE_TEMPERATURE
from blocktrain.serve.decode.request import Mode

if TYPE_CHECKING:
    from blocktrain.cli.shared.gateway_client import Output, Show
    from blocktrain.io.checkpoint import RunDirectory
    from blocktrain.model.stack import BlockModel
    from blocktrain.serve.decode.request import Request


def generate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The directory of a trained run, or the URL of a gateway.")],
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "",
    max_bytes: Annotated[int, typer.Option(metavar="N", help="How many bytes to generate.")] = 200,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed. The same seed gives the same text.")] = 0,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 takes the likeliest byte; higher values vary more. Default: 0.7, or 1 for a sweep."),
    ] = None,
    top_p: Annotated[float, typer.Option(help="Draw only from the likeliest bytes of this total probability.")] = 1.0,
    mode: Annotated[
        Mode,
        typer.Option(
            metavar="MODE",
            help="autoregressive: one byte per traversal of the blocks. speculative: several bytes, drafted by the "
            "first blocks and checked by all. sweep: all bytes in one traversal.",
        ),
    ] = Mode.AUTOREGRESSIVE,
    candidates: Annotated[
        int | None, typer.Option(metavar="M", help="For a sweep: draft M outputs and let all blocks choose.")
    ] = None,
    draft_bytes: Annotated[
        int | None, typer.Option(metavar="K", help="Draft K bytes per traversal. Default: the fastest length.")
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

    A run whose training has not ended writes with what is saved now."""
    from blocktrain.cli.shared.gateway_client import generate_remotely, is_url
    from blocktrain.serve.decode.request import Request

    start = prompt.encode("utf-8", "surrogateescape")  # whatever bytes the shell passed
    if temperature is None:  # a sweep of a model that denoises has none
        temperature = 1.0 if mode is Mode.SWEEP and candidates is None else READABLE_TEMPERATURE
    request = Request(start, max_bytes, mode, temperature, top_p, seed, candidates, draft_bytes)
    show: Show = (lambda text: None) if as_json else _show
    if is_url(run):
        output = generate_remotely(run, request, stop or [], show, api_key)
    else:
        output = asyncio.run(_generate_here(Path(run), request, stop or [], show))
    print(json.dumps(asdict(output), indent=2) if as_json else "")
    if unread := output.prompt_bytes_unread:
        read = len(start) - unread
        say(f"the prompt has {len(start)} bytes, which is more than the model reads: it read the last {read}")


async def _generate_here(run: Path, request: Request, stop: list[str], show: Show) -> Output:
    """In this process. The first blocks are their own segment, so that they can draft."""
    from blocktrain.cli.shared.gateway_client import Output
    from blocktrain.cli.shared.scoring import half_trained
    from blocktrain.io.checkpoint import RunDirectory
    from blocktrain.serve.decode.decoder import decode
    from blocktrain.serve.decode.request import DecodeStats, TextStream
    from blocktrain.serve.segment.local import LocalForward
    from blocktrain.train.run import load_model

    so_far = half_trained(run)
    opened = RunDirectory.open(run)
    if opened.tokenizer_file() is not None:
        return _generate_tokens(opened, so_far.model() if so_far else load_model(opened), request, stop, show)
    forward = LocalForward.of(so_far.spec, so_far.tensors, "half trained") if so_far else LocalForward.open(run)
    text, stats, stream = "", DecodeStats(), TextStream(stop)
    async with aclosing(decode(forward, request)) as steps:
        async for step in steps:
            if step.stats.traversals == 1:
                show(request.prompt.decode("utf-8", "replace"))  # not earlier: a refused request prints nothing
            new = stream.feed(byte.value for byte in step.written)
            text, stats = text + new, step.stats
            show(new)
            if stream.stopped_by is not None:
                break
    rest = stream.finish()
    show(rest)
    cost = (stats.written, stats.traversals, stats.bytes_per_traversal, stats.seconds, stats.prompt_bytes_unread)
    return Output(text + rest, *cost)


def _generate_tokens(run: RunDirectory, model: BlockModel, request: Request, stop: list[str], show: Show) -> Output:
    """With a tokenizer: one token per traversal, in this process."""
    from blocktrain.cli.shared.gateway_client import Output
    from blocktrain.model.stack import window_start
    from blocktrain.serve.decode.request import TextStream
    from blocktrain.text import generate_pieces, load_run_tokenizer

    if request.mode is not Mode.AUTOREGRESSIVE:
        raise ConfigError(f"a model with a tokenizer cannot generate in mode {request.mode} yet: leave --mode out")
    tokenizer, stream = load_run_tokenizer(run), TextStream(stop)
    began_s, text, written, traversals = time.perf_counter(), "", 0, 0
    show(request.prompt.decode("utf-8", "replace"))
    settings = (request.max_bytes, request.seed, request.temperature, request.top_p)
    for piece in generate_pieces(model, tokenizer, request.prompt, *settings):
        new = stream.feed(piece)
        text, written, traversals = text + new, written + len(piece), traversals + 1
        show(new)
        if stream.stopped_by is not None:
            break
    rest = stream.finish()
    show(rest)
    tokens = tokenizer.encode(request.prompt).tolist()
    unread = len(tokenizer.decode(tokens[: window_start(len(tokens), model.spec.model.context)]))
    return Output(text + rest, written, traversals, written / traversals, time.perf_counter() - began_s, unread)


def harmless(text: str) -> str:
    """Without control characters, which could control the terminal."""
    return "".join("�" if unicodedata.category(each) == "Cc" and each not in "\n\t" else each for each in text)


def _show(text: str) -> None:
    print(harmless(text) if sys.stdout.isatty() else text, end="", flush=True)
