"""The gateway in front of a real chain of stages: what operators see when one of them goes and comes back."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import pytest
import torch

from blocktrain.cli.shared.gateway import Front, answer_http
from blocktrain.http.limits import LOOPBACK, HttpLimits
from blocktrain.http.server import listening
from blocktrain.serve.chain.pipeline import Pipeline
from blocktrain.serve.gateway.app import GatewaySettings, build_gateway

SPANS = ((0, 1), (2, 3))


def client_of(pipeline, **settings) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_gateway(pipeline, GatewaySettings(any_host=True, **settings)))
    return httpx.AsyncClient(transport=transport, base_url="http://gateway.test")


def test_a_text_through_the_chain_is_that_of_one_process(serve):
    body = {"prompt": "abc", "max_tokens": 20, "seed": 3, "temperature": 0}

    async def both() -> list[str]:
        async with serve.chain_of([serve.segment_of("stacked", span) for span in SPANS]) as pipeline:
            forwards = [pipeline, serve.local_of("stacked", *SPANS)]
            answers = [await client_of(each).post("/v1/completions", json=body) for each in forwards]
        return [answer.json()["choices"][0]["text"] for answer in answers]

    chain, here = asyncio.run(both())
    assert chain == here


def test_prompts_are_scored_side_by_side(serve):
    body = {"prompt": ["abc", "abd"], "n": 2, "max_tokens": 0, "echo": True, "logprobs": 0}

    async def scored() -> list[list[float]]:
        async with serve.chain_of([serve.segment_of("stacked", span) for span in SPANS]) as pipeline:
            answer = await client_of(pipeline).post("/v1/completions", json=body)
        return [choice["logprobs"]["token_logprobs"] for choice in answer.json()["choices"]]

    first, again, other, _ = asyncio.run(scored())
    assert first == pytest.approx(again, nan_ok=True)
    assert first[:2] == pytest.approx(other[:2])
    assert first[2] != pytest.approx(other[2])


def test_the_health_names_a_lost_stage_and_the_blocks_that_nobody_serves(serve):
    async def healths() -> list[httpx.Response]:
        first, second = (serve.segment_of("stacked", span) for span in SPANS)
        async with serve.stages_of([first]) as near:
            async with serve.stages_of([second]) as far:
                addresses = [near[0].address, far[0].address]
                pipeline = await Pipeline(addresses, serve.quick).__aenter__()
                client = client_of(pipeline)
                answers = [await client.get("/healthz")]
            await serve.until(lambda: not pipeline.links[addresses[1]].alive)
            answers += [await client.get("/healthz"), await client.get("/metrics")]
            await pipeline.__aexit__()
        return answers

    well, ill, metrics = asyncio.run(healths())
    assert (well.status_code, well.json()["status"]) == (200, "ok")
    assert (ill.status_code, ill.json()["status"]) == (503, "unavailable")
    assert "no stage serves block 2, 3 now: start one that does" in ill.json()["reasons"]
    alive = [line.rsplit(" ", 1)[1] for line in metrics.text.splitlines() if line.startswith("blocktrain_stage_alive")]
    assert alive == ["1.0", "0.0"]


def test_where_blocks_may_be_missing_a_lost_stage_is_no_failure(serve):
    async def health() -> list[object]:
        first, second = (serve.segment_of("droppable", span) for span in SPANS)
        async with serve.stages_of([first]) as near:
            async with serve.stages_of([second]) as far:
                address = far[0].address
                pipeline = await Pipeline([near[0].address, address], replace(serve.quick, degraded=True)).__aenter__()
            await serve.until(lambda: not pipeline.links[address].alive)
            client = client_of(pipeline, degraded=True)
            answer = await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5})
            health = await client.get("/healthz")
            await pipeline.__aexit__()
        return [health.json()["status"], health.status_code, answer.json()["blocktrain"]["degraded"]]

    assert asyncio.run(health()) == ["degraded", 200, True]


def test_a_gateway_computes_with_one_thread(serve, monkeypatch):
    """Torch's threads wait busily, which would take processor time from the stages of the same machine."""
    threads, before = list[int](), torch.get_num_threads()

    async def served(*_: object, **__: object) -> None:
        threads.append(torch.get_num_threads())

    async def answered() -> None:
        async with serve.chain_of([serve.segment_of("stacked", span) for span in SPANS]) as pipeline:
            with listening(LOOPBACK, 0, "nobody") as listener:
                await answer_http(pipeline, GatewaySettings(), Front(listener, None, HttpLimits(), None))

    monkeypatch.setattr("blocktrain.http.server.serve_until_cancelled", served)
    try:
        torch.set_num_threads(2)
        asyncio.run(answered())
    finally:
        torch.set_num_threads(before)
    assert threads == [1]
