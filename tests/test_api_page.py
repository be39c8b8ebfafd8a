"""docs/api.md: its examples run, in order, in one session; its table names the whole public API."""

from __future__ import annotations

import re
from pathlib import Path

import blocktrain

PAGE = (Path(__file__).parents[1] / "docs" / "api.md").read_text()


def test_the_examples_run_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    session: dict[str, object] = {}
    for example in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(example, "docs/api.md", "exec"), session)
    said = capsys.readouterr().out
    assert "['worker-1', 'worker-2']" in said
    assert 'there is no preset "enormous"' in said


def test_every_public_name_is_in_the_table():
    table = PAGE.partition("| --- |")[2].partition("\n\n")[0]
    assert sorted(set(re.findall(r"`(\w+)`", "".join(re.findall(r"\n\|[^|]*", table))))) == sorted(blocktrain.__all__)
