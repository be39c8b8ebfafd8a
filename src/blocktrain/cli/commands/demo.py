"""blocktrain demo: everything on one machine, as real processes: a coordinator and workers train a model, then stages
and a gateway serve it. It finds the coordinator by the invite in its directory and the gateway by its address file.
Next: cli/commands/swarm/coordinator.py and cli/commands/serving/serve.py, two of the commands that it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from blocktrain.cli.console import counted, duration, quantity, say, wrapped
from blocktrain.cli.options import EXIT_INTERRUPTED, DeviceName, chosen_device, read_spec, require_positive
from blocktrain.cli.shared.address_file import POLL_S, read_address
from blocktrain.cli.shared.progress import num_finished, swarm_progress
from blocktrain.cli.shared.signals import STOP_SIGNALS, interrupts_delayed
from blocktrain.errors import BlockTrainError
from blocktrain.wire.invite import INVITE_FILE

if TYPE_CHECKING:
    from blocktrain.cli.shared.gateway_client import Output
    from blocktrain.spec import RunSpec
    from blocktrain.swarm.worker.client import CoordinatorClient
    from blocktrain.wire.invite import Invite

Found = TypeVar("Found")
LOOK_EVERY_S = 1.0
START_LIMIT_S = 1800.0  # a slow machine may take minutes until a process listens
GRACE_S = 20.0
STAGES = 3
PROMPT_BYTES = 100
WORKERS = 4
LAST_LINES = 5  # of a log, shown when its process failed


class DemoFailed(BlockTrainError):
    """One of the processes failed. The message ends with the end of its log."""


def demo(
    folder: Annotated[Path, typer.Option("--dir", metavar="DIR", help="Keep everything there.")] = Path("demo-run"),
    preset: Annotated[str, typer.Option(metavar="NAME", help="The settings of the model.")] = "small",
    workers: Annotated[int, typer.Option(metavar="N", help="Number of worker processes.")] = WORKERS,
    prompt: Annotated[str, typer.Option(help="The text that the trained model continues.")] = "The president",
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

    A coordinator and workers train it as a swarm, then stages and a gateway serve it. Each is its own process. Ctrl-C
    stops all of them; the same command continues."""
    require_positive("--workers", workers)
    require_positive("--threads", threads)
    if device is not None:
        chosen_device(device)  # refused here, not by every process
    machine = [*(["--device", device] if device else []), *(["--threads", str(threads)] if threads else [])]

    spec = read_spec(None, preset, None, None, changes)
    settings = ["--preset", preset]
    for change in (*shared_among(workers, spec), *(changes or ())):
        settings += ["--set", change]
    for number in STOP_SIGNALS:  # also if the shell that started it ignores them
        signal.signal(number, signal.default_int_handler)
    try:
        with ExitStack() as stack:
            model = _train(stack, folder, settings, workers, machine)
            url = _serve(stack, folder, model, machine)
            _continue(url, prompt)
            if stay if stay is not None else sys.stdout.isatty():
                tell("\nThe model is being served. Try it in a browser:")
                tell(f"  {url.removesuffix('/v1')}\nCtrl-C stops it.")
                signal.pause()
    except DemoFailed as failed:
        message, *end_of_log = str(failed).splitlines()
        say(*end_of_log)
        raise DemoFailed(message) from None
    except KeyboardInterrupt:
        tell(f"\nstopped: everything is saved in {folder}, run the same command again to continue")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def shared_among(workers: int, spec: RunSpec) -> list[str]:
    """Settings for this number of workers. All together process twice the windows of one machine per step, however many
    they are. Rounds are short and evaluated often, so that progress is visible."""
    return [
        f"train.windows={max(1, 2 * spec.train.windows // workers)}",
        f"swarm.round_steps={min(spec.swarm.round_steps, 20)}",
        "swarm.evaluate_every=2",
    ]


def tell(text: str) -> None:
    """Sentences are wrapped. Indented lines are addresses and commands, which people copy."""
    for line in text.split("\n"):
        say(*[line] if line.startswith("  ") else wrapped(line, stream=sys.stderr).split("\n"))


# Training


def _train(stack: ExitStack, folder: Path, settings: Sequence[str], workers: int, machine: Sequence[str]) -> Path:
    from blocktrain.cli.commands.swarm.export import export
    from blocktrain.swarm.coordinator.server import ADMIN_FILE, known_invite
    from blocktrain.swarm.worker.client import CoordinatorClient

    swarm = folder / "swarm"
    tell(f"Starting a coordinator. Everything is saved in {folder}; logs are in {folder / 'logs'}.")
    coordinator = _start(stack, folder, "coordinator", ["coordinator", *settings, "--dir", str(swarm)])
    invite = coordinator.wait_until(lambda: _invite_that_answers(swarm / INVITE_FILE))
    admin = known_invite(swarm / ADMIN_FILE)
    assert admin is not None, "the coordinator writes it before it answers"
    tell(f"The coordinator is running. Watch the training in a browser:\n  {admin.page}")
    tell(f"More workers can join from another terminal:\n  blocktrain worker '@{swarm / INVITE_FILE}'")
    tell(f"Starting {counted(workers, 'worker')}.")
    with ExitStack() as running:
        processes = [coordinator]
        for number in range(1, workers + 1):
            arguments = ["worker", f"@{swarm / INVITE_FILE}", "--name", f"worker-{number}"]
            arguments += ["--home", str(folder / f"worker-{number}"), *machine]
            processes.append(_start(running, folder, f"worker-{number}", arguments, _threads_each(workers)))
        with CoordinatorClient(invite) as client:
            _watch(client, processes)
    export(str(invite), folder / "model", home=folder / "worker-1")
    return folder / "model"


