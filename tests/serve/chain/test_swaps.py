"""Stages that get another version of the model while they serve: no text mixes two versions."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from blocktrain.errors import ConfigError, StageUnreachable
from blocktrain.serve.chain.pipeline import Pipeline
from blocktrain.serve.chain.stage import Stage
from blocktrain.serve.traversal import Traversal

TEXT = Traversal("s", b"It was the best of times")
LEFT, RIGHT = (0, 1), (2, 3)


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
