"""Dockerfile and compose.yaml: every command parses, every copied file exists, every service fits the others."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from blocktrain.cli.main import app
from blocktrain.spec import preset

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
INVITE = "bt://127.0.0.1:7000/#an-access-token"


def command_of(service: dict[str, Any]) -> list[str]:
    """The words that blocktrain gets in this service."""
    if "entrypoint" not in service:
        return [INVITE if word == "@/data/invite" else word for word in service["command"]]
    shell, option, script = service["entrypoint"]
    assert (shell, option) == ("sh", "-c")
    return shlex.split(script[script.index("blocktrain ") :])[1:]


@pytest.mark.parametrize("name", SERVICES)
def test_the_command_of_a_service_parses(name):
    words = command_of(SERVICES[name])
    COMMANDS[words[0]].make_context(words[0], words[1:])  # raises where an option is unknown or something is missing


def test_there_are_a_coordinator_two_workers_three_stages_and_a_gateway():
    roles = sorted(command_of(service)[0] for service in SERVICES.values())
    assert roles == ["coordinator", "gateway", "keys", "stage", "stage", "stage", "worker", "worker"]


def test_the_stages_hold_every_block_of_the_preset_once():
    words = command_of(SERVICES["coordinator"])
    blocks = preset(words[words.index("--preset") + 1]).model.blocks
    held: list[int] = []
    for name in ("stage-1", "stage-2", "stage-3"):
        words = command_of(SERVICES[name])
        first, last = map(int, words[words.index("--blocks") + 1].split("-"))
        held += range(first, last + 1)
    assert held == list(range(blocks))


def test_the_gateway_asks_the_stages_at_the_ports_they_listen_on():
    words = command_of(SERVICES["gateway"])
    for address in words[words.index("--stages") + 1].split(","):
        host, port = re.fullmatch(r"tcp://([\w-]+):(\d+)", address).groups()
        listen = command_of(SERVICES[host])
        assert listen[listen.index("--listen") + 1] == f"tcp://0.0.0.0:{port}"


@pytest.mark.parametrize("name", SERVICES)
def test_what_a_service_uses_is_declared(name):
    service = SERVICES[name]
    assert set(service.get("depends_on", {})) <= set(SERVICES)
    mounted = {volume.split(":")[0]: volume.split(":")[1] for volume in service.get("volumes", [])}
    assert set(mounted) <= set(COMPOSE["volumes"])
    used = set(re.findall(r"(/data|/keys)/", f"{service.get('command')} {service.get('entrypoint')}"))
    assert used <= set(mounted.values())


@pytest.mark.parametrize("port", [7000, 8000])
def test_no_port_is_open_beyond_this_machine(port):
    published = [each for service in SERVICES.values() for each in service.get("ports", [])]
    assert f"127.0.0.1:{port}:{port}" in published
    assert all(each.startswith("127.0.0.1:") for each in published)


def test_the_dockerfile_copies_what_exists_and_what_the_ignore_file_lets_through():
    copied = [word for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]]
    allowed = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert sorted(copied) == sorted(allowed)
    assert all((ROOT / name).exists() for name in copied)


def test_the_dockerfile_installs_the_torch_of_the_makefile_first():
    pinned = re.search(r"^TORCH := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert f"ARG TORCH={pinned}\n" in DOCKERFILE
    assert DOCKERFILE.index('"$TORCH"') < DOCKERFILE.index("COPY src")


@pytest.mark.parametrize("path", ["deploy/README.md", "deploy/skypilot/worker.yaml"])
def test_what_installs_blocktrain_installs_the_torch_of_the_makefile_first(path):
    pinned = re.search(r"^TORCH := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    text = (ROOT / path).read_text()
    assert 0 < text.index(f"pip install {pinned}") < text.index("pip install blocktrain")


def test_the_image_runs_blocktrain_as_a_user_without_privileges():
    assert 'ENTRYPOINT ["blocktrain"]' in DOCKERFILE
    assert re.search(r"^USER blocktrain$", DOCKERFILE, re.MULTILINE)
