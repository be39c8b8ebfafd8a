"""The stage processes of blocktrain serve: started together, restarted when one dies, stopped together. They also stop
when this process is gone. Next: cli/commands/serving/serve.py, which puts a gateway in front of them."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Self

from blocktrain.cli.console import say
from blocktrain.errors import ConfigError
from blocktrain.io.address_file import POLL_S, read_address, stage_file
from blocktrain.io.restarts import next_pause_s

FREE_PORT = "tcp://127.0.0.1:*"
FIRST_PAUSE_S = 0.2
GRACE_S = 5.0


class StageProcesses:
    """One process per list of arguments of blocktrain stage. `addresses` holds where they listen, in that order."""

    def __init__(
        self,
        arguments: Sequence[Sequence[str]],
        secrets: Mapping[str, str] | None = None,
        address_file: Path | None = None,
    ) -> None:
        """`secrets` go to the environment of the processes: everybody on the machine can see their command lines. Their
        address files lie beside `address_file`, or where nobody else looks."""
        self._arguments, self._environment = arguments, {**os.environ, **(secrets or {})}
        self._address_file = address_file

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._folder = tempfile.TemporaryDirectory(prefix="blocktrain-")
        self._listening: list[asyncio.Future[str]] = [loop.create_future() for _ in self._arguments]
        self._supervisors = [asyncio.create_task(self._supervise(n)) for n in range(len(self._arguments))]
        try:
            self.addresses = list(await asyncio.gather(*self._listening))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        self._folder.cleanup()

    async def _supervise(self, number: int) -> None:
        """Restarts the stage at its first address, with growing pauses while it keeps failing at its start."""
        loop, listening = asyncio.get_running_loop(), self._listening[number]
        address, pause_s = FREE_PORT, FIRST_PAUSE_S
        while True:
            started_s = loop.time()
            code = await self._run(number, address)
            if not listening.done():
                text = f"stage {number} exited with code {code} before it listened: its own error is above"
                listening.set_exception(ConfigError(text))
                return
            address = listening.result()
            pause_s = next_pause_s(pause_s, FIRST_PAUSE_S, loop.time() - started_s)
            say(f"stage {number} at {address} exited with code {code}: restarting it")
            await asyncio.sleep(pause_s)

    async def _run(self, number: int, address: str) -> int:
        """Returns its exit code. Its stdin is a pipe that closes with this process. It has its own session, so the
        terminal's Ctrl-C does not reach it: it stops after the gateway."""
        file = stage_file(self._address_file or Path(self._folder.name) / "serve.json", number)
        options = ["--listen", address, "--address-file", str(file), "--with-parent"]
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "blocktrain", "stage", *self._arguments[number], *options],
            stdin=PIPE,
            stdout=DEVNULL,
            start_new_session=True,
            env=self._environment,
        )
        exited = asyncio.create_task(process.wait())
        try:
            while (found := read_address(file, process.pid)) is None and not exited.done():
                await asyncio.wait([exited], timeout=POLL_S)  # loading a large model may take long: no deadline
            if found is not None:
                say(f"stage {number}, process {process.pid}, listens on {found}")
                if not self._listening[number].done():
                    self._listening[number].set_result(found)
            return await exited
        finally:
            exited.cancel()
            await _stop(process)


async def _stop(process: Process) -> None:
    with suppress(ProcessLookupError):
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(GRACE_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


def split_blocks(blocks: int, stages: int) -> list[range]:
    """Consecutive shares that differ by at most one block. The first share is never smaller than another: that stage
    drafts, and more blocks draft better."""
    if not 1 <= stages <= blocks:
        raise ConfigError(f"--stages {stages} does not fit a model of {blocks} blocks: give 1 to {blocks}")
    cuts = [-(-blocks * n // stages) for n in range(stages + 1)]
    return [range(first, end) for first, end in pairwise(cuts)]
