"""Stages that die, are slow, full or swapped: the answer is right, or a clear error, and the others go on. Real sockets
on this machine; a stage is held in the middle of its work by a gate."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from blocktrain.errors import StageUnreachable
from blocktrain.serve.chain.pipeline import Pipeline
from blocktrain.serve.chain.stage import Stage
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
                serve.assert_right(await reply, TEXT)
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
                await serve.until(lambda: not pipeline.links[right.address].alive)
                with pytest.raises(StageUnreachable, match=f"{right.address}: nothing listens there"):
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
                serve.assert_right(reply, longer.with_(start=0, missing=missing), kind)

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
                serve.assert_right(await reply, longer.with_(start=0))

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
                    serve.assert_right(await pipeline(TEXT), TEXT)
                gated.gate.set()
                await asyncio.gather(*tasks)

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
                serve.assert_right(await reply, longer.with_(start=0))
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
            serve.assert_right(await reply, TEXT)
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
