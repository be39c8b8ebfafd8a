"""The playground in real headless Chromium, against a real gateway."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect

from blocktrain.errors import StageUnreachable
from blocktrain.serve.segment.local import LocalForward

KEY = "a-key-that-nobody-guesses"
FIGURES = ["#traversals", "#per-traversal", "#first-byte", "#speed"]


@pytest.fixture(scope="module")
def open_gateway(opened, forward_of, model):
    """A gateway without keys, as on somebody's own machine."""
    return opened(forward_of(model))


@dataclass
class Visits:
    """Opens pages and collects their errors, except the statuses that a test expects."""

    browser: Browser
    contexts: list[BrowserContext] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def __call__(self, gateway, expected_status: int = 0, **settings: Any) -> Page:
        self.contexts.append(self.browser.new_context(**settings))
        page = self.contexts[-1].new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda said: self._hear(said, f"status of {expected_status}"))
        page.goto(gateway.url)
        return page

    def _hear(self, said: ConsoleMessage, expected: str) -> None:
        if said.type == "error" and expected not in said.text:
            self.complaints.append(said.text)


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visits]:
    visits = Visits(browser)
    yield visits
    for context in visits.contexts:
        context.close()
    assert visits.complaints == []


def written(page: Page) -> str:
    expect(page.locator("#write")).to_be_enabled()
    expect(page.locator("#status")).to_contain_text(" byte")
    return page.locator("#written").text_content()


def ask(page: Page, **fields: object) -> None:
    expect(page.locator("#model")).to_contain_text("tiny")
    for name, value in {"prompt": "7 bottles of", "length": 24, "temperature": 0.8, "seed": 5, **fields}.items():
        page.locator(f"#{name}").fill(str(value))
    page.get_by_role("button", name="Write").click()


@pytest.mark.parametrize("mode, traversals", [("Speculative", None), ("Sweep", "2"), ("Autoregressive", "24")])
def test_a_person_sees_the_text_arrive_and_what_it_took(visit, open_gateway, mode, traversals):
    page = visit(open_gateway)
    page.get_by_role("radio", name=mode).check()
    ask(page)
    with open_gateway.client() as client:
        body = {"mode": mode.lower(), **({"candidates": 8} if mode == "Sweep" else {})}
        expected = client.completions.create(
            model="tiny", prompt="7 bottles of", max_tokens=24, seed=5, temperature=0.8, extra_body=body
        )
    assert written(page) == expected.choices[0].text
    assert page.locator("#given").text_content() == "7 bottles of"
    assert "–" not in [page.locator(figure).inner_text() for figure in FIGURES]
    if traversals:
        assert page.locator("#traversals").inner_text() == traversals
        assert page.locator("#strip i:not(.rest)").count() == int(traversals)
    assert page.locator("#status").inner_text().startswith("Done · 24 bytes")


def test_the_keyboard_is_enough(visit, open_gateway):
    page = visit(open_gateway)
    expect(page.locator("#model")).to_contain_text("tiny")
    page.keyboard.press("Tab")
    expect(page.get_by_label("Prompt")).to_be_focused()
    page.keyboard.press("Control+End")
    page.keyboard.type(" of")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("radio", name="Sweep")).to_be_checked()
    page.keyboard.press("Control+Enter")
    assert written(page)
    assert page.locator("#given").text_content() == "The president of"


def test_every_control_has_a_name(visit, open_gateway):
    page = visit(open_gateway)
    for name in ("Prompt", "Length (bytes)", "Temperature", "Seed", "Candidates"):
        expect(page.get_by_label(name, exact=True)).to_be_visible()
    expect(page.get_by_role("log", name="Output")).to_have_attribute("aria-live", "polite")
    expect(page.get_by_role("group", name="Decoding mode").get_by_role("radio")).to_have_count(3)


def test_focus_is_visible(visit, open_gateway):
    page = visit(open_gateway)
    page.keyboard.press("Tab")
    outline = page.get_by_label("Prompt").evaluate("it => getComputedStyle(it).outlineWidth")
    assert outline == "3px"


def test_stop_ends_the_text_and_frees_the_session(visit, opened, forward):
    forward.stops_at = 4
    page = visit(opened(forward))
    page.get_by_role("radio", name="Autoregressive").check()
    ask(page)
    expect(page.locator("#traversals")).to_have_text("3")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#status")).to_contain_text("Stopped · 3 bytes")
    assert forward.forgotten.wait(60)


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"length": 5000}, "Length 5000 is not accepted: give 1 to 4096."),
        ({"temperature": 3}, "Temperature 3 is not accepted: give 0 to 2."),
    ],
)
def test_what_cannot_be_is_shown_as_a_sentence(visit, open_gateway, fields, sentence):
    page = visit(open_gateway, expected_status=400)
    ask(page, **fields)
    expect(page.get_by_role("alert")).to_have_text(sentence)
    expect(page.locator("#status")).to_have_text("Nothing was written")
    ask(page)
    text = written(page)
    assert text
    expect(page.get_by_role("alert")).to_be_hidden()
    ask(page, **fields)
    expect(page.get_by_role("alert")).to_have_text(sentence)
    expect(page.locator("#written")).to_have_text(text)  # what was there before is not lost
    expect(page.get_by_role("button", name="Continue")).to_be_enabled()


def test_the_end_of_a_long_prompt_is_continued_and_the_page_says_so(visit, open_gateway):
    page = visit(open_gateway)
    page.get_by_role("radio", name="Autoregressive").check()
    ask(page, prompt="x" * 65)
    expect(page.locator("#prompt-size")).to_have_text("65 of 64 bytes. The model reads only the end of it.")
    assert written(page)
    expect(page.locator("#status")).to_contain_text("the first 32 bytes of the prompt were not read")


