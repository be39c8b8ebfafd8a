"""The page of results: made of what is kept, and never silent about what is not."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

MACHINE = {"processor": "a processor", "cores": 2, "platform": "an OS", "torch": "2", "threads": 1}


@pytest.fixture(scope="module")
def page(bench):
    return bench("page")


@pytest.fixture(scope="module")
def kept(page):
    """The page of the results that are kept."""
    return page.page(page.look(page.RESULTS))


@pytest.fixture
def toy(bench, monkeypatch):
    """An experiment of our own with one goal, in words."""
    verdict = bench("shared.experiment").Verdict("at most 3 toys", "4", "", False, paper="2")
    module = SimpleNamespace(
        section=lambda document: "## Toys\n\nA toy was run.\n",
        figures=lambda document: {"toy": None, "toy_more": None},
        verdicts=lambda document: [verdict],
    )
    monkeypatch.setitem(sys.modules, "toy", module)
    return module


def found(page, tmp_path, *experiments):
    (tmp_path / "toy.json").write_text(json.dumps({"machine": MACHINE}))
    (tmp_path / "toy-two.json").write_text(json.dumps({"machine": MACHINE}))
    return page.look(tmp_path, experiments)


def test_the_page_that_is_kept_is_that_of_the_results_that_are_kept(page, kept):
    """Where it is not: make results."""
    assert (page.DOCS / "results.md").read_text() == kept


def test_every_picture_of_the_page_is_kept(page):
    names = [name for each in page.look(page.RESULTS) if each.measured for name in each.figures()]
    assert sorted(path.stem for path in (page.DOCS / page.IMAGES).glob("*.png")) == sorted(names)


def test_the_page_opens_with_ten_lines_before_the_goals(page, kept, tmp_path):
    opening = kept[kept.index("## In ten lines") : kept.index("## Goals")]
    assert opening.count("\n- **") == 10
    assert "Not measured" not in opening
    assert page.page(page.look(tmp_path)).count("- Not measured yet.") == 10


def test_no_experiment_is_passed_over_in_silence(page, tmp_path):
    text = page.page(page.look(tmp_path))
    for each in page.EXPERIMENTS:
        assert f"| [{each.name}](#{each.name}) | not measured yet: " in text
        assert f'<a id="{each.name}"></a>' in text


def test_what_can_be_run_is_named_with_its_command(page, tmp_path):
    text = page.page(page.look(tmp_path, [page.Experiment("quality-sotu", "quality", " --corpus sotu")]))
    assert "not measured yet: run `python bench/quality.py --corpus sotu`" in text


def test_what_has_no_script_says_so(page, tmp_path):
    (tmp_path / "nowhere.json").write_text('{"machine": {}}')
    text = page.page(page.look(tmp_path, [page.Experiment("nowhere", "nowhere")]))
    assert "not measured yet: there is no bench/nowhere.py" in text


def test_a_module_that_cannot_be_imported_is_told(page, tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        page.module_of("broken")


def test_a_section_comes_with_machine_and_pictures(page, toy, tmp_path):
    text = page.page(found(page, tmp_path, page.Experiment("toy", "toy")))
    assert "a processor, 2 cores, an OS, torch 2, torch's threads: 1" in text
    assert text.endswith("![toy](images/results/toy.png)\n\n![toy_more](images/results/toy_more.png)\n")


def test_one_module_may_have_two_places(page, toy, tmp_path):
    text = page.page(found(page, tmp_path, page.Experiment("toy-two", "toy", " --name toy-two")))
    assert "![toy-two](images/results/toy-two.png)" in text
    assert "`python bench/toy.py --name toy-two`" in text


def test_a_goal_may_be_all_in_words(page, bench, toy, tmp_path):
    text = page.page(found(page, tmp_path, page.Experiment("toy", "toy")))
    assert "| [toy](#toy) | at most 3 toys | 2 | 4 | not reached |" in text
    assert (
        bench("shared.experiment").goal_lines(toy.verdicts({}))
        == "- goal: at most 3 toys: not reached (4; the paper: 2)\n"
    )


def test_verdicts_are_told_as_the_module_gives_them(page, bench, toy, tmp_path):
    toy.verdicts = lambda document: [
        bench("shared.experiment").at_most("toys", 4, 3, "g", "2"),
        bench("shared.experiment").at_least("x", 1, 1),
    ]
    text = page.page(found(page, tmp_path, page.Experiment("toy", "toy")))
    assert "| [toy](#toy) | toys ≤ 3 | 2 | 4 | not reached |\n|  | x ≥ 1 | – | 1.000 | reached |" in text


def test_main_writes_the_page(page, tmp_path):
    page.main(["--results", str(tmp_path), "--docs", str(tmp_path), "--no-pictures"])
    assert (tmp_path / "results.md").read_text() == page.page(page.look(tmp_path))
