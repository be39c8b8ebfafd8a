"""The dashboard in real headless Chromium, against a real coordinator behind a real server."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Route, expect

sys.path.insert(0, str(Path(__file__).parent))
from dashboard_steps import HOSTILE, PATIENCE_MS, TOKENS, amount, ask, status_of

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


def test_what_workers_have_trained_on_is_counted_in_tokens_if_the_run_has_a_tokenizer(visit, trained):
    def tokenized(route: Route) -> None:
        answer = route.fetch()
        run = answer.json()
        run["spec"]["corpus"]["tokenizer"] = "bpe:300"
        route.fulfill(response=answer, json=run)

    page = visit(trained, TOKENS["viewer"])
    most = max(worker["tokens"] for worker in status_of(trained)["workers"])
    expect(page.locator("#workers tbody tr").first).to_contain_text(f"{amount(most)} of text")
    page.route("**/v1/run", tokenized)
    page.reload()
    expect(page.locator("#workers tbody tr").first).to_contain_text(re.compile(r"\d tokens of text"))


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


@pytest.mark.parametrize("role", ["viewer", "worker"])
def test_others_have_no_such_buttons(visit, trained, role):
    page = visit(trained, TOKENS[role])
    expect(page.locator("#role")).to_have_text(f"Signed in as {role}.")
    for name in ("Pause", "Resume", "Copy"):
        expect(page.get_by_role("button", name=name, exact=True)).to_have_count(0)
    assert page.locator("#invite").input_value() == ""


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


def test_where_nobody_is_excluded_and_nothing_is_audited_trust_is_no_section(visit, trained):
    page = visit(trained, TOKENS["viewer"])
    expect(page.locator("#workers tbody tr").first).to_be_visible()
    expect(page.locator("#trust")).to_be_hidden()


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
