"""The app: the table of its commands, how errors are printed, and `main`. Each command is in the module of its name in
commands/, whose folders are the panels of --help. Commands import torch only when they run, so that help and errors
about options appear at once. Next: cli/commands/training/train.py, the simplest command."""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Annotated, Any

import typer

from blocktrain.cli.commands.demo.demo import demo
from blocktrain.cli.commands.fleet import fleet
from blocktrain.cli.commands.serving.distil import distil
from blocktrain.cli.commands.serving.gateway import gateway
from blocktrain.cli.commands.serving.keys import keys
from blocktrain.cli.commands.serving.push import push
from blocktrain.cli.commands.serving.serve import serve
from blocktrain.cli.commands.serving.stage import stage
from blocktrain.cli.commands.swarm.access_token import access_token
from blocktrain.cli.commands.swarm.ban import ban
from blocktrain.cli.commands.swarm.coordinator import coordinator
from blocktrain.cli.commands.swarm.doctor import doctor
from blocktrain.cli.commands.swarm.export import export
from blocktrain.cli.commands.swarm.ledger import ledger
from blocktrain.cli.commands.swarm.pause import pause
from blocktrain.cli.commands.swarm.resume import resume
from blocktrain.cli.commands.swarm.rollback import rollback
from blocktrain.cli.commands.swarm.simulate import simulate
from blocktrain.cli.commands.swarm.status import status
from blocktrain.cli.commands.swarm.verify import verify
from blocktrain.cli.commands.swarm.worker import worker
from blocktrain.cli.commands.training.compare import compare
from blocktrain.cli.commands.training.eval import evaluate
from blocktrain.cli.commands.training.generate import generate
from blocktrain.cli.commands.training.inspect import inspect
from blocktrain.cli.commands.training.prepare import prepare
from blocktrain.cli.commands.training.presets import presets
from blocktrain.cli.commands.training.reference import reference
from blocktrain.cli.commands.training.report import report
from blocktrain.cli.commands.training.train import train
from blocktrain.cli.console import say
from blocktrain.cli.help import Command, Group
from blocktrain.cli.hints import hint
from blocktrain.cli.options import EXIT_INTERRUPTED
from blocktrain.cli.shared.signals import stop_with_parent
from blocktrain.errors import EXIT_USER_ERROR, BlockTrainError
from blocktrain.io.allocator import use_huge_pages

EXIT_UNEXPECTED = 1
OUT_OF_MEMORY = ("can't allocate memory", "CUDA out of memory", "MPS backend out of memory")


class Commands(Group):
    """All commands. An error that leaves one becomes a sentence on stderr and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """help [COMMAND], which many programs have, is [COMMAND] --help."""
        return super().parse_args(ctx, [*args[1:], "--help"] if args[:1] == ["help"] else args)

    def invoke(self, ctx: Any) -> Any:
        with _explained(debug=bool(ctx.params.get("debug"))):
            return super().invoke(ctx)


@contextmanager
def _explained(debug: bool) -> Iterator[None]:
    try:
        yield
    except typer.TyperException as error:  # typer prints its own
        error.message += hint(error)
        raise
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except KeyboardInterrupt:
        say("interrupted: run the same command again to continue")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except Exception as error:
        if debug:
            raise
        say(f"error: {_sentence(error)}")
        expected = isinstance(error, BlockTrainError) or _is_lack_of_memory(error)
        raise typer.Exit(EXIT_USER_ERROR if expected else EXIT_UNEXPECTED) from None


def _is_lack_of_memory(error: Exception) -> bool:
    """torch raises a RuntimeError if a CPU has too little memory, and a class of its own for GPUs."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)


def _sentence(error: Exception) -> str:
    if isinstance(error, BlockTrainError):
        return str(error)
    if _is_lack_of_memory(error):
        return "this machine has too little memory for it: use a smaller model or more blocks, or close other programs"
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return f"unexpected {what[:200]} (run blocktrain --debug COMMAND … to see where)"


