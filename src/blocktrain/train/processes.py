"""Trainers in child processes, for blocktrain train --jobs: several phases train at the same time.
Each phase always uses the same process, so that its trainer stays alive there. Next: run.py, which decides what to do.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from blocktrain.data.corpus import load_corpus
from blocktrain.spec import Phase, RunSpec
from blocktrain.train.run import LocalTrainers
from blocktrain.train.trainer import StepReport, Weights

CHILD_STEPS = 10  # steps between two reports of a child process
Answer = TypeVar("Answer")


class ProcessTrainers:
    """Sends each call to the LocalTrainers of the child process that trains the phase."""

    slice_steps = CHILD_STEPS

    def __init__(self, spec: RunSpec, jobs: int, device: torch.device | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        threads = max(1, torch.get_num_threads() // jobs)
        settings = (spec.model_dump(mode="json"), threads, device)
        self._executors = [
            ProcessPoolExecutor(1, context, initializer=_start_child, initargs=settings) for _ in range(jobs)
        ]

    def start(self, phase: Phase, published: Weights, state: dict[str, Tensor] | None, step_done: int) -> None:
        self._send(
            phase, partial(LocalTrainers.start, phase=phase, published=published, state=state, step_done=step_done)
        ).result()

    def advance(self, steps: Mapping[Phase, int]) -> dict[Phase, list[StepReport]]:
        sent = {
            phase: self._send(phase, partial(LocalTrainers.advance, steps={phase: count}))
            for phase, count in steps.items()
        }
        return {phase: answer.result()[phase] for phase, answer in sent.items()}

    def refresh(self, phase: Phase, published: Weights) -> None:
        self._send(phase, partial(LocalTrainers.refresh, phase=phase, published=published)).result()

    def weights(self, phase: Phase) -> Weights:
        return self._send(phase, partial(LocalTrainers.weights, phase=phase)).result()

    def state(self, phase: Phase) -> dict[str, Tensor]:
        return self._send(phase, partial(LocalTrainers.state, phase=phase)).result()

    def close(self) -> None:
        for executor in self._executors:
            executor.shutdown(cancel_futures=True)

    def _send(self, phase: Phase, call: Callable[[LocalTrainers], Answer]) -> Future[Answer]:
        with _interrupts_held():  # the first call starts the process
            return self._executors[phase.index % len(self._executors)].submit(_answer, call)


_child: LocalTrainers  # of a child process


def _start_child(spec_data: dict[str, Any], threads: int, device: torch.device | None) -> None:
    global _child
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    spec = RunSpec.model_validate(spec_data)
    _child = LocalTrainers(spec, load_corpus(spec.corpus, spec.model.context), device)


def _answer(call: Callable[[LocalTrainers], Answer]) -> Answer:
    return call(_child)


def _end_with_parent() -> None:
    """A parent that was killed cannot end its child processes."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C reaches every process of the terminal. A process that is started here ignores it from its first
    instruction on."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
