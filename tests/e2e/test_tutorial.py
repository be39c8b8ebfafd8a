"""Runs the one-machine part of docs/tutorial.md, in its order. A comment above a block says how: `run` runs it to its
end, in this process, `run until "WORDS"` until it prints these words, in a process that is left running. The
swarm's run takes minutes, and nothing on the page waits for its end."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from blocktrain.cli.main import app

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
BLOCK = re.compile(r'<!-- run(?: until "(.+?)")? -->\n```sh\n(.*?)```', re.DOTALL)


@pytest.fixture
def port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def as_typed(line: str, port: str) -> list[str]:
    """The words of a line as a shell would give them, on a port that is free here."""
    line = re.sub(r"\$\(cat (\S+)\)", lambda found: Path(found[1]).read_text().strip(), line)
    return shlex.split(line.replace("8000", port))


def ask(words: list[str]) -> Any:
    """What curl answers; where there is none, the same request."""
    if shutil.which("curl"):
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout
    (url,) = [word for word in words if word.startswith("http")]
    headers = {"Content-Type": "application/json"}
    return httpx.post(url, content=words[words.index("-d") + 1], headers=headers, timeout=60).text


def swarm_facts() -> dict[str, Any]:
    invite = Path("swarm/invite").read_text().strip()
    return dict(json.loads(CliRunner().invoke(app, ["status", invite, "--json"]).stdout))


@pytest.mark.timeout(600)
def test_the_one_machine_part_runs_as_it_is_written(tmp_path, monkeypatch, start, port):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    blocks = BLOCK.findall(PAGE)
    assert len(blocks) == 8
    said, training = "", []
    for words, block in blocks:
        for line in block.splitlines():
            command, *arguments = as_typed(line, port)
            if arguments[0] == "serve":
                facts = swarm_facts()
                for each in training:
                    each.stop()  # serving would share the cores with them
            if command == "curl":
                said += ask([command, *arguments])
                continue
            if words:
                training.append(start(*arguments))
                training[-1].line_with(words)
            else:
                result = CliRunner().invoke(app, arguments)
                assert result.exit_code == 0, f"{line}\n{result.output}"
                said += result.output
    assert "of 3 phases finished" in said
    assert [worker["updates"] > 0 for worker in facts["workers"]] == [True, True]  # the second one got work too
    assert facts["evaluations"]  # which the dashboard draws
    assert '"bytes_written":40' in said
