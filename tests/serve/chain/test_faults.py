"""Stages that die, are slow, full, swapped, foreign or hostile: the answer is right, or a clear error, and the others
go on. Real sockets on this machine; a stage is held in the middle of its work by a gate."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
import zmq
import zmq.asyncio

from blocktrain.errors import ConfigError, Overloaded, StageUnreachable
from blocktrain.serve.chain.messages import Advance, Answer, Cancel, Head, Hello, encode
from blocktrain.serve.chain.pipeline import Pipeline
from blocktrain.serve.chain.sockets import MAX_PAYLOAD_BYTES, ChainKey
from blocktrain.serve.chain.stage import Stage, StageSettings
from blocktrain.serve.segment import drafting
from blocktrain.serve.traversal import Draft, Traversal

TEXT = Traversal("s", b"It was the best of times")
LEFT, RIGHT = (0, 1), (2, 3)


class Forgetful:
    """Loses all sessions before it computes its second batch."""

    def __init__(self, segment) -> None:
        self.spec, self.info, self.blocks, self.forget = segment.spec, segment.info, segment.blocks, segment.forget
        self.segment, self.num_batches, self.first_batch = segment, 0, threading.Event()

    def advance(self, batch: Sequence[Traversal], ahead=None):
        self.num_batches += 1
        if self.num_batches == 2:
            self.segment._sessions._held.clear()
        self.first_batch.set()
        return self.segment.advance(batch, ahead)


class SendingOneAhead:
    """Drafts on only when the piece that it sent ahead first is being computed."""

    def __init__(self, segment, computed: threading.Event, limit_s: float) -> None:
        self.spec, self.info, self.blocks, self.forget = segment.spec, segment.info, segment.blocks, segment.forget
        self.segment, self.computed, self.limit_s = segment, computed, limit_s

    def advance(self, batch: Sequence[Traversal], ahead=None):
        waiting = {at: partial(self._send, take) for at, take in (ahead or {}).items()}
        return self.segment.advance(batch, waiting)

    def _send(self, take, piece: Traversal) -> None:
        take(piece)
        assert self.computed.wait(self.limit_s)


class Choosing:
    """Ties fall to this address."""

    def __init__(self, address: str) -> None:
        self._address = address

    def sample(self, views, count):
        return sorted(views, key=lambda view: view.address != self._address)


async def kill(stage: Stage) -> None:
    """As seen from outside: the connections break, and nothing is answered any more. tests/e2e kills processes."""
    for task in stage._tasks:
        task.cancel()
    stage._network.close()


def assert_right(reply: Traversal, serve, kind: str = "stacked", text: Traversal = TEXT) -> None:
    truth = serve.local_of(kind).run(text.with_(session="truth"))
    torch.testing.assert_close(reply.prompt_logits, truth.prompt_logits, atol=1e-5, rtol=1e-4)


def test_a_stage_that_dies_in_the_middle_is_replaced_by_its_replica(serve):
    async def main():
        doomed = serve.gated(serve.segment_of("stacked", RIGHT))
        segments = [serve.segment_of("stacked", LEFT), doomed, serve.segment_of("stacked", RIGHT)]
        async with serve.stages_of(segments) as stages:
            addresses = [stage.address for stage in stages]
            async with Pipeline(addresses, serve.quick, rng=Choosing(addresses[1])) as pipeline:
                await serve.all_known(pipeline)
                reply = asyncio.create_task(pipeline(TEXT))
                await doomed.has_a_batch()
                await kill(stages[1])
                assert_right(await reply, serve)
                assert pipeline.stats().retries == 1
                assert not pipeline.stats().stages[addresses[1]].alive
                doomed.gate.set()

    asyncio.run(main())


def test_without_a_replica_the_error_names_the_stage_that_is_gone(serve):
    async def main():
        async with serve.stages_of([serve.segment_of("stacked", span) for span in (LEFT, RIGHT)]) as (left, right):
            settings = replace(serve.quick, wait_s=0.1)
            async with Pipeline([left.address, right.address], settings) as pipeline:
                await kill(right)
                with pytest.raises(StageUnreachable, match=f"{right.address}: nobody listens there"):
                    await pipeline(TEXT)

    asyncio.run(main())


@pytest.mark.parametrize("kind, gone", [("droppable", 1), ("droppable", 0), ("denoise", 1)])
def test_a_model_trained_for_it_answers_without_the_stage_and_says_so(serve, kind, gone):
    async def main():
        async with serve.stages_of([serve.segment_of(kind, span) for span in (LEFT, RIGHT)]) as stages:
            settings = replace(serve.quick, degraded=True)
            async with Pipeline([stage.address for stage in stages], settings) as pipeline:
                await pipeline(TEXT)
                await kill(stages[gone])
                longer = TEXT.with_(prompt=TEXT.prompt + b"!", start=len(TEXT.prompt))
                reply = await pipeline(longer)
                assert reply.degraded
                assert pipeline.stats().degraded == 1
                missing = (LEFT, RIGHT)[gone]
                assert_right(reply, serve, kind, longer.with_(start=0, missing=missing))

    asyncio.run(main())


def test_a_draft_is_weighed_without_the_lost_stage(serve):
    async def main():
        segments = [serve.segment_of("denoise", span) for span in (LEFT, (2,), (3,))]
        settings = replace(serve.quick, degraded=True)
        async with (
            serve.stages_of(segments) as stages,
            Pipeline([stage.address for stage in stages], settings) as pipeline,
        ):
            text = TEXT.with_(draft=Draft(4, candidates=2, seed=1))
            await kill(stages[0])
            reply = await pipeline(text)
            truth = serve.local_of("denoise", LEFT, (2,), (3,)).run(text.with_(missing=LEFT))
            assert reply.degraded
            assert torch.equal(reply.tails, truth.tails)
            torch.testing.assert_close(reply.tail_logits, truth.tail_logits, atol=1e-5, rtol=1e-4)

    asyncio.run(main())


def test_a_model_not_trained_for_it_does_not_answer_without_a_stage(serve):
    async def main():
        async with serve.stages_of([serve.segment_of("stacked", span) for span in (LEFT, RIGHT)]) as stages:
            settings = replace(serve.quick, degraded=True, wait_s=0.1)
            async with Pipeline([stage.address for stage in stages], settings) as pipeline:
                await kill(stages[1])
                with pytest.raises(StageUnreachable):
                    await pipeline(TEXT)

    asyncio.run(main())


def test_a_stage_that_comes_back_is_used_again_and_who_waits_for_it_gets_an_answer(serve):
    async def main():
        async with (
            serve.stages_of([serve.segment_of("stacked", span) for span in (LEFT, RIGHT)]) as (left, right),
            Pipeline([left.address, right.address], serve.quick) as pipeline,
        ):
            await pipeline(TEXT)
            await kill(right)
            longer = TEXT.with_(prompt=TEXT.prompt + b"!", start=len(TEXT.prompt))
            reply = asyncio.create_task(pipeline(longer))
            async with serve.stages_of([serve.segment_of("stacked", RIGHT)], listen=right.address):
                assert_right(await reply, serve, text=longer.with_(start=0))

    asyncio.run(main())


def test_a_full_stage_says_when_to_come_again(serve):
    async def main():
        gated = serve.gated(serve.segment_of("stacked", range(4)))
        async with (
            serve.stages_of([gated], max_waiting=1) as (stage,),
            Pipeline([stage.address], serve.quick) as pipeline,
        ):
            under_way = asyncio.create_task(pipeline(TEXT.with_(session="first")))
            await gated.has_a_batch()
            waits = asyncio.create_task(pipeline(TEXT.with_(session="second")))
            await serve.until(lambda: stage.waiting == 1)
            with pytest.raises(Overloaded, match="at most 1 may") as refused:
                await pipeline(TEXT.with_(session="third"))
            assert refused.value.retry_after_s > 0
            gated.gate.set()
            for reply in (under_way, waits):
                assert_right(await reply, serve)

    asyncio.run(main())


def test_what_a_full_stage_refuses_goes_to_its_replica(serve):
    async def main():
        gated = serve.gated(serve.segment_of("stacked", range(4)))
        segments = [gated, serve.segment_of("stacked", range(4))]
        async with serve.stages_of(segments, max_waiting=1) as stages:
            addresses = [stage.address for stage in stages]
            async with Pipeline(addresses[:1], serve.quick) as filling:
                tasks = [asyncio.create_task(filling(TEXT.with_(session="1")))]
                await gated.has_a_batch()
                tasks.append(asyncio.create_task(filling(TEXT.with_(session="2"))))
                await serve.until(lambda: stages[0].waiting == 1)
                pinned = Pipeline(addresses, serve.quick, rng=Choosing(addresses[0]))
                async with pinned as pipeline:
                    await serve.all_known(pipeline)
                    pipeline.links[addresses[0]].welcome = pipeline.links[addresses[0]].welcome.model_copy(
                        update={"waiting": 0}  # as it was a heartbeat ago
                    )
                    assert_right(await pipeline(TEXT), serve)
                gated.gate.set()
                await asyncio.gather(*tasks)

    asyncio.run(main())


def test_waiting_requests_are_computed_together(serve):
    async def main():
        gated = serve.gated(serve.segment_of("stacked", range(4)))
        async with serve.stages_of([gated]) as (stage,), Pipeline([stage.address], serve.quick) as pipeline:
            replies = [asyncio.create_task(pipeline(TEXT.with_(session="0")))]
            await gated.has_a_batch()
            replies += [asyncio.create_task(pipeline(TEXT.with_(session=str(n)))) for n in range(1, 6)]
            await serve.until(lambda: stage.waiting == 5)
            gated.gate.set()
            await asyncio.gather(*replies)
            assert gated.batches == [1, 5]

    asyncio.run(main())


def test_who_hangs_up_frees_the_work_and_the_caches_of_all_stages(serve):
    async def main():
        segments = [serve.segment_of("stacked", LEFT), serve.gated(serve.segment_of("stacked", RIGHT))]
        async with (
            serve.stages_of(segments) as stages,
            Pipeline([stage.address for stage in stages], serve.quick) as pipeline,
        ):
            blocker = asyncio.create_task(pipeline(TEXT.with_(session="other")))
            await segments[1].has_a_batch()
            reply = asyncio.create_task(pipeline(TEXT))
            await serve.until(lambda: stages[1].waiting == 1)
            reply.cancel()
            await serve.until(lambda: stages[1].waiting == 0)
            await pipeline.forget("s")
            segments[1].gate.set()
            await blocker
            await pipeline.forget("other")
            await serve.until(lambda: segments[0].cached_bytes == segments[1].segment.cached_bytes == 0)

    asyncio.run(main())


def test_a_traversal_whose_time_is_over_is_not_computed(serve):
    async def main():
        gated, clock = serve.gated(serve.segment_of("stacked", range(4))), serve.clock()
        async with (
            serve.stages_of([gated], clock=clock) as (stage,),
            Pipeline([stage.address], replace(serve.quick, deadline_s=60.0), clock=clock) as pipeline,
        ):
            replies = [asyncio.create_task(pipeline(TEXT))]
            await gated.has_a_batch()
            replies.append(asyncio.create_task(pipeline(TEXT.with_(session="late"))))
            await serve.until(lambda: stage.waiting == 1)
            clock.move(61.0, pipeline)
            for reply in replies:
                with pytest.raises(StageUnreachable, match="in time"):
                    await reply
            gated.gate.set()
            await serve.until(lambda: stage.waiting == 0)
            assert gated.batches == [1]

    asyncio.run(main())


def test_a_stage_refuses_a_traversal_whose_time_is_over_in_its_queue(serve):
    async def main():
        gated, clock = serve.gated(serve.segment_of("stacked", range(4))), serve.clock()
        async with (
            serve.stages_of([gated], clock=clock) as (stage,),
            Pipeline([stage.address], replace(serve.quick, deadline_s=60.0)) as pipeline,
        ):
            reply = asyncio.create_task(pipeline(TEXT))
            await gated.has_a_batch()
            late = asyncio.create_task(pipeline(TEXT.with_(session="late")))
            await serve.until(lambda: stage.waiting == 1)
            clock.now_s += 61.0
            gated.gate.set()
            with pytest.raises(StageUnreachable, match="its time was over before"):
                await late
            assert_right(await reply, serve)
            assert gated.batches == [1]

    asyncio.run(main())


def test_a_slow_stage_costs_no_more_than_a_second_attempt(serve):
    async def main():
        slow, fast, clock = (
            serve.gated(serve.segment_of("stacked", range(4))),
            serve.segment_of("stacked", range(4)),
            serve.clock(),
        )
        async with serve.stages_of([slow, fast]) as stages:
            addresses = [stage.address for stage in stages]
            settings = replace(serve.quick, attempt_s=20.0)
            async with Pipeline(addresses, settings, rng=Choosing(addresses[0]), clock=clock) as pipeline:
                await serve.all_known(pipeline)
                slow.gate.set()
                await pipeline(TEXT)
                slow.gate.clear()
                slow.entered.clear()
                longer = TEXT.with_(prompt=TEXT.prompt + b"!", start=len(TEXT.prompt))
                reply = asyncio.create_task(pipeline(longer))
                await slow.has_a_batch()
                clock.move(21.0, pipeline)
                assert_right(await reply, serve, text=longer.with_(start=0))
                assert pipeline.stats().stages[addresses[1]].traversals == 1
                slow.gate.set()

    asyncio.run(main())


def test_a_traversal_attempted_again_while_it_is_computed_is_computed_once(serve):
    async def main():
        gated, clock = serve.gated(serve.segment_of("stacked", range(4))), serve.clock()
        async with (
            serve.stages_of([gated]) as (stage,),
            Pipeline([stage.address], replace(serve.quick, attempt_s=20.0), clock=clock) as pipeline,
        ):
            reply = asyncio.create_task(pipeline(TEXT))
            await gated.has_a_batch()
            clock.move(21.0, pipeline)
            await serve.until(lambda: [each.message.attempt for each in stage._computing.values()] == [2])
            assert pipeline.stats().retries == 1
            gated.gate.set()
            assert_right(await reply, serve)
            assert gated.batches == [1]

    asyncio.run(main())


def test_a_stage_that_loses_the_pieces_sent_ahead_gets_the_draft_once_more(serve, monkeypatch):
    monkeypatch.setattr(drafting, "PIECE_COLUMNS", 3)

    async def main():
        text = TEXT.with_(draft=Draft(11, candidates=3, seed=5))
        forgetful = Forgetful(serve.segment_of("stacked", RIGHT))
        drafter = SendingOneAhead(serve.segment_of("stacked", LEFT), forgetful.first_batch, serve.limit_s)
        async with serve.chain_of([drafter, forgetful]) as pipeline:
            reply = await pipeline(text)
            truth = serve.local_of("stacked", LEFT, RIGHT).run(text)
            assert torch.equal(reply.tails, truth.tails)
            torch.testing.assert_close(reply.tail_logits, truth.tail_logits, atol=1e-5, rtol=1e-4)
            assert pipeline.stats().retries == 1

    asyncio.run(main())


def test_a_swap_under_load_never_mixes_two_versions(serve):
    async def main():
        old = [serve.segment_of("stacked", span, seed=0) for span in (LEFT, RIGHT)]
        new = [serve.segment_of("stacked", span, seed=1) for span in (LEFT, RIGHT)]
        truths = [serve.local_of("stacked", seed=seed).run(TEXT).prompt_logits for seed in (0, 1)]
        assert (truths[0] - truths[1]).abs().max() > 0.1

        def version_of(reply: Traversal) -> int:
            near = [n for n in (0, 1) if torch.allclose(reply.prompt_logits, truths[n], atol=1e-4)]
            assert len(near) == 1
            return near[0]

        async with (
            serve.stages_of(old) as stages,
            Pipeline([stage.address for stage in stages], serve.quick) as pipeline,
        ):
            assert version_of(await pipeline(TEXT.with_(session="pinned"))) == 0
            seen = []
            for stage, segment in zip(stages, new, strict=True):
                replies = [asyncio.create_task(pipeline(TEXT.with_(session=f"{len(seen)}-{n}"))) for n in range(8)]
                stage.offer(segment)
                seen.append({version_of(reply) for reply in await asyncio.gather(*replies)})
            await serve.until(lambda: pipeline.info.version == "seed-1")
            assert version_of(await pipeline(TEXT.with_(session="new"))) == 1
            assert version_of(await pipeline(TEXT.with_(session="pinned", start=3))) == 0
            assert seen[0] == {0}

    asyncio.run(main())


def test_a_session_whose_version_is_gone_is_told_so(serve):
    async def main():
        async with (
            serve.stages_of([serve.segment_of("stacked", range(4))]) as (stage,),
            Pipeline([stage.address], replace(serve.quick, wait_s=0.1)) as pipeline,
        ):
            await pipeline(TEXT)
            for seed in (1, 2):
                stage.offer(serve.segment_of("stacked", range(4), seed=seed))
            assert stage.versions == ("seed-2", "seed-1")
            with pytest.raises(StageUnreachable, match=r"version|seed-0"):
                await pipeline(TEXT.with_(start=3))

    asyncio.run(main())


def test_other_blocks_cannot_follow(serve):
    stage = Stage(serve.segment_of("stacked", LEFT))
    with pytest.raises(ConfigError, match="offer the same blocks"):
        stage.offer(serve.segment_of("stacked", RIGHT, seed=1))


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
        with pytest.raises(ConfigError, match=f"{free_address}: nobody listens there"):
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
            with pytest.raises(ConfigError, match="refuses our key, or is no stage"):
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
                assert_right(await pipeline(TEXT), serve)

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
            with pytest.raises(ConfigError, match="is no stage"):
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
            with pytest.raises(ConfigError, match="protocol 9, this side speaks 3"):
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
            assert_right(await pipeline(TEXT), serve)

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
            await stage._router.send_multipart([pipeline.identity, *BAD_ANSWERS[name]])
            await serve.until(lambda: link.stats.received_bytes > received)
            assert_right(await pipeline(TEXT.with_(session="next")), serve)
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
            await stage._router.send_multipart([pipeline.identity, *encode(Cancel(id="x"))])
            await serve.until(lambda: "ZeroDivisionError" in link.complaint)
            link._received = taken
            assert_right(await pipeline(TEXT), serve)

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
            assert_right(await pipeline(TEXT), serve)

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
