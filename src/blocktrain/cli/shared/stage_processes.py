"""The stage processes of blocktrain serve: started together, started again when one dies, ended together. They end by
themselves when this process is gone. Next: serve.py, which puts a gateway in front of them."""

from __future__ import annotations

import asyncio
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Self

from blocktrain.cli.console import say
from blocktrain.errors import ConfigError

FREE_PORT = "tcp://127.0.0.1:*"
LISTENS = re.compile(rb"(tcp://\S+) serves ")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
LIVED_S = 30.0  # who dies later than that has not failed at starting
GRACE_S = 5.0


class Crew:
    """One process for each list of arguments of blocktrain stage."""

    def __init__(self, arguments: Sequence[Sequence[str]]) -> None:
        self._arguments = arguments

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._listening: list[asyncio.Future[str]] = [loop.create_future() for _ in self._arguments]
        self._keepers = [asyncio.create_task(self._keep(n)) for n in range(len(self._arguments))]
        try:
            self.addresses = list(await asyncio.gather(*self._listening))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def _keep(self, number: int) -> None:
        loop, listening = asyncio.get_running_loop(), self._listening[number]
        address, pause_s = FREE_PORT, FIRST_PAUSE_S
        while True:
            began_s = loop.time()
            code = await self._run(number, address)
            if not listening.done():
                text = f"stage {number} ended with {code} before it listened: what it said is above"
                listening.set_exception(ConfigError(text))
                return
            address = listening.result()
            pause_s = FIRST_PAUSE_S if loop.time() - began_s > LIVED_S else min(2 * pause_s, LONGEST_PAUSE_S)
            say(f"the stage at {address} ended with {code}: starting it again")
            await asyncio.sleep(pause_s)

    async def _run(self, number: int, address: str) -> int:
        """Its exit code. Its stdin is a pipe that closes with this process; a session of its own keeps the terminal's
        Ctrl-C from it, so that it ends when the gateway has."""
        command = [sys.executable, "-m", "blocktrain", "stage", *self._arguments[number]]
        process = await asyncio.create_subprocess_exec(
            *command, "--listen", address, "--with-parent", stdin=PIPE, stdout=PIPE, start_new_session=True
        )
        try:
            assert process.stdout is not None
            said = await process.stdout.readline()
            if (found := LISTENS.match(said)) is not None:
                say(f"stage {number}, process {process.pid}: {said.decode(errors='replace').strip()}")
                if not self._listening[number].done():
                    self._listening[number].set_result(found[1].decode())
            return await process.wait()
        finally:
            await _end(process)


async def _end(process: Process) -> None:
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
    """Consecutive shares that differ by at most one block. The first is no smaller than any other: that stage drafts,
    and more blocks draft better."""
    if not 1 <= stages <= blocks:
        raise ConfigError(f"--stages {stages} does not fit a model of {blocks} blocks: give 1 to {blocks}")
    cuts = [-(-blocks * n // stages) for n in range(stages + 1)]
    return [range(first, end) for first, end in pairwise(cuts)]
