"""Chains that are none, other keys, peers that are no stages, callers that are no gateways: each gets a clear error,
and the others go on. Real sockets on this machine."""

from __future__ import annotations

import asyncio
import json
import struct
from dataclasses import replace

import pytest
import zmq
import zmq.asyncio

from blocktrain.errors import ConfigError, StageUnreachable
from blocktrain.serve.chain.frames import decode, encode
from blocktrain.serve.chain.messages import PROTOCOL, Advance, Answer, Cancel, Head, Hello, ServedModel, Welcome
from blocktrain.serve.chain.pipeline import Pipeline
from blocktrain.serve.chain.sockets import MAX_PAYLOAD_BYTES, ChainKey
from blocktrain.serve.chain.stage import Stage, StageSettings
from blocktrain.serve.traversal import ModelInfo, Traversal

TEXT = Traversal("s", b"It was the best of times")
LEFT, RIGHT = (0, 1), (2, 3)


# Chains that are none

CHAINS = {
    "gap": ([("stacked", (0,), 0), ("stacked", RIGHT, 0)], "no stage has block 1"),
    "overlap": ([("stacked", (0, 1, 2), 0), ("stacked", RIGHT, 0)], "overlaps"),
    "other model": ([("stacked", LEFT, 0), ("end_to_end", RIGHT, 0)], "give stages of one model"),
    "other version": ([("stacked", LEFT, 0), ("stacked", RIGHT, 1)], "holds seed-0.*holds seed-1"),
}


@pytest.mark.parametrize("name", CHAINS)
def test_stages_that_are_no_chain_are_refused_by_name(serve, name):
    async def main():
        parts, text = CHAINS[name]
        async with serve.stages_of([serve.segment_of(*part) for part in parts]) as stages:
            clock = serve.clock()
            pipeline = Pipeline([stage.address for stage in stages], replace(serve.quick, start_s=10.0), clock=clock)
            entering = asyncio.create_task(pipeline.__aenter__())
            await serve.until(lambda: [link.welcome is not None for link in pipeline.links.values()] == [True, True])
            clock.move(11.0, pipeline)
            with pytest.raises(ConfigError, match=text) as refused:
                await entering
            assert any(stage.address in str(refused.value) for stage in stages)

    asyncio.run(main())


def test_nobody_there_is_said(serve, free_address):
    async def main():
        with pytest.raises(ConfigError, match=f"{free_address}: nothing listens there"):
            async with Pipeline([free_address], replace(serve.quick, start_s=0.3)):
                pass

    asyncio.run(main())


# Keys


def new_key() -> ChainKey:
    return ChainKey(*zmq.curve_keypair())


@pytest.mark.parametrize("stage_has, gateway_has", [(1, 2), (1, None), (None, 1)])
def test_another_key_is_refused_and_said(serve, stage_has, gateway_has):
    async def main():
        keys = {None: None, 1: new_key(), 2: new_key()}
        async with Stage(serve.segment_of("stacked", range(4)), key=keys[stage_has]) as stage:
            with pytest.raises(ConfigError, match="refuses our key, or is not a stage"):
                async with Pipeline([stage.address], serve.quick, key=keys[gateway_has]):
                    pass

    asyncio.run(main())


def test_a_chain_with_a_key_works_and_keeps_strangers_out(serve):
    async def main():
        key = new_key()
        stranger = ChainKey(*zmq.curve_keypair())
        spans = [serve.segment_of("stacked", span) for span in (LEFT, RIGHT)]
        async with Stage(spans[0], key=key) as left, Stage(spans[1], key=key) as right:
            impostor = ChainKey(key.public, stranger.secret)  # knows where to knock, and not how
            with pytest.raises(ConfigError, match="refuses our key"):
                async with Pipeline([left.address], serve.quick, key=impostor):
                    pass
            async with Pipeline([left.address, right.address], serve.quick, key=key) as pipeline:
                serve.assert_right(await pipeline(TEXT), TEXT)

    asyncio.run(main())


# Peers that are no stages, and callers that are no gateways


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""], ids=["http", "hangs up"])
def test_a_peer_that_is_no_stage_is_said(serve, says):
    async def main():
        async def answer(reader, writer):
            writer.write(says)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            with pytest.raises(ConfigError, match="is not a stage"):
                async with Pipeline([address], serve.quick):
                    pass

    asyncio.run(main())