app = typer.Typer(
    name="blocktrain",
    cls=Commands,
    help="Train a language model in blocks: each block is trained alone, the blocks compose into one model.",
    epilog="Exit codes: 0 success, 1 internal error or failed check, 2 user error, 130 interrupted",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

START = "Start here"  # the panels of --help, in the order of the folders of commands/
TRAINING, SWARM, SERVING = "Train on one machine", "Train together", "Serve and publish"
INVITE = "'bt://example.org:7000/#…'"
COMMANDS: list[tuple[str, Callable[..., None], str]] = [
    (START, demo, "demo --workers 2"),
    (TRAINING, prepare, "prepare texts/ --tokenizer bpe:4096 --out corpus/"),
    (TRAINING, inspect, "inspect corpus/"),
    (TRAINING, presets, "presets --json"),
    (TRAINING, train, "train --preset small --set train.steps=200 --out run/"),
    (TRAINING, reference, "reference --preset small --out ref/"),
    (TRAINING, compare, "compare --preset small --out report/"),
    (TRAINING, evaluate, "eval run/ ref/ --split test --json"),
    (TRAINING, generate, 'generate run/ --prompt "The president" --max-bytes 200'),
    (TRAINING, report, "report run/ --out page.html"),
    (SWARM, coordinator, "coordinator --preset small --dir swarm/"),
    (SWARM, worker, f"worker {INVITE} --nice"),
    (SWARM, doctor, f"doctor {INVITE}"),
    (SWARM, status, f"status {INVITE} --watch"),
    (SWARM, export, f"export {INVITE} model/"),
    (SWARM, ledger, f"ledger {INVITE}"),
    (SWARM, verify, "verify swarm/ --repair"),
    (SWARM, simulate, "simulate run.toml --workers 10000 --churn 0.2"),
    (SWARM, pause, "pause swarm/"),
    (SWARM, resume, "resume swarm/"),
    (SWARM, ban, "ban swarm/ --key 'Brisk Otter 3f'"),
    (SWARM, rollback, "rollback swarm/ --block 0 --to 12"),
    (SERVING, distil, "distil run/ --stages 3"),
    (SERVING, serve, "serve run/ --stages 3"),
    (SERVING, stage, "stage model/ --blocks 0-1 --keys chain.key"),
    (SERVING, gateway, "gateway --stages tcp://a:7001,tcp://b:7001 --keys my.key"),
    (SERVING, push, "push model/ alice/speeches --license cc-by-4.0 --dry-run"),
    (SERVING, keys, "keys chain.key   or   blocktrain keys export worker.key"),
]


def _paragraphs(command: Callable[..., None]) -> str:
    """The docstring, wrapped to the terminal's width instead of the source's."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (command.__doc__ or "").split("\n\n"))


for _panel, _command, _example in COMMANDS:
    app.command(
        _example.split()[0],
        cls=Command,
        help=_paragraphs(_command),
        rich_help_panel=_panel,
        epilog=f"Example:  blocktrain {_example}",
    )(_command)


def _warn_of_old_name() -> None:
    say("warning: blocktrain token is now called blocktrain access-token; the old name goes with the next version")


app.add_typer(
    access_token,
    name="access-token",
    rich_help_panel=SWARM,
    epilog="Example:  blocktrain access-token add alice --role viewer --dir swarm/",
)
app.add_typer(access_token, name="token", hidden=True, callback=_warn_of_old_name)
app.add_typer(
    fleet,
    name="fleet",
    rich_help_panel=SWARM,
    epilog="Example:  blocktrain fleet up run.toml --workers 8 --stages 3",
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"blocktrain {version('blocktrain')}")
        raise typer.Exit


@app.callback()
def _global_options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True, help="Stop when stdin closes.")] = False,
) -> None:
    """Options of every command. The help text is the app's."""
    if with_parent:
        stop_with_parent()


def main() -> None:
    _quiet_libraries()
    use_huge_pages()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show ± still shows the rest
    app()


def _quiet_libraries() -> None:
    """Python's warnings are for developers, who set -W or PYTHONWARNINGS. --jobs inherits the environment."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        os.environ["PYTHONWARNINGS"] = "ignore"
    for name in ("torch", "kaleido", "choreographer"):
        logging.getLogger(name).setLevel(logging.ERROR)


if __name__ == "__main__":
    main()
