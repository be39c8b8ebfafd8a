"""A chain of stages on real sockets equals the model in one process."""

from __future__ import annotations

import asyncio

import pytest
import torch

from blocktrain.errors import ConfigError
from blocktrain.serve.decode.decoder import decode
from blocktrain.serve.decode.request import Mode, Request
from blocktrain.serve.segment import drafting
from blocktrain.serve.traversal import Draft, Forward, Noise, Traversal, Verify, Weigh

PROMPT = b"The quick brown fox jumps"
SPLITS = [((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0,), (1, 2), (3,)), ((0,), (1,), (2,), (3,))]
TEXTS = {
    "prompt": Traversal("s", PROMPT, read=len(PROMPT)),
    "tails": Traversal("s", PROMPT, tails=torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.uint8)),
    "one tail": Traversal("s", PROMPT, tails=torch.tensor([[1, 2, 3]], dtype=torch.uint8)),
    "draft": Traversal("s", PROMPT, draft=Draft(4, candidates=3, seed=5)),
    "tree": Traversal("s", PROMPT, draft=Draft(4, candidates=3, seed=5), verify=Verify(1.0, 1.0, 5, 0)),
}


def assert_same(served: Traversal, local: Traversal, tolerance: float = 1e-5) -> None:
    for name in ("prompt_logits", "tail_logits"):
        ours, truth = getattr(served, name), getattr(local, name)
        assert (ours is None) == (truth is None), name
        if truth is not None:
            torch.testing.assert_close(ours, truth, atol=tolerance, rtol=1e-4)
    assert (served.tails is None) == (local.tails is None)
    assert local.tails is None or torch.equal(served.tails, local.tails)
    assert (served.written, served.session) == (local.written, local.session)


@pytest.mark.parametrize("kind", ["stacked", "denoise", "end_to_end"])
@pytest.mark.parametrize("spans", SPLITS, ids=len)
def test_served_logits_equal_those_in_one_process_for_every_split(serve, kind, spans):
    async def main():
        async with serve.chain_of([serve.segment_of(kind, span) for span in spans]) as pipeline:
            for text in TEXTS.values():
                truth = serve.local_of(kind, *spans).run(text)
                assert_same(await pipeline(text), truth)
                await pipeline.forget("s")

    asyncio.run(main())


def test_a_sweep_writes_the_bytes_of_the_model_in_one_process(serve):
    async def main():
        segments = [serve.segment_of("denoise", span) for span in ((0, 1), (2, 3))]
        async with serve.chain_of(segments) as pipeline:
            text = Traversal("s", PROMPT, noise=Noise(20, seed=3))
            reply = await pipeline(text)
            assert reply.written == serve.local_of("denoise").run(text).written
            assert len(reply.written) == 20

    asyncio.run(main())


def test_only_new_positions_travel_while_the_caches_hold(serve):
    async def main():
        last = serve.gated(serve.segment_of("stacked", (2, 3)))
        async with serve.chain_of([serve.segment_of("stacked", (0, 1)), last]) as pipeline:

            async def answer(text):
                """The reply, and the bytes between the stages, which are reported before the last stage computes."""
                before = pipeline.stats().between_bytes
                last.gate.clear()
                reply = asyncio.create_task(pipeline(text))
                await serve.until(lambda: pipeline.stats().between_bytes > before)
                last.gate.set()
                return await reply, pipeline.stats().between_bytes - before

            _, whole_bytes = await answer(Traversal("s", PROMPT))
            longer = Traversal("s", PROMPT + b"!", start=len(PROMPT))
            reply, later_bytes = await answer(longer)
            assert later_bytes < whole_bytes / 2
            assert_same(reply, serve.local_of("stacked").run(longer.with_(start=0)))
            assert pipeline.stats().cache_misses == 0

    asyncio.run(main())