def _invite_that_answers(path: Path) -> Invite | None:
    """The coordinator's invite once the coordinator answers. The file alone is not enough: it may be of an earlier
    start."""
    from blocktrain.swarm.coordinator.server import known_invite
    from blocktrain.swarm.worker.client import CoordinatorClient

    invite = known_invite(path)
    if invite is None:
        return None
    try:
        with CoordinatorClient(invite, patience_s=0.0) as client:
            client.run_info()
    except BlockTrainError:
        return None
    return invite


def _watch(client: CoordinatorClient, processes: Sequence[Process]) -> None:
    """Shows progress until every phase is trained and the result is evaluated."""
    from blocktrain.cli.shared.training import phase_label
    from blocktrain.spec import RunSpec

    spec = RunSpec.model_validate(client.run_info().spec)
    with swarm_progress({phase.index: phase_label(spec, phase) for phase in spec.phases}) as show:
        while True:
            status = client.status()
            show(status, client.curves())
            evaluated = status["evaluations"] and status["evaluations"][-1]["versions"] == status["versions"]
            if num_finished(status) == status["num_phases"] and evaluated:
                return
            for process in processes:
                process.check(may_end=process.name != "coordinator")
            time.sleep(LOOK_EVERY_S)


# Serving


def _serve(stack: ExitStack, folder: Path, model: Path, machine: Sequence[str]) -> str:
    """Returns the gateway's URL."""
    tell(f"Starting {STAGES} stages and a gateway.")
    file = folder / "serve.json"
    arguments = ["serve", str(model), "--stages", str(STAGES), "--port", "0", "--address-file", str(file), *machine]
    server = _start(stack, folder, "serve", arguments)
    return server.wait_until(lambda: read_address(file, server.pid))


def _continue(url: str, prompt: str) -> None:
    """Lets the model continue the prompt: in one sweep, then speculatively."""
    from blocktrain.cli.commands.training.generate import harmless
    from blocktrain.cli.shared.gateway_client import generate_remotely
    from blocktrain.serve.decode.request import Mode, Request

    for mode in (Mode.SWEEP, Mode.SPECULATIVE):
        tell(f"\n{mode.value}:")
        request = Request(prompt.encode(), max_bytes=PROMPT_BYTES, mode=mode, temperature=0.7)
        output = generate_remotely(url, request, [], lambda text: print(harmless(text), end="", flush=True))
        print(flush=True)
        tell(_effort(output))


def _effort(output: Output) -> str:
    size, traversals = counted(output.bytes, "byte"), counted(output.traversals, "traversal")
    speed = quantity(output.bytes / max(output.seconds, 1e-9), "B/s")
    return f"({size} in {traversals} of the {STAGES} stages, {duration(output.seconds)}, {speed})"


# Processes


class Process:
    """A command of blocktrain, running. What it prints beside its result goes to its log."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.name, self._popen, self._log = name, popen, log

    @property
    def pid(self) -> int:
        return self._popen.pid

    def wait_until(self, look: Callable[[], Found | None], limit_s: float = START_LIMIT_S) -> Found:
        """What `look` finds, as soon as it finds something. Fails when the process ends first, or after `limit_s`."""
        give_up_s = time.monotonic() + limit_s
        while True:
            self.check(may_end=False)
            if (found := look()) is not None:
                return found
            if time.monotonic() > give_up_s:
                raise DemoFailed(f"{self.name} is not ready after {duration(limit_s)}: {self._remedy()}")
            time.sleep(POLL_S)

    def check(self, *, may_end: bool) -> None:
        """Raises if the process has failed; also if it has ended at all, unless it may."""
        code = self._popen.poll()
        if code is not None and not (may_end and code == 0):
            raise DemoFailed(f"{self.name} exited with code {code}: {self._remedy()}")

    def _remedy(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:] or ["(it is empty)"]
        return "\n  ".join([f"read the end of {self._log}, then run the same command again", *lines])

    def stop(self) -> None:
        self._popen.send_signal(signal.SIGINT)  # a worker submits what it has trained
        try:
            self._popen.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


def _threads_each(workers: int) -> dict[str, str]:
    """The workers share the cores: if each used all of them, they would mostly wait for each other."""
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers))}


def _start(
    stack: ExitStack, folder: Path, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> Process:
    """Leaving the stack stops it. It has its own session, so the terminal's Ctrl-C reaches only the demo."""
    log = folder / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as messages, interrupts_delayed():
        popen = subprocess.Popen(
            [sys.executable, "-m", "blocktrain", *arguments],
            stdout=subprocess.DEVNULL,  # a coordinator prints its invite, which is a secret
            stderr=messages,
            start_new_session=True,
            env={**(environment or {}), **os.environ},
        )
        process = Process(name, popen, log)
        stack.callback(process.stop)
    return process
