"""Workers on machines of other people: several devices, hours of work, and systems that are not Linux. Real processes;
the coordinator is in this one."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from blocktrain.spec import preset
from blocktrain.swarm.local import local_swarm

# What macOS or Windows lack, as Python shows it there. Before anything of blocktrain is imported.
OTHER_SYSTEM = """
import ctypes, mmap, os, sys

for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for module in (os, mmap):
    for name in dir(module):
        if name.startswith(("MADV_", "posix_f", "sched_", "getlo", "setpgrp", "fork", "nice", "O_DIRECTORY")):
            delattr(module, name)
real_open, real_cdll = os.open, ctypes.CDLL

def open_no_folder(path, *arguments, **options):
    if not isinstance(path, int) and os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return real_open(path, *arguments, **options)

def no_c_library(name, *arguments, **options):
    if name is None:
        raise TypeError("expected str, not NoneType")
    return real_cdll(name, *arguments, **options)

os.open, ctypes.CDLL = open_no_folder, no_c_library
from blocktrain.cli.main import main
main()
"""
pytestmark = pytest.mark.timeout(300)  # its processes import torch, on a machine that may be busy


@pytest.fixture
def invite(tmp_path: Path, text: Path) -> Iterator[Callable[[int], str]]:
    """Serves a run of that many steps, and gives its invite."""
    with ExitStack() as stack:

        def serve(steps: int) -> str:
            settings = {"corpus.source": str(text), "train.steps": steps, "swarm.round_steps": steps}
            swarm = local_swarm(preset("tiny").with_(**settings), workers=0, folder=tmp_path / "run")
            stack.callback(swarm.stop)
            return str(swarm._invite)

        yield serve


def test_one_process_per_device_shares_a_home_and_hands_in_on_an_interrupt(tmp_path, start, invite):
    address = tmp_path / "invite"
    address.write_text(invite(5000))
    home = tmp_path / "home"
    worker = start("worker", f"@{address}", "--devices", "cpu,cpu", "--home", home, "--memory", "1GB", "--nice")
    for _ in range(2):
        worker.line_with(" lease: ")
    worker.send_signal(signal.SIGINT)
    said, _ = worker.communicate()
    assert worker.returncode == 130, said
    for label in ("[cpu #1]", "[cpu #2]"):
        assert re.search(rf"^{re.escape(label)} submitted: ", said, re.MULTILINE), said
    assert {path.name for path in home.glob("key*")} == {"key", "key-2"}


def test_a_worker_runs_without_what_only_linux_has(tmp_path, invite):
    command = [sys.executable, "-c", OTHER_SYSTEM, "worker", invite(2), "--home", tmp_path / "home"]
    command += ["--nice", "--memory", "1GB"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--nice has no effect on this system" in done.stderr
    assert "finished: every phase is trained" in done.stderr
