"""A line a request on stderr: for people, or as JSON for machines. Next: gateway.py, which turns it on."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

GATEWAY_LOG = "blocktrain.serve"


@contextmanager
def requests_logged(as_json: bool) -> Iterator[None]:
    logger, handler = logging.getLogger(GATEWAY_LOG), logging.StreamHandler()
    handler.setFormatter(JsonLines() if as_json else PlainLines())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {"time_s": round(record.created, 3), "level": record.levelname.lower()}
        told |= getattr(record, "facts", None) or {"message": record.getMessage()}
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False)


class PlainLines(logging.Formatter):
    """12:00:01 POST /v1/completions 200, 0.31 s, speculative: 200 bytes in 29 traversals"""

    def format(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", None)
        line = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {record.getMessage()}"
        if facts:
            line += f", {facts['seconds']:.3g} s"
            if "mode" in facts:
                line += f", {facts['mode']}: {facts['bytes_written']} bytes in {facts['traversals']} traversals"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line
