"""Ctrl-C: the first asks, the second ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from blocktrain.cli.shared.interrupt import StopOnInterrupt
from blocktrain.spec import preset
from blocktrain.train.run import ProcessCrew


def test_the_first_interrupt_asks_for_a_stop(capfd):
    with StopOnInterrupt() as stop:
        assert not stop()
        signal.raise_signal(signal.SIGINT)
        assert stop()
    assert "stopping after this step; Ctrl-C again aborts at once" in capfd.readouterr().err


def test_the_second_interrupt_ends_everything_children_included():
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    child.start()
    with StopOnInterrupt():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    child.join()
    assert child.exitcode == -signal.SIGKILL


def test_afterwards_interrupts_are_what_they_were():
    before = signal.getsignal(signal.SIGINT)
    with StopOnInterrupt():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) is before


def test_a_child_is_deaf_to_interrupts_from_its_first_instruction_on(text):
    spec = preset("tiny").with_(**{"corpus.source": str(text)})
    crew = ProcessCrew(spec, jobs=1)
    try:
        started = crew.ask(spec.phases[0], "start", spec.phases[0], {}, None, 0)
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGINT)
        started.result()
        assert [step.step for step in crew.ask(spec.phases[0], "advance", 0, 2).result()] == [1, 2]
    finally:
        crew.close()
