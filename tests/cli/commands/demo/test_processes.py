"""The demo's processes: what it says when one of them fails. tests/e2e/test_demo_process.py runs the demo."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blocktrain.cli.commands.demo.processes import DemoFailed, Process


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
