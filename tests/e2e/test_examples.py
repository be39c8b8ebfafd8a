"""examples/: every program runs from top to bottom on a small text, and so does every cell of the notebook."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = {
    "train_and_compare.py": (["--steps", "5"], ["in blocks, composed", "end to end"]),
    "swarm_in_one_process.py": (["--steps", "10"], ["latecomer", "held-out loss:"]),
    "serve_and_stream.py": (["--max-bytes", "20"], ["autoregressive:", "speculative:", "sweep:"]),
}
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_runs_to_its_end(name, text):
    options, words = PROGRAMS[name]
    command = [sys.executable, str(EXAMPLES / name), "--corpus", str(text), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=text.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [word for word in words if word not in done.stdout] == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_explains_itself(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert f"python examples/{name}" in capsys.readouterr().out


def test_every_example_is_tested():
    assert sorted(PROGRAMS) == sorted(path.name for path in EXAMPLES.glob("*.py"))


def test_the_notebook_runs_from_top_to_bottom(text, monkeypatch, capsys):
    monkeypatch.chdir(text.parent)
    monkeypatch.setitem(os.environ, "TMPDIR", str(text.parent))
    notebook = (EXAMPLES / "notebook.ipynb").read_text().replace('\\"train.steps\\": 60', '\\"train.steps\\": 5')
    session: dict[str, object] = {}
    for cell in json.loads(notebook)["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            small = f'preset("tiny").with_(**{{"corpus.source": {str(text)!r}}})'
            exec(compile(source.replace('preset("tiny")', small), "notebook.ipynb", "exec"), session)
    assert "worker-1" in capsys.readouterr().out
