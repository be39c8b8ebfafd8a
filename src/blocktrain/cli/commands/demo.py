"""blocktrain demo: everything at once on one machine, as real processes: a coordinator and workers that train the small
preset, then stages and a gateway that serve it. Next: coordinator.py, worker.py, export.py and serve.py, the commands
that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktrain.cli.console import duration, quantity, say
from blocktrain.cli.options import EXIT_INTERRUPTED, read_spec, require_positive
from blocktrain.errors import BlockTrainError

if TYPE_CHECKING:
    from blocktrain.cli.commands.training.generate import Output
    from blocktrain.spec import RunSpec
    from blocktrain.swarm.worker.client import CoordinatorClient

LOOK_EVERY_S = 1.0
GRACE_S = 20.0
STAGES = 3
PROMPT_BYTES = 100
WORKERS = 4
STOPPING = (signal.SIGINT, signal.SIGTERM)


class DemoFailed(BlockTrainError):
    """One of the processes ended: its log says why."""


def demo(
    folder: Annotated[Path, typer.Option("--dir", metavar="DIR", help="Where all of it is kept.")] = Path("demo-run"),
    preset: Annotated[str, typer.Option(metavar="NAME", help="What is trained.")] = "small",
    workers: Annotated[int, typer.Option(metavar="N", help="Worker processes.")] = WORKERS,
    prompt: Annotated[str, typer.Option(help="What the model continues in the end.")] = "The president",
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting. Repeatable.")
    ] = None,
    stay: Annotated[
        bool | None, typer.Option("--stay/--leave", help="Go on serving in the end; the default on a terminal.")
    ] = None,
) -> None:
    """Train and serve a small model on this machine.

    A coordinator and workers train it as a swarm, then stages and a gateway serve it, each a process of its own. Ctrl-C
    stops all of them; the same command goes on where it was."""
    require_positive("--workers", workers)

    spec = read_spec(None, preset, None, None, changes)
    settings = ["--preset", preset]
    for change in (*shared_among(workers, spec), *(changes or ())):
        settings += ["--set", change]
    for number in STOPPING:  # also where the shell that started it has them ignored
        signal.signal(number, signal.default_int_handler)
    try:
        with ExitStack() as stack:
            model = _train(stack, folder, settings, workers)
            url = _serve(stack, folder, model)
            _continue(url, prompt)
            if stay if stay is not None else sys.stdout.isatty():
                say(f"\nthe model is served: open {url.removesuffix('/v1')} in a browser; Ctrl-C ends it")
                signal.pause()
    except KeyboardInterrupt:
        say(f"\nstopped: everything is kept in {folder}, the same command goes on")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def shared_among(workers: int, spec: RunSpec) -> list[str]:
    """Twice the work of one machine in all, whatever the number of workers: each takes its part of a step's windows.
    Rounds are short and often scored, so that there is something to see."""
    return [
        f"train.windows={max(1, 2 * spec.train.windows // workers)}",
        f"swarm.round_steps={min(spec.swarm.round_steps, 20)}",
        "swarm.evaluate_every=2",
    ]


# Training


def _train(stack: ExitStack, folder: Path, settings: Sequence[str], workers: int) -> Path:
    from blocktrain.cli.commands.swarm.export import export
    from blocktrain.swarm.worker.client import CoordinatorClient
    from blocktrain.wire.invite import parse_invite

    process = _start(stack, folder, "coordinator", ["coordinator", *settings, "--dir", str(folder / "swarm")])
    command = process.first_line()
    invite = command.split("'")[1]
    say(f"the coordinator runs; any machine that reaches it joins with: {command}")
    say(f"watch it train: {_dashboard(folder / 'swarm')}")
    with ExitStack() as crew:
        team = [process]
        for number in range(1, workers + 1):
            arguments = ["worker", invite, "--name", f"worker-{number}", "--home", str(folder / f"worker-{number}")]
            team.append(_start(crew, folder, f"worker-{number}", arguments, _threads_each(workers)))
        with CoordinatorClient(parse_invite(invite)) as client:
            _watch(client, team)
    export(invite, folder / "model", home=folder / "worker-1")
    return folder / "model"


def _dashboard(swarm: Path) -> str:
    """The coordinator's page, with the admin's token: it is this user's own run."""
    from blocktrain.cli.shared.serving import ADMIN_FILE, known_invite

    admin = known_invite(swarm / ADMIN_FILE)
    assert admin is not None, "the coordinator has written it before it printed its invite"
    return admin.page


