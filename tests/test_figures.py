"""Figures as files. The PNG needs a browser, which may not be installed."""

from __future__ import annotations

import pytest
from plotly.offline import get_plotlyjs

from blocktrain.figures import PALETTE, Line, Section, bar_figure, line_figure, write_figure, write_page

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
        tmp_path / "page.html", "<T>", [Section("1", figure=FIGURE), Section("2", "a < b", bars, ["c"], [["<i>"]])]
    )
    page = (tmp_path / "page.html").read_text()
    assert 'src="http' not in page
    assert page.count("Plotly.newPlot(") >= 2
    assert len(page) < 1.5 * len(get_plotlyjs())
    assert "<h1>&lt;T&gt;</h1>" in page
    assert "<td>&lt;i&gt;</td>" in page
