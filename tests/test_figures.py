"""Figures as files. The PNG needs a browser, which may not be installed."""

from __future__ import annotations

import pytest
from plotly.offline import get_plotlyjs

from blocktrain.figures import PALETTE, Line, PageSummary, Section, bar_figure, line_figure, write_figure, write_page

FIGURE = line_figure(
    [Line("ours", [0, 1], [2, 1]), Line("theirs", [0, 1], [2, 2], "#000000"), Line("more", [0], [1])],
    title="T",
    x_title="bytes",
    y_title="nats",
)


def test_lines_take_the_palette_s_colours_unless_they_have_their_own():
    assert [trace.line.color for trace in FIGURE.data] == [PALETTE[0], "#000000", PALETTE[1]]


def test_a_figure_becomes_a_page_that_needs_no_network_and_a_picture(tmp_path, monkeypatch):
    monkeypatch.setattr("blocktrain.figures.PNG_TIMEOUT_S", 60)  # within a test's own limit
    reasons: list[str] = []
    paths = write_figure(FIGURE, tmp_path / "v1.5", skipped=reasons.append)
    assert paths[0] == tmp_path / "v1.5.html"
    assert 'src="http' not in paths[0].read_text()
    if any("no Chrome or Chromium was found" in reason or "took longer than" in reason for reason in reasons):
        pytest.skip(reasons[0])
    assert (reasons, paths[1:]) == ([], [tmp_path / "v1.5.png"])
    assert paths[1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "browser, reason", [("/no/such/browser", "no Chrome or Chromium was found"), ("/bin/false", "the browser failed (")]
)
def test_a_browser_that_is_missing_or_fails_costs_only_the_picture(tmp_path, monkeypatch, browser, reason):
    monkeypatch.setenv("BROWSER_PATH", browser)
    reasons: list[str] = []
    assert write_figure(FIGURE, tmp_path / "figure", skipped=reasons.append) == [tmp_path / "figure.html"]
    assert reason in reasons[0]


def test_a_browser_that_hangs_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("blocktrain.figures._DRAW", "input(); input()")
    monkeypatch.setattr("blocktrain.figures.PNG_TIMEOUT_S", 0)
    reasons: list[str] = []
    assert write_figure(FIGURE, tmp_path / "figure", skipped=reasons.append) == [tmp_path / "figure.html"]
    assert "the browser took longer than 0 s" in reasons[0]


def test_a_page_holds_plotly_once_and_takes_text_for_text(tmp_path):
    bars = bar_figure(["a"], [1.0], title="T", x_title="x", y_title="y")
    write_page(
        tmp_path / "page.html",
        "<T>",
        [Section("1", figure=FIGURE), Section("2", "a < b", bars, ["c", "d"], [["e", "<i>"]])],
    )
    page = (tmp_path / "page.html").read_text()
    assert 'src="http' not in page
    assert page.count("Plotly.newPlot(") >= 2
    assert len(page) < 1.5 * len(get_plotlyjs())
    assert "<h1>&lt;T&gt;</h1>" in page
    assert '<td data-label="d">&lt;i&gt;</td>' in page


def test_a_page_opens_with_its_summary_and_has_colours_for_the_night(tmp_path):
    summary = PageSummary([("Held-out loss", "1.5", "nats/byte")], ("The <", "president"))
    write_page(tmp_path / "page.html", "T", [Section("1", figure=FIGURE)], summary)
    page = (tmp_path / "page.html").read_text()
    assert (
        page.index("<dd>1.5</dd>") < page.index('<span class="prompt">The &lt;</span>president') < page.index("<h2>1")
    )
    assert "prefers-color-scheme: dark" in page


@pytest.mark.parametrize(
    "values, starts_at_zero",
    [([1.20, 1.21], False), ([1.0, 3.0], True), ([], True), ([0.0, 0.0], True), ([1.5], False)],
)
def test_bars_that_differ_little_do_not_start_at_zero(values, starts_at_zero):
    figure = bar_figure(["a"] * len(values), values, title="T", x_title="x", y_title="y", zoom=True)
    assert (figure.layout.yaxis.range is None) == starts_at_zero
    assert ("(not from 0)" in figure.layout.yaxis.title.text) != starts_at_zero
