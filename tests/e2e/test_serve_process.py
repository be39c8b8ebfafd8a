"""A model served by real processes on this machine: same text as in one process, also when stages are killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest

from blocktrain.cli.shared.stage_processes import StageProcesses
from blocktrain.errors import ConfigError, StageUnreachable
from blocktrain.serve.chain.pipeline import Pipeline, PipelineSettings
from blocktrain.serve.chain.sockets import new_key_text
from blocktrain.serve.decode.decoder import decode
from blocktrain.serve.decode.request import Mode, Request
from blocktrain.serve.segment.local import LocalForward
from blocktrain.serve.traversal import Forward

LIMIT_S = 250.0
PROMPT = "9 bottles of"
FREE_PORT = "tcp://127.0.0.1:*"
pytestmark = pytest.mark.timeout(300)  # its processes import torch, on a machine that may be busy


def process_of(line: str) -> int:
    return int(re.search(r"process (\d+)", line)[1])


async def written_by(forward: Forward, request: Request, after_step: Callable[[int], None] = lambda _: None) -> bytes:
    out = bytearray()
    steps = 0
    async for step in decode(forward, request):
        out += bytes(each.value for each in step.written)
        steps += 1
        after_step(steps)
    return bytes(out)


def truth(model: Path, request: Request) -> bytes:
    return asyncio.run(written_by(LocalForward.open(model, drafter_blocks=2), request))


def greedy(mode: Mode = Mode.AUTOREGRESSIVE) -> Request:
    return Request(prompt=PROMPT.encode(), max_tokens=40, mode=mode, temperature=0.0)


def test_a_model_served_on_this_machine_survives_the_kill_of_a_stage_and_ends_when_told(trained_run, listen):
    server = listen("serve", trained_run, "--stages", 2, "--port", 0, "--wire", "fp32")
    stages = [process_of(server.line_with(", process ")) for _ in range(2)]
    url = server.address
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stream": True,
            "mode": "autoregressive"}  # fmt: skip
    text, parts = "", 0
    with httpx.stream("POST", f"{url}/completions", json=body, timeout=LIMIT_S) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                part = json.loads(line.removeprefix("data: "))
                assert "error" not in part, part
                text += "".join(choice["text"] for choice in part["choices"])
                parts += 1
                if parts == 3:
                    os.kill(stages[0], signal.SIGKILL)
    assert text.encode() == truth(trained_run, greedy())
    assert process_of(server.line_with(", process ")) not in stages
    server.terminate()
    said, _ = server.communicate(timeout=LIMIT_S)
    assert server.returncode == 0, said


def test_a_stage_without_an_open_port_is_served_through_the_relay_of_a_gateway(
    trained_run, listen, free_port, tmp_path
):
    key = tmp_path / "chain.key"
    key.write_text(new_key_text())
    keys, relay = ["--keys", key], f"tcp://127.0.0.1:{free_port}"
    stage = listen("stage", trained_run, "--via", relay, "--name", "hidden", *keys)
    assert stage.address == "tcp://hidden.via:1"
    stage.line_with(f"the relay at {relay} does not answer")  # it waits for the gateway
    gateway = listen("gateway", "--relay", relay, "--stages", stage.address, *keys, "--port", 0, "--wire", "fp32")
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    reply = httpx.post(f"{gateway.address}/completions", json=body, timeout=LIMIT_S)
    assert reply.json()["choices"][0]["text"].encode() == truth(trained_run, greedy())
    stage.terminate()
    assert stage.wait(LIMIT_S) == 0


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_serve_fails_with_a_stage_that_fails_before_it_listens(tmp_path, capfd):
    async def main() -> None:
        async with StageProcesses([[str(tmp_path)]]):
            pass

    with pytest.raises(ConfigError, match="stage 0 exited with code 2 before it listened: its own error is above"):
        asyncio.run(main())
    assert "is not a run directory" in capfd.readouterr().err


def test_a_stage_ends_when_the_process_that_started_it_is_gone(trained_run, listen):
    stage = listen("stage", trained_run, "--blocks", "0", "--listen", FREE_PORT, "--with-parent")
    assert stage.address.startswith("tcp://127.0.0.1:")
    stage.stdin.close()  # as a kill of its parent does
    assert stage.wait(LIMIT_S) == 0


def test_a_gateway_with_keys_answers_the_openai_client_through_stages_and_ends_when_told(tmp_path, trained_run, listen):
    (tmp_path / "api-keys").write_text("# alice\nthe-long-key-of-alice\n")
    (tmp_path / "chain.key").write_text(new_key_text())
    keys = ["--keys", tmp_path / "chain.key"]
    stages = [listen("stage", trained_run, "--blocks", span, "--listen", FREE_PORT, *keys) for span in ("0-1", "2-3")]
    addresses = ",".join(stage.address for stage in stages)
    options = ["--port", 0, "--wire", "fp32", "--json-logs", "--api-key-file", tmp_path / "api-keys"]
    gateway = listen("gateway", "--stages", addresses, *keys, *options)
    url = gateway.address
    fields = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    with openai.OpenAI(base_url=url, api_key="the-long-key-of-alice", timeout=LIMIT_S) as client:
        text = client.completions.create(**fields).choices[0].text
    assert text.encode() == truth(trained_run, greedy())
    assert json.loads(gateway.line_with("completions"))["bytes_written"] == 40
    with openai.OpenAI(base_url=url, api_key="another") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.completions.create(**fields)
    gateway.terminate()
    assert gateway.wait(LIMIT_S) == 0


def test_a_stage_killed_in_the_middle_costs_a_retry_and_no_byte(trained_run, listen):
    processes = [
        listen("stage", trained_run, "--blocks", span, "--listen", FREE_PORT) for span in ("0-1", "2-3", "2-3")
    ]
    addresses = [process.address for process in processes]

    async def main() -> None:
        patient, hasty = (PipelineSettings(wire="fp32", start_s=LIMIT_S, wait_s=wait_s) for wait_s in (LIMIT_S, 0.5))
        async with Pipeline(addresses, patient) as pipeline, Pipeline(addresses, hasty) as giving_up:

            def kill_the_one_in_use(step: int) -> None:
                if step == 3:
                    (session,) = pipeline._sessions.values()
                    processes[next(n for n in (1, 2) if addresses[n] in session.addresses)].kill()

            for mode in (Mode.SPECULATIVE, Mode.AUTOREGRESSIVE):
                assert await written_by(pipeline, greedy(mode)) == truths[mode]
            assert await written_by(pipeline, greedy(), kill_the_one_in_use) == truths[Mode.AUTOREGRESSIVE]
            assert pipeline.stats().cache_misses + pipeline.stats().retries >= 1
            processes[0].kill()
            with pytest.raises(StageUnreachable, match=re.escape(addresses[0])):
                await written_by(giving_up, greedy())
            back = listen("stage", trained_run, "--blocks", "0-1", "--listen", addresses[0])
            assert await asyncio.to_thread(lambda: back.address) == addresses[0]
            await until_alive(pipeline, addresses[0])
            assert await written_by(pipeline, greedy()) == truths[Mode.AUTOREGRESSIVE]

    truths = {mode: truth(trained_run, greedy(mode)) for mode in (Mode.SPECULATIVE, Mode.AUTOREGRESSIVE)}
    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


async def until_alive(pipeline: Pipeline, address: str) -> None:
    while not pipeline.links[address].alive:
        await asyncio.sleep(0.02)


def test_a_stage_follows_a_training_run_and_swaps_to_what_is_newer(
    tmp_path, trained_run, start, listen, coordinator_of
):
    text = trained_run.parent / "text.txt"
    changes = ["objective.kind=denoise", "train.steps=20", "swarm.round_steps=10"]
    coordinator = start(*coordinator_of(text, tmp_path / "c", *changes))
    invite = coordinator.file(tmp_path / "c" / "invite").strip()
    home = ["--home", tmp_path / "home"]
    address = listen("stage", invite, "--listen", FREE_PORT, "--poll", 0.5, *home).address

    async def main() -> None:
        async with Pipeline([address], PipelineSettings(heartbeat_s=0.1, start_s=LIMIT_S)) as pipeline:
            first = pipeline.info.version
            assert len(await written_by(pipeline, greedy())) == 40
            worker = start("worker", invite, *home)
            said = await asyncio.to_thread(worker.communicate)
            assert worker.returncode == 0, said
            while (newer := pipeline.info.version) == first:
                await asyncio.sleep(0.05)
            assert len(await written_by(pipeline, greedy())) == 40
            assert newer != first

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
