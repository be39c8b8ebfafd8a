"""The thread of a stage that computes: in order, to the end of what has begun, and after errors too."""

from __future__ import annotations

import threading

from blocktrain.serve.chain.compute_thread import ComputeThread

LIMIT_S = 120.0


def test_work_is_done_in_the_order_in_which_it_came():
    thread, done, last = ComputeThread("test"), [], threading.Event()
    for number in range(10):
        thread.submit(lambda number=number: done.append(number))
    thread.submit(last.set)
    assert last.wait(LIMIT_S)
    thread.close()
    assert done == list(range(10))


def test_an_error_does_not_stop_the_work_behind_it(caplog):
    thread, last = ComputeThread("test"), threading.Event()
    thread.submit(lambda: 1 // 0)
    thread.submit(last.set)
    assert last.wait(LIMIT_S)
    thread.close()
    assert "unexpected error" in caplog.text


def test_closing_waits_for_what_has_begun_and_drops_the_rest():
    thread, begun, done = ComputeThread("test"), threading.Event(), []

    def work() -> None:
        begun.set()
        assert thread.closing.wait(LIMIT_S)
        done.append("begun")

    thread.submit(work)
    thread.submit(lambda: done.append("waiting"))
    assert begun.wait(LIMIT_S)
    thread.close()
    assert done == ["begun"]
