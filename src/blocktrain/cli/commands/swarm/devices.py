"""blocktrain worker --devices: one process per device, all with the same options. Each has a key of its own in the one
home directory, and they share its downloads. Next: worker.py, which each process runs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, TextIO

from blocktrain.cli.console import say
from blocktrain.cli.machine import chosen_device, free_memory_bytes
from blocktrain.cli.options import EXIT_INTERRUPTED
from blocktrain.errors import ConfigError

LOWEST = 19


def be_nice() -> None:
    if not hasattr(os, "nice"):
        say("--nice has no effect on this system: lower the priority of this process with its own tools")
        return
    os.nice(LOWEST)


def work_on_devices(names: str, invite: str, same: Mapping[str, object], flags: list[str]) -> int:
    """Until all processes have ended. Returns the exit code: the first that is not 0, or that of an interruption.
    Ctrl-C and SIGTERM make every worker submit what it has."""
    devices = chosen_devices(names)
    options = [part for name, value in {**_shares(devices), **_given(same)}.items() for part in (name, str(value))]
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    stopping = _Stopping(processes)
    before = {number: signal.signal(number, stopping) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number, device in enumerate(devices, 1):
            label = f"[{device}]" if devices.count(device) == 1 else f"[{device} #{number}]"
            arguments = ["worker", invite, "--device", device, *options, *flags]
            processes.append(context.Process(target=_work, args=(label, arguments)))
            processes[-1].start()
        for process in processes:
            process.join()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    codes = [process.exitcode or 0 for process in processes]
    for device, code in zip(devices, codes, strict=True):
        if code not in (0, EXIT_INTERRUPTED):
            say(f"the worker on {device} ended with code {code}: read its messages above")
    return EXIT_INTERRUPTED if stopping.asked else next((abs(code) for code in codes if code), 0)


def chosen_devices(names: str) -> list[str]:
    """All GPUs, or the named devices, each tried out. The same name may repeat: several processes on one CPU."""
    import torch

    if names != "all":
        return [str(chosen_device(name.strip())) for name in names.split(",")]
    found = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if not found:
        raise ConfigError("--devices all finds no CUDA device here: leave it out, or name devices, like cpu,cpu")
    return found


def _shares(devices: list[str]) -> dict[str, object]:
    """What processes on one CPU divide among themselves, unless options say otherwise."""
    num_cpu = devices.count("cpu")
    if num_cpu < 2:
        return {}
    import torch

    free_gb = free_memory_bytes(torch.device("cpu")) / num_cpu / 1e9
    return {"--memory": f"{free_gb:.3f}GB", "--threads": max(1, (os.cpu_count() or 1) // num_cpu)}


def _given(options: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in options.items() if value is not None}


class _Stopping:
    """Passes one interrupt on to every process. They are in groups of their own, where a terminal's Ctrl-C does not
    reach them a second time."""

    def __init__(self, processes: list[BaseProcess]) -> None:
        self._processes, self.asked = processes, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        for process in self._processes:
            if process.pid is not None and process.is_alive() and hasattr(os, "setpgrp"):
                os.kill(process.pid, signal.SIGINT)


def _work(label: str, arguments: list[str]) -> None:
    """In the new process."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_stop_after, args=(parent.join,), daemon=True).start()
    sys.stderr = _Labelled(sys.stderr, label)
    from blocktrain.cli.main import app

    app(arguments)


def _stop_after(wait: Callable[[], Any]) -> None:
    """Submits what is done when the process that started this one is gone."""
    wait()
    signal.raise_signal(signal.SIGINT)


class _Labelled:
    """Writes whole lines, each with the name of the device before it."""

    def __init__(self, stream: TextIO, label: str) -> None:
        self._stream, self._label, self._rest = stream, label, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        self._stream.write("".join(f"{self._label} {line}\n" for line in lines))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def isatty(self) -> bool:
        return False  # lines of several processes cannot change in place
