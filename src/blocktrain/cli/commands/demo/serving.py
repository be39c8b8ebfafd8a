"""The second half of the demo: stages and a gateway serve the model. A stage is killed with kill -9 in the middle of a
text, and the text goes on. Then three decoding modes race over links with a simulated distance.
Next: cli/commands/serving/serve.py, the command that it runs."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table

from blocktrain.cli.commands.demo.processes import Process, start, tell
from blocktrain.cli.console import counted, plain_table, say
from blocktrain.cli.shared.gateway_client import Output, generate_remotely
from blocktrain.errors import BlockTrainError
from blocktrain.io.address_file import read_address, read_pid, stage_file
from blocktrain.sampling_settings import READABLE_TEMPERATURE
from blocktrain.serve.decode.request import DEFAULT_CANDIDATES, Mode, Request

if TYPE_CHECKING:
    from rich.console import RenderableType

STAGES = 3
KILLED_STAGE = 1  # neither the first, which drafts, nor the last, which answers
RTT_MS = 100
REFRESH_S = 0.1
BAR = 24  # characters
ABOUT = {
    Mode.AUTOREGRESSIVE: "one token at a time, the usual way",
    Mode.SPECULATIVE: "checked drafts, exactly the model",
    Mode.SWEEP: f"the best of {DEFAULT_CANDIDATES} drafts, approximate",
}


@dataclass(frozen=True)
class Served:
    url: str
    process: Process
    file: Path


def serve(stack: ExitStack, folder: Path, model: Path, machine: Sequence[str]) -> Served:
    tell(f"Starting {STAGES} stages, which share its blocks, and a gateway.")
    file = folder / "serve.json"
    arguments = ["serve", str(model), "--stages", str(STAGES), "--port", "0", "--address-file", str(file), *machine]
    server = start(stack, folder, "serve", arguments)
    return Served(server.wait_until(lambda: read_address(file, server.pid)), server, file)


def text_with_a_kill(served: Served, prompt: str, num_bytes: int, num_tokens: int) -> Output:
    """Lets the model write so many tokens, of which `num_bytes` are shown, and kills a stage when half of the text is
    there. Returns when the stage is back."""
    tell(f"\nThe model continues a prompt. In the middle of it, stage {KILLED_STAGE} dies:\n")
    # One token at a time: two traversals of a faster mode could be the whole text, with no middle to see
    request = Request(prompt.encode(), num_tokens, Mode.AUTOREGRESSIVE, temperature=READABLE_TEMPERATURE)
    file = stage_file(served.file, KILLED_STAGE)
    victim, seen, killed_s = read_pid(file), 0, 0.0
    assert victim is not None, "serve answers when every stage has written its file"

    def show(text: str) -> None:
        nonlocal seen, killed_s
        _write(text)
        seen += len(text.encode())
        if not killed_s and seen >= len(request.prompt) + num_bytes / 2:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            killed_s = time.monotonic()
            say("", f"kill -9 {victim}: stage {KILLED_STAGE} is dead. The text waits for its successor:")

    output = generate_remotely(served.url, request, [], show, longest_bytes=num_bytes, simulated_rtt_ms=RTT_MS)
    print(flush=True)
    successor = served.process.wait_until(lambda: pid if (pid := read_pid(file)) != victim else None)
    tell(f"\n({counted(output.bytes, 'byte')}, none lost. The stage was started again as process {successor}.)")
    return output


def _write(text: str) -> None:
    from blocktrain.cli.commands.training.generate import harmless

    print(harmless(text), end="", flush=True)


# The race


@dataclass
class Lane:
    """One mode in the race. Its thread writes, the main thread shows."""

    request: Request
    num_bytes: int  # that are shown
    written: int = 0  # bytes
    output: Output | None = None
    error: Exception | None = None

    def run(self, url: str) -> None:
        skipped = -len(self.request.prompt)  # the prompt is shown first

        def show(text: str) -> None:
            nonlocal skipped
            skipped += len(text.encode())
            self.written = max(0, skipped)

        try:
            self.output = generate_remotely(
                url, self.request, [], show, longest_bytes=self.num_bytes, simulated_rtt_ms=RTT_MS
            )
        except BlockTrainError as error:
            self.error = error


def race(served: Served, prompt: str, num_bytes: int, num_tokens: int) -> list[Lane]:
    """All modes at once, with the same prompt and seed. Returns the lanes, slowest mode first."""
    tell(
        f"\nThe race: three ways to decode, {num_bytes} bytes each, over hosts that are {RTT_MS} ms apart "
        f"(simulated; a traversal of {STAGES} stages then takes {(STAGES + 1) * RTT_MS // 2} ms and its computing)."
    )
    request = Request(prompt.encode(), max_tokens=num_tokens, temperature=READABLE_TEMPERATURE)
    drafts = {Mode.SWEEP: DEFAULT_CANDIDATES}  # also for models that could turn noise into text
    lanes = [Lane(replace(request, mode=mode, candidates=drafts.get(mode)), num_bytes) for mode in ABOUT]
    threads = [threading.Thread(target=lane.run, args=(served.url,), daemon=True) for lane in lanes]
    for thread in threads:
        thread.start()
    began_s = time.monotonic()
    with _Screen() as show:
        while any(thread.is_alive() for thread in threads):
            served.process.check(may_end=False)
            show(_picture(lanes, time.monotonic() - began_s))
            time.sleep(REFRESH_S)
        show(_picture(lanes, time.monotonic() - began_s))
    for lane in lanes:
        if lane.error is not None:
            raise lane.error
    return lanes


class _Screen:
    """Draws on a terminal; elsewhere nothing until the results."""

    def __enter__(self) -> Callable[[RenderableType], None]:
        self._live = None
        if sys.stderr.isatty():
            self._live = Live(console=Console(file=sys.stderr, highlight=False), auto_refresh=False, transient=True)
            self._live.start()
        return self._show

    def _show(self, picture: RenderableType) -> None:
        if self._live is not None:
            self._live.update(picture, refresh=True)

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()


def _picture(lanes: Sequence[Lane], seconds: float) -> Table:
    table = Table.grid(padding=(0, 2))
    for lane in lanes:
        filled = BAR * min(lane.written, lane.num_bytes) // max(1, lane.num_bytes)
        bar = "█" * filled + "·" * (BAR - filled)
        taken_s = lane.output.seconds if lane.output else seconds
        table.add_row(lane.request.mode.value, bar, f"{lane.written} bytes", f"{taken_s:.1f} s")
    return table


def race_results(lanes: Sequence[Lane]) -> None:
    """One table, then the texts."""
    outputs = [(lane.request, lane.output) for lane in lanes if lane.output is not None]
    slowest = max(bytes_per_s(output) ** -1 for _, output in outputs)
    rows = [
        [
            request.mode.value,
            str(output.traversals),
            f"{output.seconds:.1f} s",
            f"{slowest * bytes_per_s(output):.1f}×",
            ABOUT[request.mode],
        ]
        for request, output in outputs
    ]
    say("", *plain_table(["mode", "traversals", "time", "speed", ""], rows))
    for request, output in outputs:
        tell(f"\n{request.mode.value}:")
        _write(request.prompt.decode() + output.text)
        print(flush=True)


def bytes_per_s(output: Output) -> float:
    return max(output.bytes, 1) / max(output.seconds, 1e-9)