def _watch(client: CoordinatorClient, team: Sequence[Process]) -> None:
    """Until every phase is trained and the result is scored."""
    from blocktrain.cli.shared.swarm_progress import all_finished, swarm_progress
    from blocktrain.spec import RunSpec

    with swarm_progress(RunSpec.model_validate(client.run_info().spec)) as show:
        while True:
            facts, curves = client.status(), client.curves()
            show(facts, curves)
            if all_finished(facts) and _newest_is_scored(facts):
                return
            for each in team:
                each.require_alive(may_end=each.name != "coordinator")
            time.sleep(LOOK_EVERY_S)


def _newest_is_scored(facts: Mapping[str, Any]) -> bool:
    return bool(facts["evaluations"]) and bool(facts["evaluations"][-1]["versions"] == facts["versions"])


# Serving


def _serve(stack: ExitStack, folder: Path, model: Path) -> str:
    arguments = ["serve", str(model), "--stages", str(STAGES), "--port", "0"]
    return _start(stack, folder, "serve", arguments).first_line()


def _continue(url: str, prompt: str) -> None:
    """By one sweep, and speculatively."""
    from blocktrain.cli.shared.remote import write_remotely
    from blocktrain.serve.decode.mode import Mode
    from blocktrain.serve.decode.request import Request

    for mode in (Mode.SWEEP, Mode.SPECULATIVE):
        say(f"\n{mode.value}:")
        request = Request(prompt.encode(), max_bytes=PROMPT_BYTES, mode=mode, temperature=0.7)
        output = write_remotely(url.removesuffix("/v1"), request, [], _show)
        print(flush=True)
        say(_effort(output))


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _effort(output: Output) -> str:
    return (
        f"({output.bytes} bytes in {output.traversals} traversals of the {STAGES} stages, {duration(output.seconds)}, "
        f"{quantity(output.bytes / max(output.seconds, 1e-9), 'B/s')})"
    )


# Processes


class Process:
    """One command of blocktrain; what it says beside its result is in a log."""

    def __init__(self, name: str, popen: subprocess.Popen[str], log: Path) -> None:
        self.name, self._popen, self._log = name, popen, log

    def first_line(self) -> str:
        """Its result so far, as soon as there is one."""
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline().strip()
        if not line:
            self._popen.wait()
            self.require_alive(may_end=False)
        return line

    def require_alive(self, *, may_end: bool) -> None:
        code = self._popen.poll()
        if code is None or (may_end and code == 0):
            return
        said = self._log.read_text(errors="replace").strip().splitlines()
        raise DemoFailed(
            f"{self.name} ended with {code} ({said[-1] if said else 'it said nothing'}): see {self._log}, and run the "
            f"same command again"
        )

    def end(self) -> None:
        self._popen.send_signal(signal.SIGINT)  # a worker hands in what it has
        try:
            self._popen.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        if self._popen.stdout:
            self._popen.stdout.close()


def _threads_each(workers: int) -> dict[str, str]:
    """The cores are shared: workers that each took all of them would wait for each other most of the time."""
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers))}


def _start(
    stack: ExitStack, folder: Path, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> Process:
    """Ended with the stack. In a session of its own, so that the terminal's Ctrl-C is for the demo alone."""
    log = folder / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as said, _uninterrupted():
        popen = subprocess.Popen(
            [sys.executable, "-m", "blocktrain", *arguments],
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,
            env={**(environment or {}), **os.environ},
        )
        process = Process(name, popen, log)
        stack.callback(process.end)
    return process


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """A Ctrl-C counts when the block is done: between a process's start and somebody who ends it, it would be lost."""
    asked: list[int] = []
    before = {number: signal.signal(number, lambda got, _: asked.append(got)) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if asked:
        raise KeyboardInterrupt