def test_a_stage_that_has_lost_the_session_gets_the_whole_text(serve):
    async def main():
        segments = [serve.segment_of("stacked", span) for span in ((0, 1), (2, 3))]
        async with serve.chain_of(segments) as pipeline:
            await pipeline(Traversal("s", PROMPT))
            for segment in segments:
                segment._sessions._held.clear()
            longer = Traversal("s", PROMPT + b"!", start=len(PROMPT))
            assert_same(await pipeline(longer), serve.local_of("stacked").run(longer.with_(start=0)))
            assert pipeline.stats().cache_misses == 1

    asyncio.run(main())


def test_many_requests_at_once_each_get_their_own_answer(serve):
    async def main():
        segments = [serve.segment_of("stacked", span) for span in ((0, 1), (2, 3))]
        texts = [Traversal(f"s{n}", bytes([65 + n]) * (n + 1)) for n in range(20)]
        async with serve.chain_of(segments) as pipeline:
            replies = await asyncio.gather(*(pipeline(text) for text in texts))
        for text, reply in zip(texts, replies, strict=True):
            assert_same(reply, serve.local_of("stacked").run(text), tolerance=1e-4)

    asyncio.run(main())


def test_what_is_wrong_with_one_request_is_said_and_troubles_no_other(serve):
    async def main():
        async with serve.chain_of([serve.segment_of("stacked", span) for span in ((0, 1), (2, 3))]) as pipeline:
            good = pipeline(Traversal("good", PROMPT))
            with pytest.raises(ConfigError, match="context"):
                await pipeline(Traversal("bad", bytes(1000)))
            assert (await good).prompt_logits is not None

    asyncio.run(main())


MODES = {
    "byte by byte": ("stacked", {"mode": Mode.AUTOREGRESSIVE, "temperature": 0.8}),
    "reference": ("end_to_end", {"mode": Mode.AUTOREGRESSIVE, "temperature": 0.0}),
    "speculative": ("stacked", {"mode": Mode.SPECULATIVE, "draft_tokens": 5}),
    "speculative, greedy": ("denoise", {"mode": Mode.SPECULATIVE, "temperature": 0.0, "draft_tokens": 5}),
    "draft and weigh": ("stacked", {"mode": Mode.SWEEP, "candidates": 4}),
    "denoising sweep": ("denoise", {"mode": Mode.SWEEP}),
}


async def written_by(forward: Forward, request: Request) -> bytes:
    return b"".join([bytes(each.value for each in step.written) async for step in decode(forward, request)])


@pytest.mark.parametrize("spans", [((0,), (1, 2, 3)), ((0,), (1,), (2, 3))], ids=len)
@pytest.mark.parametrize("name", MODES)
def test_a_chain_writes_the_bytes_of_the_model_in_one_process_in_every_mode(serve, name, spans):
    async def main():
        kind, settings = MODES[name]
        request = Request(prompt=PROMPT, max_tokens=25, seed=11, **settings)
        async with serve.chain_of([serve.segment_of(kind, span) for span in spans]) as pipeline:
            served = await written_by(pipeline, request)
        assert served == await written_by(serve.local_of(kind, (0,), (1, 2, 3)), request)
        assert len(served) == 25

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["stacked", "denoise"])
@pytest.mark.parametrize("spans", [((0, 1), (2, 3)), ((0,), (1, 2), (3,))], ids=len)
def test_pieces_sent_ahead_make_the_draft_that_one_process_makes(serve, kind, spans, monkeypatch):
    monkeypatch.setattr(drafting, "PIECE_COLUMNS", 3)

    async def main():
        text = Traversal("s", PROMPT, draft=Draft(11, candidates=3, seed=5))
        async with serve.chain_of([serve.segment_of(kind, span) for span in spans]) as pipeline:
            for weigh in (None, Weigh(1.0, seed=5, offset=25)):
                truth = serve.local_of(kind, *spans).run(text.with_(weigh=weigh))
                reply = await pipeline(text.with_(weigh=weigh))
                assert_same(reply, truth)
                assert reply.piece is None
                assert pipeline.stats().retries == 0

    asyncio.run(main())