def test_what_is_written_after_a_long_prompt_is_in_view(visit, open_gateway):
    page = visit(open_gateway)
    ask(page, prompt="7 bottles\n" * 60)
    assert written(page)
    assert page.evaluate("() => { const it = document.querySelector('#output'); return it.scrollTop > 0; }")
    assert page.evaluate(
        "() => document.querySelector('#written').getBoundingClientRect().bottom"
        " <= document.querySelector('#output').getBoundingClientRect().bottom"
    )


def test_a_fault_in_the_middle_keeps_what_came(visit, opened, forward):
    forward.faults[4] = StageUnreachable("the stage went away: try again")
    page = visit(opened(forward))
    page.get_by_role("radio", name="Autoregressive").check()
    ask(page)
    expect(page.get_by_role("alert")).to_have_text("The stage went away: try again.")
    expect(page.locator("#status")).to_contain_text("Ended early · 3 bytes")


def test_a_key_is_asked_for_where_one_is_needed_and_kept_in_the_tab_only(visit, gateway):
    page = visit(gateway, expected_status=401)
    expect(page.get_by_role("alert")).to_contain_text("The API key is missing")
    page.get_by_label("API key").fill(KEY)
    page.get_by_label("API key").press("Tab")
    expect(page.get_by_role("alert")).to_be_hidden()
    ask(page)
    assert written(page)
    page.reload()
    expect(page.locator("#model")).to_contain_text("tiny")
    assert page.evaluate("() => [localStorage.length, document.cookie]") == [0, ""]


def test_what_a_model_writes_is_never_html(visit, open_gateway):
    page = visit(open_gateway)
    ask(page, prompt="<img src=x onerror=alert(1)>")
    written(page)
    assert page.locator("#output img").count() == 0
    assert page.locator("#given").text_content() == "<img src=x onerror=alert(1)>"


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_a_desk_by_day_and_night(visit, open_gateway, width, scheme):
    page = visit(open_gateway, viewport={"width": width, "height": 800}, color_scheme=scheme)
    expect(page.locator("#model")).to_contain_text("tiny")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    ground = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(246, 245, 241)", "dark": "rgb(21, 24, 27)"}[scheme]


def test_nothing_is_asked_of_another_host(visit, open_gateway):
    asked: list[str] = []
    page = visit(open_gateway)
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    expect(page.locator("#model")).to_contain_text("tiny")
    scripts = [f"/page/{name}.js" for name in ("drafts", "playground", "race", "stream")]
    files = ["/", "/page/icon.svg", "/page/playground.css", *scripts, "/v1/models"]
    assert sorted(set(asked)) == sorted(open_gateway.url + path for path in files)


def test_the_same_request_is_shown_for_curl(visit, open_gateway):
    page = visit(open_gateway)
    expect(page.locator("#model")).to_contain_text("tiny")
    page.locator("#prompt").fill("it's")
    page.get_by_text("Show as a curl command").click()
    expect(page.locator("#curl")).to_contain_text(f"curl {open_gateway.url}/v1/completions")
    expect(page.locator("#curl")).to_contain_text(r"""{"prompt":"it'\''s","mode":"speculative","max_tokens":200""")


def test_continue_goes_on_from_the_text_so_far_however_long_it_is(visit, open_gateway):
    page = visit(open_gateway)
    ask(page, length=40)
    first = written(page)
    for _ in range(2):  # beyond the 64 bytes that the model reads
        page.get_by_role("button", name="Continue").click()
        expect(page.get_by_role("button", name="Continue")).to_be_enabled()
    whole = page.locator("#written").text_content()
    assert whole.startswith(first)
    assert len(whole.encode()) > len(first.encode()) + 60
    expect(page.get_by_role("alert")).to_be_hidden()


def test_speculative_text_is_coloured_by_who_decided_it(visit, open_gateway):
    page = visit(open_gateway)
    ask(page)
    text = written(page)
    kinds = [page.locator(f"#written .{kind}").all_text_contents() for kind in ("drafted", "corrected", "decided")]
    assert sum(len("".join(each)) for each in kinds) == len(text)
    ends = len(kinds[1]) + len(kinds[2])  # one per traversal, unless it ended inside a character
    assert 0 < ends <= int(page.locator("#traversals").inner_text())


def test_three_modes_race_over_a_simulated_distance(visit, open_gateway):
    page = visit(open_gateway)
    expect(page.locator("#model")).to_contain_text("tiny")
    page.locator("#length").fill("6")
    page.get_by_label("Round trip between hosts").select_option("30")
    page.get_by_role("button", name="Start the race").click()
    expect(page.locator("#race-result")).to_contain_text("times as fast as autoregressive")
    expect(page.locator("#lanes li")).to_have_count(3)
    expect(page.locator("#lanes .cost").first).to_contain_text("6 traversals · 6 bytes")
    expect(page.locator("#lanes .lane.first")).to_have_count(1)


def test_the_page_of_a_model_with_a_tokenizer_counts_tokens(visit, opened, token_model, token_segments):
    page = visit(opened(LocalForward(*token_segments(token_model("stacked"), [[0, 1], [2, 3]]))))
    expect(page.locator("#model")).to_contain_text("reads 64 tokens")
    expect(page.get_by_label("Length (tokens)")).to_have_value("200")
    expect(page.locator("#prompt-size")).to_have_text("13 bytes; it reads the last 64 tokens.")
    page.get_by_label("Length (tokens)").fill("6")
    page.locator("#write").click()
    assert written(page)
    expect(page.locator("#strip")).to_have_attribute("aria-label", re.compile("produced 6 tokens"))
