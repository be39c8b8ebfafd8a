"""The dashboard of a run while it goes on: who works and who is late, what an admin can do, whom the run excludes; and
the leaderboard beside it."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

from playwright.sync_api import expect

from blocktrain.http.server import listening, served_in_thread
from blocktrain.swarm.aliases import alias_of
from blocktrain.swarm.coordinator.routes import build_service
from blocktrain.swarm.coordinator.watching.leaderboard import Leaderboard

sys.path.insert(0, str(Path(__file__).parent))
from dashboard_steps import TOKENS, ask, served, status_of

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


def test_a_full_disk_is_said_at_the_top(visit, running, monkeypatch):
    house, url = running
    page = visit(url, TOKENS["viewer"])
    expect(page.locator("#shortage")).to_be_hidden()
    monkeypatch.setattr(house.blobs, "disk_bytes", lambda: (2**40, 0))
    house.member().lease()
    expect(page.locator("#shortage")).to_have_text(re.compile("^The coordinator's disk is full: 0 bytes are left"))


def test_the_unit_of_the_rate_stands_below_it_where_a_long_one_does_not_wrap(visit, running):
    house, url = running
    member = house.member()
    for _ in range(2):
        house.now_s += 10
        member.work()
        house.coordinator.loop.tick()
    page = visit(url, TOKENS["viewer"])
    expect(page.locator("#rate")).to_have_text(re.compile(r"^[\d.]+$"))
    expect(page.locator("#rate-of")).to_have_text(re.compile("^k?B/s, all workers together$"))


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
    expect(page.locator("#rounds")).to_contain_text("the longest allowed, until 3 rounds are timed")


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


def test_a_coordinator_that_goes_away_and_comes_back_is_told_apart(visit, new_house):
    house = new_house()
    with served(house) as url:
        page = visit(url, TOKENS["viewer"], expected="ERR_")
        expect(page.locator("#connection-text")).to_have_text("Live")
    expect(page.locator("#connection-text")).to_contain_text("Out of date by")
    expect(page.locator("#news")).to_contain_text("does not answer")
    expect(page.locator("#blocks .block")).to_have_count(4)


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
