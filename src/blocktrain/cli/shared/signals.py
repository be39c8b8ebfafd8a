"""Ctrl-C and SIGTERM: what they do to a command that trains, to one that serves, and to one that starts others.
No torch. Next: training.py and cli/commands/serving/stage.py, which use it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self

from blocktrain.errors import ConfigError

STDERR = 2
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOPPING = b"\nstopping after this step; press Ctrl-C again to abort now\n"


class StopOnInterrupt:
    """Training: the first SIGINT or SIGTERM makes calling it true, and training stops after the step. The second one
    aborts; every file is written atomically, so nothing breaks."""

    def __init__(self) -> None:
        self._asked = False

    def __call__(self) -> bool:
        return self._asked

    def __enter__(self) -> Self:
        self._before: dict[int, Any] = {each: signal.signal(each, self._interrupted) for each in STOP_SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            for child in multiprocessing.active_children():
                child.kill()  # they ignore SIGINT and would first finish their step
            raise KeyboardInterrupt
        self._asked = True
        with suppress(OSError):
            os.write(STDERR, STOPPING)  # not print: the signal may have interrupted one


@contextmanager
def stop_signal(with_parent: bool = False) -> Iterator[asyncio.Future[signal.Signals]]:
    """Serving: a future that holds the first SIGINT or SIGTERM. With `with_parent`, the end of stdin counts as SIGTERM:
    the parent process is gone."""
    loop = asyncio.get_running_loop()
    received: asyncio.Future[signal.Signals] = loop.create_future()

    def stop(number: signal.Signals) -> None:
        if not received.done():
            received.set_result(number)

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop, number)
    if with_parent:
        loop.add_reader(sys.stdin, lambda: None if os.read(sys.stdin.fileno(), 1) else stop(signal.SIGTERM))
    try:
        yield received
    finally:
        if with_parent:
            loop.remove_reader(sys.stdin)
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


def stop_with_parent() -> None:
    """A command that another process keeps running: the end of stdin counts as SIGTERM. It comes when that process asks
    for it, and also when that process is gone."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()


async def run_until_stopped(work: Coroutine[Any, Any, None]) -> signal.Signals:
    """Runs `work` until a stop signal, which is returned. If the work ends first, its error is the command's."""
    with stop_signal() as received:
        working = asyncio.create_task(work)
        ends: list[asyncio.Future[Any]] = [working, received]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
                raise ConfigError("the server stopped by itself: read its messages above")
            return received.result()
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


@contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Starting processes: a Ctrl-C takes effect after the block, so that no process is started without something that
    stops it."""
    received: list[int] = []
    before = {number: signal.signal(number, lambda got, _: received.append(got)) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise KeyboardInterrupt
