"""Ctrl-C and SIGTERM: the first one requests a stop, the second one aborts."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from blocktrain.cli.shared.signals import STOP_SIGNALS, StopOnInterrupt
from blocktrain.spec import preset
from blocktrain.train.processes import ProcessTrainers


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_asks_for_a_stop(capfd, number):
    with StopOnInterrupt() as stop:
        assert not stop()
        signal.raise_signal(number)
        assert stop()
    assert "stopping after this step; press Ctrl-C again to abort now" in capfd.readouterr().err


def test_the_second_interrupt_ends_everything_children_included():
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    child.start()
    with StopOnInterrupt():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    child.join()
    assert child.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_afterwards_signals_are_what_they_were(number):
    before = signal.getsignal(number)
    with StopOnInterrupt():
        assert signal.getsignal(number) != before
    assert signal.getsignal(number) is before


def test_a_child_ignores_interrupts_from_its_first_instruction_on(text):
    spec = preset("tiny").with_(**{"corpus.source": str(text)})
    phase, trainers = spec.phases[0], ProcessTrainers(spec, jobs=1)
    try:
        with ThreadPoolExecutor(1) as thread:
            started = thread.submit(trainers.start, phase, {}, None, 0)
            while not (children := multiprocessing.active_children()) and not started.done():
                time.sleep(0.001)
            for child in children:
                os.kill(child.pid, signal.SIGINT)
            started.result()
        assert [step.step for step in trainers.advance({phase: 2})[phase]] == [1, 2]
    finally:
        trainers.close()
