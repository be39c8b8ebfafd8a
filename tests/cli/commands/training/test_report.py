"""blocktrain report, from each kind of directory that it accepts."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from blocktrain.cli.shared.story import STORY_FILE
from blocktrain.spec import preset
from blocktrain.swarm.aliases import alias_of
from blocktrain.swarm.local import local_swarm

HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def swarm_folders(tmp_path_factory) -> tuple[Path, Path]:
    """(a coordinator's directory, its exported model), trained by a worker whose name is an attack."""
    from typer.testing import CliRunner

    from blocktrain.cli.main import app

    folder = tmp_path_factory.mktemp("told")
    (folder / "text.txt").write_text("".join(f"{n} bottles of beer on the wall, " for n in range(500)))
    settings = {"corpus.source": str(folder / "text.txt"), "train.steps": 4, "swarm.round_steps": 2}
    with local_swarm(preset("tiny").with_(**settings), workers=0, folder=folder / "swarm") as swarm:
        swarm.add_worker(HOSTILE)
        assert swarm.wait(100)
        arguments = ["export", swarm.invite, str(folder / "model"), "--home", str(folder)]
        assert CliRunner().invoke(app, arguments).exit_code == 0
    return folder / "swarm", folder / "model"


def page_of(run, *arguments: object) -> str:
    result = run("report", *arguments, "--no-png")
    assert result.exit_code == 0, result.stderr
    return Path(result.stdout.strip()).read_text()


WRITTEN = "What it wrote"


def headings(page: str) -> list[str]:
    return [line.removeprefix("<h2>").removesuffix("</h2>") for line in page.splitlines() if line.startswith("<h2>")]


def test_the_report_of_a_local_run_has_curves_blocks_and_held_out_loss(run, trained, tmp_path):
    page = page_of(run, trained[0], "--out", tmp_path / "page.html", "--max-windows", 2)
    expected = [WRITTEN, "Training loss", "Workers and bytes", "Held-out loss now", "Blocks", "Settings"]
    assert [heading for heading in headings(page) if heading != "Held-out loss while training"] == expected
    assert "phase 2 of 3, blocks 1+2" in page
    assert "stack, combined" in page
    assert list(tmp_path.glob("*.png")) == []


@pytest.mark.parametrize(
    "which, expected",
    [
        (0, [WRITTEN, "Held-out loss", "Training loss", "Workers", "Bytes", "Settings", "Events"]),
        (
            1,
            [
                WRITTEN,
                "Held-out loss",
                "Training loss",
                "Workers",
                "Bytes",
                "Events",
                "Held-out loss now",
                "Blocks",
                "Settings",
            ],
        ),
    ],
)
def test_a_swarm_s_report_comes_from_a_coordinator_s_directory_or_an_export(
    run, swarm_folders, tmp_path, which, expected
):
    page = page_of(run, swarm_folders[which], "--out", tmp_path / "page.html", "--max-windows", 2)
    assert headings(page) == expected
    assert "1 took part." in page


@pytest.mark.parametrize("which", ["coordinator", "export"])
def test_the_report_of_a_swarm_names_workers_by_their_aliases(run, swarm_folders, tmp_path, which):
    told = json.loads((swarm_folders[1] / STORY_FILE).read_text())
    assert [worker["name"] for worker in told["workers"]] == [alias_of(worker["id"]) for worker in told["workers"]]
    folder = swarm_folders[which == "export"]
    page = page_of(run, folder, "--out", tmp_path / "page.html", "--max-windows", 2)
    assert told["workers"][0]["name"] in page
    assert "alert(1)" not in page


def test_a_comparison_says_that_the_loss_of_a_coordinator_was_measured_by_its_workers(run, swarm_folders, tmp_path):
    swarm, model = swarm_folders
    options = ["--corpus", swarm.parent / "text.txt", "--out", tmp_path / "compared", "--max-windows", 2]
    mixed = run("compare", swarm, model, *options).stderr
    assert f"note: {swarm}: the loss is the last evaluation by its workers" in mixed
    assert "note: " not in run("compare", swarm, swarm, *options).stderr


def test_the_page_needs_no_network(run, swarm_folders, tmp_path):
    page = page_of(run, swarm_folders[0], "--out", tmp_path / "page.html")
    assert 'src="http' not in page
    assert page.count("<script") == page.count("</script>")


def test_a_ledger_is_read_and_not_written(run, swarm_folders, tmp_path):
    def facts() -> dict[str, str]:
        return {x.name: hashlib.sha256(x.read_bytes()).hexdigest() for x in swarm_folders[0].glob("ledger.db*")}

    before = facts()
    page_of(run, swarm_folders[0], "--out", tmp_path / "page.html")
    assert facts() == before


def test_without_a_browser_the_pictures_are_skipped(run, trained, tmp_path):
    result = run("report", trained[0], "--out", tmp_path / "page.html", "--max-windows", 2)
    assert result.stdout == f"{tmp_path / 'page.html'}\n"
    assert result.stderr.count("was skipped, no Chrome or Chromium was found") >= 2


def test_an_unfinished_run_says_what_is_missing(run, tiny, tmp_path):
    run("train", *tiny, "--block", 0)
    page = page_of(run, tmp_path / "run")
    assert "Not measured: " in page
    assert ">not yet</td>" in page


@pytest.mark.parametrize(
    "prepare, sentence",
    [
        (lambda folder: None, "neither spec.toml nor ledger.db"),
        (lambda folder: (folder / "ledger.db").write_text("nothing"), "make it readable, or restore it"),
    ],
)
def test_a_directory_without_a_run_is_refused(run, tmp_path, prepare, sentence):
    prepare(tmp_path)
    result = run("report", tmp_path)
    assert result.exit_code == 2
    assert sentence in result.stderr


def test_a_damaged_story_is_refused(run, swarm_folders, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for path in swarm_folders[1].iterdir():
        if path.is_file():
            (model / path.name).write_bytes(path.read_bytes())
    (model / STORY_FILE).write_text(json.dumps({"workers": []}))
    result = run("report", model)
    assert result.exit_code == 2
    assert "delete it, or export again" in result.stderr
