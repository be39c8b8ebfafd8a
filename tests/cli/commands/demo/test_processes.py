"""The demo's processes: what it says when one of them fails. tests/e2e/test_demo_process.py runs the demo."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from blocktrain.cli.commands.demo.processes import DemoFailed, Process, start
from blocktrain.errors import StorageError


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Callable[[str], Process]]:
    """Starts Python code as a process of the demo, with its log."""
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> Process:
        log = tmp_path / "stage.log"
        with log.open("wb") as file:
            started.append(subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=file))
        return Process("stage", started[-1], log)

    yield start
    for popen in started:
        popen.kill()
        popen.stdin.close()
        popen.wait()


def test_a_process_that_fails_before_it_is_ready_is_reported_with_the_end_of_its_log(process):
    failed = process("import sys; sys.exit('\\n'.join(['first', '2', '3', '4', '5', 'error: the disk is full']))")
    with pytest.raises(DemoFailed, match="stage exited with code 1: read the end of") as caught:
        failed.wait_until(lambda: None)
    assert str(caught.value).splitlines()[-1] == "  error: the disk is full"
    assert "first" not in str(caught.value)


def test_what_the_user_can_mend_is_the_demo_s_own_error(process):
    failed = process("import sys; sys.stderr.write('reading\\nerror: give more text\\n'); sys.exit(2)")
    with pytest.raises(DemoFailed, match=r"^give more text$"):
        failed.wait_until(lambda: None)


def test_a_process_that_is_not_ready_in_time_is_reported(process):
    with pytest.raises(DemoFailed, match="stage is not ready after 0s"):
        process("input()").wait_until(lambda: None, limit_s=0.0)


def test_what_is_found_is_returned_at_once(process):
    answers = iter([None, None, "tcp://127.0.0.1:7001"])
    assert process("input()").wait_until(lambda: next(answers)) == "tcp://127.0.0.1:7001"


@pytest.mark.parametrize("code, may_end, fails", [(0, True, False), (0, False, True), (3, True, True)])
def test_only_a_worker_may_end_and_only_well(process, code, may_end, fails):
    ended = process(f"raise SystemExit({code})")
    ended._popen.wait()
    if fails:
        with pytest.raises(DemoFailed, match=f"exited with code {code}"):
            ended.check(may_end=may_end)
    else:
        ended.check(may_end=may_end)


KILLED_DEMO = """
import sys
from contextlib import ExitStack
from pathlib import Path
from blocktrain.cli.commands.demo.processes import start
with ExitStack() as stack:
    worker = start(stack, Path(sys.argv[1]), "worker", ["worker", "bt://127.0.0.1:1/#" + "x" * 32])
    print(worker.pid, flush=True)
    input()
"""


def test_what_the_demo_has_started_ends_when_the_demo_is_killed(tmp_path):
    with subprocess.Popen([sys.executable, "-c", KILLED_DEMO, tmp_path], stdin=-1, stdout=-1) as demo:
        pid = int(demo.stdout.readline())
        demo.kill()
    give_up_s = time.monotonic() + 60.0
    while lives(pid):
        assert time.monotonic() < give_up_s
        time.sleep(0.05)


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "demo").touch()
    with ExitStack() as stack, pytest.raises(StorageError, match="demo/logs cannot be written"):
        start(stack, tmp_path / "demo", "worker", [])
