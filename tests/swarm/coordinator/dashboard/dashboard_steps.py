"""What tests of the dashboard do: they serve a run, work for it, and open its pages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from playwright.sync_api import Browser, BrowserContext, Page

from blocktrain.http.server import listening, served_in_thread
from blocktrain.swarm.coordinator.routes import build_service
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.swarm.worker.worker import Worker
from blocktrain.wire.invite import Invite

TOKENS = {role: f"the-token-of-the-{role}" for role in ("admin", "worker", "viewer")}
HOSTILE = "<img src=x onerror=alert(1)>"
PATIENCE_MS = 60_000


@contextmanager
def served(house) -> Iterator[str]:
    """The house's service on a free port; what its members ask goes through it too."""
    with listening("127.0.0.1", 0, "nobody") as listener:
        invite = Invite("127.0.0.1", listener.getsockname()[1], TOKENS["worker"])
        service = build_service(house.coordinator, house.ledger, invite=invite)
        with served_in_thread(service, listener):
            house.ask_only = partial(ask, invite.url)
            yield invite.url


def ask(url: str, method: str, path: str, role: str = "worker", **options: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {TOKENS.get(role, role)}", **options.pop("headers", {})}
    return httpx.request(method, url + path, headers=headers, timeout=PATIENCE_MS / 1000, **options)


def work(url: str, home: Path, name: str) -> None:
    invite = Invite("127.0.0.1", int(url.rpartition(":")[2]), TOKENS["worker"])
    with CoordinatorClient(invite, patience_s=PATIENCE_MS / 1000) as client:
        key, nap = Ed25519PrivateKey.generate(), lambda seconds: time.sleep(min(seconds, 0.05))
        Worker(client, home, key=key, name=name, memory_bytes=2**33, sleep=nap).run()


@dataclass
class Visits:
    """Opens pages and collects their errors, except those that a test expects."""

    browser: Browser
    contexts: list[BrowserContext] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def __call__(self, url: str, token: str = "", expected: str = "none", **settings: Any) -> Page:
        self.contexts.append(self.browser.new_context(**settings))
        page = self.contexts[-1].new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("console", lambda said: self._hear(said.type, said.text, expected))
        page.goto(url + (f"/#{token}" if token else "/"))
        return page

    def close(self) -> None:
        """While the server still answers: a page that tries to connect again would complain."""
        while self.contexts:
            self.contexts.pop().close()

    def _hear(self, kind: str, text: str, expected: str) -> None:
        if kind == "error" and expected not in text:
            self.complaints.append(text)


def status_of(url: str) -> dict[str, Any]:
    return ask(url, "GET", "/v1/status", "viewer").json()


def amount(number: float) -> str:
    """As the page writes bytes."""
    units = iter(("B", "kB", "MB", "GB"))
    unit = next(units)
    while number >= 1000:
        number, unit = number / 1000, next(units)
    return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:#.3g} {unit}"
