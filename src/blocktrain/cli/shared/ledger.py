"""How commands read the ledger of a run: from a coordinator's disk, or page by page over HTTP. No torch.
Next: swarm/ledger/ledger.py, the ledger itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blocktrain.errors import ConfigError
from blocktrain.io.private import LEDGER_FILE

if TYPE_CHECKING:
    from blocktrain.swarm.ledger.ledger import Ledger

Page = Callable[[int], list[dict[str, Any]]]  # the contributions after an update's number


@contextmanager
def opened_ledger(folder: Path, url: str | None) -> Iterator[Ledger]:
    """The ledger of a run that exists. Creates none."""
    from blocktrain.swarm.ledger.ledger import Ledger

    if url is None and not (folder / LEDGER_FILE).is_file():
        raise ConfigError(f"{folder} has no {LEDGER_FILE}: give the --dir of blocktrain coordinator, or its --ledger")
    ledger = Ledger(url or folder / LEDGER_FILE)
    try:
        yield ledger
    finally:
        ledger.close()


def all_pages(page: Page) -> Iterator[dict[str, Any]]:
    """All contributions, page by page."""
    after = 0
    while records := page(after):
        yield from records
        after = records[-1]["update"]["number"]
