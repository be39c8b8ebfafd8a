"""Tasks under a virtual clock: one greenlet per worker, request and loop, and a queue of what happens when. One task
runs at a time and gives way only where it waits, so equal inputs give equal orders. No real time passes.
Next: world.py, which starts the tasks; network.py, where workers wait."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

from blocktrain.errors import ConfigError

try:
    from greenlet import getcurrent, greenlet
except ImportError:  # an extra: only this simulator needs it
    raise ConfigError("the simulator needs greenlet: pip install 'blocktrain[sim]'") from None


class Killed(BaseException):
    """Ends a task where it waits, as a kill ends a process."""


class TimedOut:
    """What `Scheduler.wait` returns when nobody woke the task in time."""


TIMED_OUT = TimedOut()


class Task:
    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.name, self._work = name, work
        self.turn = 0  # changes whenever it waits: a wake-up for an earlier wait is ignored
        self.is_killed, self.is_over = False, False
        self.error: BaseException | None = None
        self.greenlet = greenlet(self._run)

    def _run(self, *_: object) -> None:
        try:
            if not self.is_killed:
                self._work()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.is_over = True


class Scheduler:
    """`ended` gets every task whose work raised an exception."""

    def __init__(self, ended: Callable[[Task], None] = lambda task: None) -> None:
        self.now_s, self._ended = 0.0, ended
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._main = count(), getcurrent()
        self.current: Task | None = None

    def at(self, at_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (max(at_s, self.now_s), next(self._order), action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, action)

    def start(self, name: str, work: Callable[[], None], delay_s: float = 0.0) -> Task:
        task = Task(name, work)
        turn = task.turn
        self.after(delay_s, lambda: self._resume(task, turn, None))
        return task

    def step(self) -> bool:
        """Does what comes next. False if nothing does."""
        if not self._queue:
            return False
        self.now_s, _, action = heapq.heappop(self._queue)
        action()
        return True

    # What tasks call

    def wait(self, timeout_s: float | None = None) -> Any:
        """Gives way until somebody wakes this task. Returns what it was woken with, or TIMED_OUT."""
        task = self.current
        assert task is not None, "only a task waits"
        if task.is_killed:
            raise Killed
        task.turn += 1
        if timeout_s is not None:
            turn = task.turn
            self.after(timeout_s, lambda: self._resume(task, turn, TIMED_OUT))
        return self._main.switch()

    def sleep(self, seconds: float) -> None:
        self.wait(max(0.0, seconds))

    def wake(self, task: Task, turn: int, value: Any, delay_s: float = 0.0) -> None:
        """The wait with this turn returns the value; if that wait is over, nothing happens."""
        self.after(delay_s, lambda: self._resume(task, turn, value))

    def kill(self, task: Task) -> None:
        """Ends it where it waits. It does no more, but for its `finally` blocks."""
        if task.is_over or task.is_killed:
            return
        task.is_killed = True
        if task.greenlet:  # it has begun
            self._switch(task, lambda: task.greenlet.throw(Killed))
        task.is_over = True

    def _resume(self, task: Task, turn: int, value: Any) -> None:
        if not task.is_over and task.turn == turn:
            self._switch(task, lambda: task.greenlet.switch(value))

    def _switch(self, task: Task, switch: Callable[[], object]) -> None:
        assert self.current is None, "tasks are woken by the queue, not by each other"
        self.current = task
        try:
            switch()
        finally:
            self.current = None
        if task.is_over and task.error is not None:
            self._ended(task)
