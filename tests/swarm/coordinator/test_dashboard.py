"""The dashboard in real headless Chromium, against a real coordinator behind a real server."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from playwright.sync_api import Browser, BrowserContext, Page, expect

from blocktrain.http.server import listening, served_in_thread
from blocktrain.swarm.aliases import alias_of
from blocktrain.swarm.coordinator.routes import build_service
from blocktrain.swarm.coordinator.watching.leaderboard import Leaderboard
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


@pytest.fixture(scope="module")
def trained(new_house: Callable, tmp_path_factory) -> Iterator[str]:
    """A run that two real workers have trained to its end, both in every round, and one with a hostile name has
    joined."""
    house = new_house(**{"train.steps": 4, "swarm.evaluate_every": 1, "swarm.min_updates": 2})
    with house.coordinator.loop.running(), served(house) as url:
        threads = [
            threading.Thread(target=work, args=(url, tmp_path_factory.mktemp("home"), name)) for name in ("ada", "alan")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        guest = house.member()
        house.ask("POST", "/v1/leases", json=guest.request(name=HOSTILE, device=HOSTILE))
        yield url


@pytest.fixture
def running(new_house: Callable, visit: Visits) -> Iterator[tuple[Any, str]]:
    """A run whose clock stands until a test moves it."""
    house = new_house()
    with served(house) as url:
        yield house, url
        visit.close()


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


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visits]:
    visits = Visits(browser)
    yield visits
    visits.close()
    assert visits.complaints == []


def status_of(url: str) -> dict[str, Any]:
    return ask(url, "GET", "/v1/status", "viewer").json()


def amount(number: float) -> str:
    """As the page writes bytes."""
    units = iter(("B", "kB", "MB", "GB"))
    unit = next(units)
    while number >= 1000:
        number, unit = number / 1000, next(units)
    return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:#.3g} {unit}"


# A run's numbers


def test_the_numbers_are_those_of_the_api(visit, trained):
    page = visit(trained, TOKENS["viewer"])
    expect(page.locator("#state")).to_have_text("finished")
    facts, curves = status_of(trained), ask(trained, "GET", "/v1/curves", "viewer").json()
    expect(page.locator("#loss")).to_have_text(f"{curves['held_out'][-1]['nats_per_byte']:.3f}")
    expect(page.locator("#progress")).to_have_text("100 %")
    expect(page.locator("#up")).to_have_text(amount(facts["traffic"]["up_bytes"]))
    expect(page.locator("#down")).to_have_text(amount(facts["traffic"]["down_bytes"]))
    expect(page.locator("#blocks .version")).to_have_text([f"version {x['version']}" for x in facts["blocks"]])
    rows = page.locator("#workers tbody tr")
    expect(rows).to_have_count(3)
    for row, worker in enumerate(sorted(facts["workers"], key=lambda worker: -worker["tokens"])):
        expect(rows.nth(row).locator("th")).to_have_text(f"{row + 1}. {worker['alias']}")
        expect(rows.nth(row)).to_contain_text(f"{amount(worker['update_bytes'])} / {amount(worker['down_bytes'])}")
        assert worker["update_bytes"] or worker["device"] == HOSTILE
    expect(page.locator("#events li")).to_have_count(len(facts["events"]))


def test_charts_are_drawn_and_said_in_words_and_tables(visit, trained):
    page = visit(trained, TOKENS["viewer"])
    curves = ask(trained, "GET", "/v1/curves", "viewer").json()
    for chart, lines in (("held-out", 5), ("training", 3)):  # composed and four blocks; three phases
        expect(page.locator(f"#{chart} .scatterlayer .trace")).to_have_count(lines)
        assert page.locator(f"#{chart} .main-svg").first.bounding_box()["height"] > 200
    loss = f"{curves['held_out'][-1]['nats_per_byte']:.3f}"
    expect(page.get_by_role("img", name=f"The composed model scores {loss} nats/byte")).to_be_visible()
    rounds = sum(len(curve["points"]) for curve in curves["training"])
    assert page.locator("#training-table tbody tr").count() == rounds


def test_names_that_workers_give_themselves_are_text_and_for_admins_alone(visit, trained):
    page = visit(trained, TOKENS["admin"])
    expect(page.locator("#workers")).to_contain_text(HOSTILE)
    expect(page.locator("#workers")).to_contain_text("ada")
    assert page.locator("main img").count() == 0
    page = visit(trained, TOKENS["viewer"])
    expect(page.locator("#workers tbody tr")).to_have_count(3)
    assert "ada" not in page.locator("#workers th").all_inner_texts()
    assert "ada," not in page.locator("#events").inner_text()


def test_when_a_run_is_trained_its_workers_have_finished(visit, trained):
    page = visit(trained, TOKENS["viewer"])
    expect(page.locator("#workers .pill")).to_have_text(["finished"] * 3)
    expect(page.locator("#present")).to_have_text("2")
    expect(page.locator("#present-of")).to_have_text("took part")


def test_the_axis_of_the_charts_can_be_chosen_and_starts_at_the_beginning_of_the_run(visit, trained):
    page = visit(trained, TOKENS["viewer"])
    expect(page.locator("#held-out .xtitle")).to_have_text(re.compile("since the first worker joined"))
    steps = status_of(trained)["steps"]
    for kind, title in (("steps", "steps of the run"), ("text", "bytes of text read")):
        page.get_by_label("Horizontal axis").select_option(kind)
        for chart in ("held-out", "training"):
            expect(page.locator(f"#{chart} .xtitle")).to_have_text(title)
    page.get_by_label("Horizontal axis").select_option("steps")
    expect(page.locator("#held-out-table tbody tr").last.locator("th")).to_have_text(str(steps))
    page.get_by_label("Logarithmic loss").check()
    page.wait_for_function("() => document.getElementById('training')._fullLayout.yaxis.type === 'log'")
    first, _ = page.evaluate("() => document.getElementById('training')._fullLayout.xaxis.range")
    assert first == 0


def test_a_legend_entry_switches_its_line(visit, trained):
    page = visit(trained, TOKENS["viewer"])
    expect(page.locator("#held-out .scatterlayer .trace")).to_have_count(5)
    entry = page.get_by_role("button", name="block 1 alone")
    entry.click()
    expect(entry).to_have_attribute("aria-pressed", "false")
    expect(page.locator("#held-out .scatterlayer .trace")).to_have_count(4)


def test_data_can_be_downloaded_as_csv(visit, trained):
    page = visit(trained, TOKENS["viewer"])
    expect(page.locator("#training .main-svg").first).to_be_visible()
    for button, first in (("held-out", "time_s,"), ("training", "phase,round"), ("workers", "worker,")):
        with page.expect_download() as started:
            page.locator(f"#{button}-csv").click()
        lines = Path(started.value.path()).read_text().splitlines()
        assert lines[0].startswith(first)
        assert len(lines) > 3


def test_the_settings_and_the_phases_of_the_run_are_shown(visit, trained):
    page = visit(trained, TOKENS["viewer"])
    page.get_by_text("Show all settings of this run").click()
    expect(page.locator("#settings")).to_contain_text("round_steps")
    expect(page.locator("#phases li")).to_have_count(3)
    expect(page.locator("#phases li").first).to_have_text("Phase 1 · blocks 0, 1 · done")
    expect(page.locator("#time-left-of")).to_contain_text("blocktrain export downloads the model")


# A run while it goes on


def test_without_workers_the_page_says_how_to_join(visit, running):
    house, url = running
    page = visit(url, TOKENS["admin"])
    expect(page.get_by_role("heading", name="Waiting for the first worker")).to_be_visible()
    expect(page.get_by_label("Command to join", exact=True)).to_have_value(re.compile("^blocktrain worker 'bt://"))
    expect(page.get_by_text("Nothing has happened yet.")).to_be_visible()
    expect(visit(url, TOKENS["viewer"]).get_by_label("Command to join", exact=True)).to_have_value(
        "blocktrain worker INVITE"
    )
    house.member().lease()
    expect(page.get_by_role("heading", name="Waiting for the first worker")).to_be_hidden()
    expect(page.locator("#blocks .crew").first).to_be_visible()


def test_a_worker_that_dies_is_shown_as_late_and_why(visit, running):
    house, url = running
    dead, alive = house.member(), house.member()
    dead.lease()
    lease = alive.lease()
    page = visit(url, TOKENS["viewer"])
    expect(page.locator("#blocks .block").first).to_contain_text("2 working")
    house.now_s += 1
    alive.send(lease, alive.payload(lease))
    expect(page.locator("#blocks .block").first).to_contain_text("1 working, 1 reported")
    house.now_s += house.spec.swarm.deadline_ceiling_s + 1
    expect(page.locator("#blocks .block").first).to_contain_text("1 reported, 1 late")
    expect(page.locator("#blocks .why").first).to_contain_text("missed its deadline")
    row = page.locator("#workers tbody tr", has_text=alias_of(dead.id))
    expect(row).to_contain_text("late")
    house.coordinator.loop.tick()
    expect(row).to_contain_text("phase 1, round 0: it closed without")
    expect(page.locator("#blocks .version").first).to_have_text("version 1")
    expect(page.locator("#news")).to_contain_text("late")
    expect(page.locator("#rounds")).to_contain_text("the ceiling: 1 rounds timed, 3 needed to learn from")


def test_an_admin_pauses_resumes_and_copies_the_invite(visit, running):
    _, url = running
    page = visit(url, TOKENS["admin"], permissions=["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#state")).to_have_text("paused")
    assert status_of(url)["paused"] is True
    page.get_by_role("button", name="Resume").click()
    expect(page.locator("#state")).to_have_text("waiting")
    assert status_of(url)["paused"] is False
    page.evaluate("() => { window.setTimeout = () => 0; }")  # "Copied" stays
    page.locator("#copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    copied = page.evaluate("() => navigator.clipboard.readText()")
    assert copied == f"blocktrain worker 'bt://{url.removeprefix('http://')}/#{TOKENS['worker']}'"


@pytest.mark.parametrize("role", ["viewer", "worker"])
def test_others_have_no_such_buttons(visit, trained, role):
    page = visit(trained, TOKENS[role])
    expect(page.locator("#role")).to_have_text(f"Signed in as {role}.")
    for name in ("Pause", "Resume", "Copy"):
        expect(page.get_by_role("button", name=name, exact=True)).to_have_count(0)
    assert page.locator("#invite").input_value() == ""


def test_a_coordinator_that_goes_away_and_comes_back_is_told_apart(visit, new_house):
    house = new_house()
    with served(house) as url:
        page = visit(url, TOKENS["viewer"], expected="ERR_")
        expect(page.locator("#connection-text")).to_have_text("Live")
    expect(page.locator("#connection-text")).to_contain_text("Out of date by")
    expect(page.locator("#news")).to_contain_text("does not answer")
    expect(page.locator("#blocks .block")).to_have_count(4)


# The token


def test_without_a_token_one_is_asked_for_and_an_invite_will_do(visit, trained):
    page = visit(trained, expected="401")
    expect(page.get_by_label("Invite or access token")).to_be_focused()
    expect(page.locator("main")).to_be_hidden()
    page.get_by_label("Invite or access token").fill("not-a-token-of-this-run")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("The access token is unknown or revoked")
    page.get_by_label("Invite or access token").fill(f"bt://127.0.0.1:1/#{TOKENS['viewer']}")
    page.keyboard.press("Enter")
    expect(page.locator("#state")).to_have_text("finished")
    expect(page.get_by_role("alert")).to_be_hidden()


def test_the_token_leaves_the_address_and_stays_in_the_tab(visit, trained):
    page = visit(trained, TOKENS["viewer"])
    expect(page.locator("#state")).to_have_text("finished")
    assert page.url == f"{trained}/"
    assert page.evaluate("() => [localStorage.length, document.cookie]") == [0, ""]
    page.reload()
    expect(page.locator("#state")).to_have_text("finished")
    assert not any(TOKENS["viewer"] in url.partition("#")[0] for url in visit.asked)
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("Invite or access token")).to_be_visible()
    assert page.evaluate("() => sessionStorage.length") == 0


# Trust


def honest_result(lease: Any) -> float:
    return 1e-3 * (1 + 0.01 * lease.shard) + 1e-6 * lease.step_start


def test_bans_standing_and_audits_are_drawn(visit, new_house):
    audited = {"swarm.audit_share": 1.0, "swarm.audit_newcomer_share": 1.0, "swarm.min_updates": 3}
    house = new_house(**audited, **{"swarm.round_steps": 10, "train.steps": 200})
    with served(house) as url:
        liar, *honest = members = [house.member() for _ in range(3)]
        leases = [member.lease() for member in members]
        for member, lease, factor in zip(members, leases, (-1.0, 1.0, 1.0), strict=True):
            member.send(lease, member.payload(lease, factor * honest_result(lease)))
        for number in range(9):
            if house.ledger.key_standing(liar.id).excluded is None:
                lease = honest[number % 2].lease()
                honest[number % 2].send(lease, honest[number % 2].payload(lease, honest_result(lease)))
        banned = house.member()
        banned.lease()
        house.ledger.exclude(banned.id, "banned", "a broken device", house.now_s)
        page = visit(url, TOKENS["viewer"])
        expect(page.get_by_role("heading", name="Trust")).to_be_visible()
        out = page.locator("#excluded tbody")
        expect(out).to_contain_text("quarantined")
        expect(out.locator("tr", has_text=alias_of(banned.id))).to_contain_text("a broken device")
        expect(page.locator("#workers tbody tr", has_text=alias_of(liar.id))).to_contain_text("quarantined")
        expect(page.locator("#workers tbody")).to_contain_text("not audited yet; its updates weigh 25 %")
        expect(page.locator("#audits tbody tr", has_text=alias_of(liar.id))).to_contain_text("failed")
        expect(page.locator("#trust-bar")).to_have_attribute("aria-label", re.compile("Audits: 1 failed, 2 open"))
        expect(page.locator("#present-of")).to_contain_text("2 excluded")
        page.set_viewport_size({"width": 320, "height": 800})
        page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")
        visit.close()


def test_where_nobody_is_excluded_and_nothing_is_audited_trust_is_no_section(visit, trained):
    page = visit(trained, TOKENS["viewer"])
    expect(page.locator("#workers tbody tr").first).to_be_visible()
    expect(page.locator("#trust")).to_be_hidden()


def test_the_leaderboard_needs_no_token_and_fits_a_phone(visit, new_house):
    house = new_house()
    with listening("127.0.0.1", 0, "nobody") as listener:
        board = Leaderboard(house.spec, house.ledger, lambda: house.now_s)
        with served_in_thread(build_service(house.coordinator, house.ledger, leaderboard=board), listener) as server:
            house.ask_only = partial(ask, f"http://127.0.0.1:{server.port}")
            member = house.member()
            member.work()
            page = visit(f"http://127.0.0.1:{server.port}/leaderboard")
            expect(page.locator("#entries tbody tr")).to_contain_text(alias_of(member.id))
            expect(page.locator("#num-workers")).to_have_text("1")
            page.set_viewport_size({"width": 320, "height": 800})
            page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")


# Everybody, everywhere


@pytest.mark.parametrize("scheme, ground", [("light", "rgb(246, 245, 241)"), ("dark", "rgb(21, 24, 27)")])
def test_it_fits_a_phone_and_a_desk_by_day_and_night(visit, trained, scheme, ground):
    page = visit(trained, TOKENS["admin"], color_scheme=scheme)
    expect(page.locator("#held-out .main-svg").first).to_be_visible()
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") == ground
    for width in (320, 390, 768, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")


def test_it_is_readable_without_eyes_and_usable_without_a_mouse(visit, trained):
    page = visit(trained, TOKENS["admin"])
    expect(page.locator("#state")).to_have_text("finished")
    headings = ["The model", "Held-out loss", "Training loss", "Rounds and their deadlines", "Workers", "Events"]
    for heading in headings:
        expect(page.get_by_role("heading", name=heading, exact=True)).to_be_visible()
        expect(page.get_by_role("region", name=heading, exact=True)).to_be_visible()
    expect(page.get_by_role("table", name="The open round of each phase")).to_be_visible()
    expect(page.get_by_role("table", name="3 workers, named after their keys")).to_be_visible()
    expect(page.locator("#news")).to_have_attribute("aria-live", "polite")
    page.keyboard.press("Tab")
    assert page.evaluate("() => getComputedStyle(document.activeElement).outlineWidth") == "3px"


def test_nothing_is_asked_of_another_host_and_the_page_may_load_nothing_else(visit, trained):
    page = visit(trained, TOKENS["admin"])
    expect(page.locator("#training .main-svg").first).to_be_visible()
    assert {url[: len(trained)] for url in visit.asked} == {trained}
    policy = httpx.get(trained, timeout=PATIENCE_MS / 1000).headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline';" in policy


def test_plotly_comes_packed_and_is_kept(trained):
    answer = httpx.get(f"{trained}/page/plotly.min.js", headers={"Accept-Encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip"
    assert "max-age=86400" in answer.headers["cache-control"]
    again = httpx.get(f"{trained}/page/plotly.min.js", headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304
    assert httpx.get(trained, headers={"Accept-Encoding": "identity"}).text.startswith("<!doctype html>")
