"""The app: its commands, what its errors look like, and `main`. Each command is in the module of its name, with imports
that are quick: torch comes in when a command does its work, so that help and a mistyped option answer at once."""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from blocktrain.cli.commands.demo import demo
from blocktrain.cli.commands.serving.gateway import gateway
from blocktrain.cli.commands.serving.keys import keys
from blocktrain.cli.commands.serving.serve import serve
from blocktrain.cli.commands.serving.stage import stage
from blocktrain.cli.commands.swarm.coordinator import coordinator
from blocktrain.cli.commands.swarm.doctor import doctor
from blocktrain.cli.commands.swarm.export import export
from blocktrain.cli.commands.swarm.ledger import ledger
from blocktrain.cli.commands.swarm.pause import pause, resume
from blocktrain.cli.commands.swarm.status import status
from blocktrain.cli.commands.swarm.token import token
from blocktrain.cli.commands.swarm.worker import worker
from blocktrain.cli.commands.training.compare import compare
from blocktrain.cli.commands.training.eval import evaluate
from blocktrain.cli.commands.training.generate import generate
from blocktrain.cli.commands.training.reference import reference
from blocktrain.cli.commands.training.report import report
from blocktrain.cli.commands.training.train import train
from blocktrain.cli.console import say
from blocktrain.cli.options import EXIT_INTERRUPTED
from blocktrain.errors import EXIT_USER_ERROR, BlockTrainError
from blocktrain.io.allocator import use_huge_pages

EXIT_UNEXPECTED = 1


class Commands(TyperGroup):
    """The commands, with every error that leaves one turned into a sentence and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        with _explained(debug=bool(ctx.params.get("debug"))):
            return super().invoke(ctx)


@contextmanager
def _explained(debug: bool) -> Iterator[None]:
    try:
        yield
    except (typer.Exit, typer.Abort, typer.TyperException, BrokenPipeError):
        raise  # typer's own, which it ends well
    except KeyboardInterrupt:
        say("interrupted: run the same command again to continue")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except Exception as error:
        if debug:
            raise
        say(f"error: {_sentence(error)}")
        raise typer.Exit(EXIT_USER_ERROR if isinstance(error, BlockTrainError) else EXIT_UNEXPECTED) from None


def _sentence(error: Exception) -> str:
    if isinstance(error, BlockTrainError):
        return str(error)
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return f"unexpected {what[:200]} (blocktrain --debug COMMAND … shows where)"


app = typer.Typer(
    name="blocktrain",
    cls=Commands,
    help="Train a language model in blocks: each block is trained alone, the blocks compose into one model.",
    epilog="Start here:  blocktrain train --preset small --out run/   then   blocktrain eval run/\n\n"
    "Ends with 0 when all went well, with 2 when you can mend it (the sentence says how), with 1 on a failure of "
    "BlockTrain's own or of a check of doctor, with 130 after Ctrl-C. docs/cli.md says more.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TRAIN, USE, TOGETHER, SERVE = "Train", "Measure and use", "Train together", "Serve"
app.command(
    rich_help_panel=TRAIN,
    epilog="Example:  blocktrain train --preset small --set train.steps=200 --out run/",
)(train)
app.command(
    rich_help_panel=TRAIN,
    epilog="Example:  blocktrain reference --preset small --out ref/",
)(reference)
app.command(
    rich_help_panel=TRAIN,
    epilog="Example:  blocktrain compare --preset small --out report/",
)(compare)
app.command(
    rich_help_panel=TRAIN,
    epilog="Example:  blocktrain demo --workers 2",
)(demo)
app.command(
    "eval",
    rich_help_panel=USE,
    epilog="Example:  blocktrain eval run/ ref/ --split test --json",
)(evaluate)
app.command(
    rich_help_panel=USE,
    epilog='Example:  blocktrain generate run/ --prompt "The president" --max-bytes 200 --seed 1',
)(generate)
app.command(
    rich_help_panel=USE,
    epilog="Example:  blocktrain report run/ --out page.html",
)(report)
app.command(
    rich_help_panel=TOGETHER,
    epilog="Example:  blocktrain coordinator --preset small --dir swarm/ --host 0.0.0.0 --public train.example.org",
)(coordinator)
app.command(
    rich_help_panel=TOGETHER,
    epilog="Example:  blocktrain worker 'bt://train.example.org:7000/#…'",
)(worker)
app.command(
    rich_help_panel=TOGETHER,
    epilog="Example:  blocktrain doctor 'bt://train.example.org:7000/#…'",
)(doctor)
app.command(
    rich_help_panel=TOGETHER,
    epilog="Example:  blocktrain status 'bt://train.example.org:7000/#…' --watch",
)(status)
app.command(
    rich_help_panel=TOGETHER,
    epilog="Example:  blocktrain export 'bt://train.example.org:7000/#…' model/   or   blocktrain export run/ --hf hf/",
)(export)
app.command(
    rich_help_panel=TOGETHER,
    epilog="Example:  blocktrain ledger 'bt://train.example.org:7000/#…'",
)(ledger)
for _command in (pause, resume):
    app.command(
        rich_help_panel=TOGETHER,
        epilog=f"Example:  blocktrain {_command.__name__} 'bt://train.example.org:7000/#…'",
    )(_command)
app.add_typer(
    token,
    name="token",
    rich_help_panel=TOGETHER,
    epilog="Example:  blocktrain token add alice --role viewer --dir swarm/",
)
app.command(
    rich_help_panel=SERVE,
    epilog="Example:  blocktrain serve run/ --stages 3",
)(serve)
app.command(
    rich_help_panel=SERVE,
    epilog="Example:  blocktrain stage model/ --blocks 0-1 --listen tcp://0.0.0.0:7001 --keys chain.key",
)(stage)
app.command(
    rich_help_panel=SERVE,
    epilog="Example:  blocktrain gateway --stages tcp://a:7001,tcp://b:7001 --keys chain.key",
)(gateway)
app.command(
    rich_help_panel=SERVE,
    epilog="Example:  blocktrain keys chain.key",
)(keys)


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
) -> None:
    """The help text is the app's."""


def main() -> None:
    _quiet_libraries()
    use_huge_pages()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no ± still shows the rest
    app()


def _quiet_libraries() -> None:
    """Warnings are for developers, who set -W or PYTHONWARNINGS. The environment takes the choice to --jobs."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        os.environ["PYTHONWARNINGS"] = "ignore"
    for name in ("torch", "kaleido", "choreographer"):
        logging.getLogger(name).setLevel(logging.ERROR)


if __name__ == "__main__":
    main()