def test_a_peer_that_speaks_otherwise_is_said(serve):
    async def main():
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as other:
            other.linger = 0
            address = f"tcp://127.0.0.1:{other.bind_to_random_port('tcp://127.0.0.1')}"

            async def answer():
                sender, *_ = await other.recv_multipart()
                await other.send_multipart([sender, b'{"protocol": 9, "kind": "welcome"}'])

            task = asyncio.create_task(answer())
            with pytest.raises(ConfigError, match=f"protocol 9, this side speaks {PROTOCOL}"):
                async with Pipeline([address], serve.quick):
                    pass
            await task

    asyncio.run(main())


ADVANCE = Advance(id="x", attempt=1, version="v", reply_to="ab", route=(), time_left_s=1.0, head=Head.of(TEXT))


def tensors_of(name: str, shape: list[int]) -> bytes:
    """Safetensors bytes with one tensor of one float."""
    text = json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(4)


GARBAGE = {
    "not JSON": [b"hello?"],
    "many frames": [b"x"] * 50,
    "another protocol": [b'{"protocol": 9, "kind": "hello", "id": 1}'],
    "an answer nobody asked for": [*encode(Hello(id=1)), b"payload"],
    "nothing": [b""],
    "a tensor of 65 axes": [*encode(ADVANCE), tensors_of("prompt", [1] * 65)],
    "a tensor with a name that is no text": [*encode(ADVANCE), tensors_of("\ud800", [1])],
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_answered_with_the_reason_and_leaves_the_stage_working(serve, name):
    async def main():
        async with (
            serve.stages_of([serve.segment_of("stacked", range(4))]) as (stage,),
            Pipeline([stage.address], serve.quick) as pipeline,
        ):
            with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as stranger:
                stranger.linger = 0
                stranger.connect(stage.address)
                await stranger.send_multipart(GARBAGE[name])
                reply = await asyncio.wait_for(stranger.recv_multipart(), serve.limit_s)
                assert b'"malformed"' in reply[0]
            serve.assert_right(await pipeline(TEXT), TEXT)

    asyncio.run(main())


BAD_ANSWERS = {
    "a tensor of 65 axes": [*encode(Answer(id="x", attempt=1, head=ADVANCE.head)), tensors_of("prompt", [1] * 65)],
    "a tensor with a name that is no text": [
        *encode(Answer(id="x", attempt=1, head=ADVANCE.head)),
        tensors_of("\ud800", [1]),
    ],
    "not JSON": [b"hello?"],
    "nothing": [b""],
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_a_link_that_received_a_bad_answer_still_takes_the_next_one(serve, name):
    async def main():
        async with (
            serve.stages_of([serve.segment_of("stacked", range(4))]) as (stage,),
            Pipeline([stage.address], serve.quick) as pipeline,
        ):
            await pipeline(TEXT)
            link = pipeline.links[stage.address]
            received = link.stats.received_bytes
            await stage._router.send([pipeline.identity, *BAD_ANSWERS[name]])
            await serve.until(lambda: link.stats.received_bytes > received)
            serve.assert_right(await pipeline(TEXT.with_(session="next")), TEXT)
            assert link.alive

    asyncio.run(main())


def test_a_link_outlives_a_defect_of_what_takes_its_messages(serve):
    async def main():
        async with (
            serve.stages_of([serve.segment_of("stacked", range(4))]) as (stage,),
            Pipeline([stage.address], serve.quick) as pipeline,
        ):
            link = pipeline.links[stage.address]
            taken, link._received = link._received, lambda *_: 1 / 0
            await stage._router.send([pipeline.identity, *encode(Cancel(id="x"))])
            await serve.until(lambda: "ZeroDivisionError" in link.complaint)
            link._received = taken
            serve.assert_right(await pipeline(TEXT), TEXT)

    asyncio.run(main())


WELCOME = Welcome(
    id=1,
    instance="x",
    blocks=(0,),
    models=(ServedModel.of(ModelInfo("tiny", "v", "stacked", 4, 64, 0, False), "digest"),),
    waiting=0,
    limit=1,
    batch_s=0.0,
)


@pytest.mark.parametrize("blocks", [(0, 2), (3, 4), (1, 0), (0, 0), (0, 1000)])
def test_a_stage_whose_blocks_cannot_be_is_not_believed(serve, blocks):
    async def main():
        async with (
            serve.stages_of([serve.segment_of("stacked", range(4))]) as (stage,),
            Pipeline([stage.address], serve.quick) as pipeline,
        ):
            link = pipeline.links[stage.address]
            (frame,) = encode(WELCOME.model_copy(update={"blocks": blocks}))
            with link._complaints():
                link._take(*decode([frame]))
            assert "are not consecutive blocks of 0-3" in link.complaint
            assert link.welcome.instance == stage.instance
            serve.assert_right(await pipeline(TEXT), TEXT)

    asyncio.run(main())


def test_a_welcome_that_nobody_can_use_ends_neither_the_heartbeat_nor_the_link(serve):
    async def main():
        async with (
            serve.stages_of([serve.segment_of("stacked", range(4))]) as (stage,),
            Pipeline([stage.address], serve.quick) as pipeline,
        ):
            link = pipeline.links[stage.address]
            changed = link._changed

            def defective(link):
                if link.instance == "x" or not link.alive:
                    raise ZeroDivisionError
                changed(link)

            link._changed = defective
            await stage._router.send([pipeline.identity, *encode(WELCOME)])
            await serve.until(lambda: "ZeroDivisionError" in link.complaint)
            heard = link.stats.received_bytes
            await serve.until(lambda: link.stats.received_bytes > heard and not link.complaint)  # of the next heartbeat
            assert not any(task.done() for task in link._tasks)
            serve.assert_right(await pipeline(TEXT), TEXT)

    asyncio.run(main())


def test_a_frame_too_large_ends_the_connection_of_its_sender_only(serve, monkeypatch):
    monkeypatch.setattr("blocktrain.serve.chain.sockets.MAX_PAYLOAD_BYTES", 10_000)

    async def main():
        assert MAX_PAYLOAD_BYTES > 10_000
        async with (
            serve.stages_of([serve.segment_of("stacked", range(4))]) as (stage,),
            Pipeline([stage.address], serve.quick) as pipeline,
        ):
            with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as stranger:
                stranger.linger = 0
                monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                stranger.connect(stage.address)
                await stranger.send_multipart([b"{}", bytes(20_000)])
                await asyncio.wait_for(monitor.recv_multipart(), serve.limit_s)
                stranger.disable_monitor()
                monitor.close()
            serve.assert_right(await pipeline(TEXT), TEXT)

    asyncio.run(main())


def test_a_route_to_nowhere_is_reported_by_the_stage_that_took_it(serve, free_address):
    async def main():
        segments = [serve.segment_of("stacked", LEFT), serve.segment_of("stacked", RIGHT)]
        async with (
            serve.stages_of(segments, pass_s=0.2) as (left, right),
            Pipeline([left.address, right.address], replace(serve.quick, wait_s=0.1)) as pipeline,
        ):
            link = pipeline.links[right.address]
            pipeline.links[free_address] = link  # the gateway believes that it is there
            link.address = free_address
            with pytest.raises(StageUnreachable, match=free_address):
                await pipeline(TEXT)
            del pipeline.links[free_address]

    asyncio.run(main())


def test_an_open_address_without_a_key_is_refused(serve):
    with pytest.raises(ConfigError, match=r"--keys chain\.key everywhere"):
        Stage(serve.segment_of("stacked", LEFT), StageSettings(listen="tcp://0.0.0.0:*"))
    with pytest.raises(ConfigError, match=r"--keys chain\.key everywhere"):
        Pipeline(["tcp://192.0.2.1:7001"])


def test_a_taken_port_is_said(serve):
    async def main():
        async with serve.stages_of([serve.segment_of("stacked", LEFT)]) as (stage,):
            with pytest.raises(ConfigError, match="end what listens there, or give another port"):
                async with serve.stages_of([serve.segment_of("stacked", LEFT)], listen=stage.address):
                    pass

    asyncio.run(main())
