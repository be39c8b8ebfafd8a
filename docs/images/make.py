"""Takes the pictures of the dashboard in this folder, from a real run of the small preset: a coordinator and workers as
processes, one of them killed at work so that there is something late to see. Needs a Chromium.

    python docs/images/make.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser, sync_playwright

from blocktrain.wire.invite import Invite, parse_invite

HERE = Path(__file__).parent
NAMES = ("ada", "grace", "alan", "edsger")
LAST_PHASE, FAR_ENOUGH = 2, 160  # steps of it: the run is then well under way
SETTINGS = (
    "train.steps=[240, 120, 400]",
    "swarm.round_steps=8",
    "swarm.evaluate_every=2",
    "swarm.deadline_floor_s=120",  # so that the round stays open while the pictures are taken
    "swarm.deadline_ceiling_s=180",
    "train.windows=16",
)
PICTURES: dict[str, dict[str, Any]] = {
    "dashboard-light": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "dashboard-dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "dashboard-phone": {"viewport": {"width": 390, "height": 1500}, "color_scheme": "light"},
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            take_pictures(Path(folder), processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def take_pictures(folder: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    def start(*arguments: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen([sys.executable, "-m", "blocktrain", *arguments], env=environment))

    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    start("coordinator", "--preset", "small", "--dir", str(folder / "run"), *settings)
    wait_for(lambda: all((folder / "run" / name).exists() for name in ("invite", "invite-admin", "invite-viewer")))
    admin = parse_invite((folder / "run" / "invite-admin").read_text())
    for name in NAMES:
        invite = (folder / "run" / "invite").read_text().strip()
        start("worker", invite, "--home", str(folder / name), "--name", name)
    wait_for(lambda: steps_of(LAST_PHASE, admin) >= FAR_ENOUGH)
    wait_for(lambda: state_of(NAMES[-1], admin) == "at work")
    processes[-1].kill()  # edsger's machine is switched off
    wait_for(lambda: state_of(NAMES[-1], admin) == "late")
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=[] if os.geteuid() else ["--no-sandbox"])
        for name, look in PICTURES.items():
            picture(browser, admin, HERE / f"{name}.png", look)
        browser.close()


def picture(browser: Browser, admin: Invite, path: Path, look: dict[str, Any]) -> None:
    page = browser.new_page(**look)
    page.goto(f"{admin.url}/#{admin.access_token}")
    page.locator("#training .main-svg").first.wait_for(timeout=60_000)
    page.locator("#held-out .main-svg").first.wait_for(timeout=60_000)
    page.locator("#invite").evaluate("it => { it.value = \"blocktrain worker 'bt://HOST:PORT/#TOKEN'\"; }")
    page.screenshot(path=path, full_page="phone" not in path.name)
    page.close()


def steps_of(phase: int, admin: Invite) -> int:
    return next((int(each["step"]) for each in status(admin)["phases"] if each["phase"] == phase), 0)


def state_of(name: str, admin: Invite) -> str:
    return next(str(worker["state"]) for worker in status(admin)["workers"] if worker["name"] == name)


def status(invite: Invite) -> dict[str, Any]:
    answer = httpx.get(f"{invite.url}/v1/status", headers={"Authorization": f"Bearer {invite.access_token}"})
    answer.raise_for_status()
    return dict(answer.json())


def wait_for(ready: Callable[[], bool], patience_s: float = 1200.0) -> None:
    give_up_s = time.monotonic() + patience_s
    while not ready():
        if time.monotonic() > give_up_s:
            raise TimeoutError("the run did not come so far")
        time.sleep(0.5)


if __name__ == "__main__":
    main()
