"""Stages with more to do than they can: what is full says so, what waits together is computed together, and whose time
is over or whose client is gone is not computed. Real sockets on this machine; a stage is held in the middle of its
work by a gate."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from blocktrain.errors import Overloaded, StageUnreachable
from blocktrain.serve.chain.pipeline import Pipeline
from blocktrain.serve.traversal import Traversal

TEXT = Traversal("s", b"It was the best of times")
LEFT, RIGHT = (0, 1), (2, 3)


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
                serve.assert_right(await reply, TEXT)

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
            Pipeline([stage.address], replace(serve.quick, time_limit_s=60.0), clock=clock) as pipeline,
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
            Pipeline([stage.address], replace(serve.quick, time_limit_s=60.0)) as pipeline,
        ):
            reply = asyncio.create_task(pipeline(TEXT))
            await gated.has_a_batch()
            late = asyncio.create_task(pipeline(TEXT.with_(session="late")))
            await serve.until(lambda: stage.waiting == 1)
            clock.now_s += 61.0
            gated.gate.set()
            with pytest.raises(StageUnreachable, match="its time was over before"):
                await late
            serve.assert_right(await reply, TEXT)
            assert gated.batches == [1]

    asyncio.run(main())
