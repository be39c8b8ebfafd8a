"""Log lines that strangers can cause."""

from __future__ import annotations

import pytest

from blocktrain import errors, logs
from blocktrain.errors import FrameError, foreign_bytes
from blocktrain.logs import SparingLog


def test_a_flood_is_one_line_and_the_next_one_says_how_many_were_left_out(caplog):
    now_s = 0.0
    log = SparingLog("test", lambda: now_s)
    for _ in range(5):
        log.warning("refused")
    now_s = logs.LOG_EVERY_S
    log.warning("refused \x1b[2J\n")
    assert caplog.messages == ["refused", r"refused \x1b[2J\n (4 more since the last such line)"]


def test_what_a_parser_overlooked_is_logged_once_and_refused(caplog, monkeypatch):
    monkeypatch.setattr(errors, "_overlooked", SparingLog("test"))
    for _ in range(3):
        with pytest.raises(FrameError, match="send what this version"), foreign_bytes(FrameError, "the answer"):
            raise ZeroDivisionError("by\nzero")
    assert caplog.messages == [
        r"the answer cannot be read, and no check noticed it (ZeroDivisionError: by\nzero): please report this"
    ]
