"""A completion while it is written: its texts side by side, and what they cost so far. Knows the shapes of openai.py,
not HTTP. Next: decode.py writes one text, scribe.py makes choices of its bytes, gateway.py sends the answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from blocktrain.serve.decode.exact import DecodeStats, WrittenByte, decode
from blocktrain.serve.gateway.access import Seats
from blocktrain.serve.gateway.choices import Score, Scribe, joined
from blocktrain.serve.gateway.openai import ApiError, Choice, Completion, Effort, Usage
from blocktrain.serve.gateway.validate import Order, Text
from blocktrain.serve.traversal import Forward, ModelInfo, Traversal

DONE = b"data: [DONE]\n\n"
PARTS_AHEAD = 4  # a client that reads slowly has its text written slowly


@dataclass(frozen=True)
class Part:
    """Some of one text, and what all had cost by then."""

    choice: Choice
    effort: Effort


@dataclass
class Tally:
    """What one text cost so far."""

    bytes_written: int = 0
    scorings: int = 0  # of the prompt
    degraded: bool = False  # its scoring
    stats: DecodeStats | None = None


class Writing:
    """One answer under way."""

    def __init__(
        self, forward: Forward, info: ModelInfo, order: Order, deadline_s: float, clock: Callable[[], float]
    ) -> None:
        self.id, self.order = f"cmpl-{uuid.uuid4().hex}", order
        self._forward, self._info, self._deadline_s, self._clock = forward, info, deadline_s, clock
        self._created, self._began_s = int(time.time()), clock()
        self._first_byte_s: float | None = None
        self._tallies = [Tally() for _ in order.texts]

    async def parts(self) -> AsyncGenerator[Part, None]:
        """More of some text, as it comes. However this ends, all texts end with it."""
        queue: asyncio.Queue[Part | Exception] = asyncio.Queue(PARTS_AHEAD)
        tasks = [asyncio.create_task(self._write_into(queue, text)) for text in self.order.texts]
        unfinished = len(tasks)
        try:
            while unfinished:
                async with asyncio.timeout_at(self._deadline_s):
                    came = await queue.get()
                if isinstance(came, Exception):
                    raise came
                unfinished -= came.choice.finish_reason is not None
                yield came
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def completion(self, choices: Sequence[Choice], effort: Effort, usage: Usage | None = None) -> Completion:
        return Completion(
            id=self.id,
            created=self._created,
            model=self._info.name,
            system_fingerprint=self._info.version,
            choices=list(choices),
            usage=usage,
            blocktrain=effort,
        )

    def usage(self) -> Usage:
        read, written = self.order.prompt_bytes, sum(tally.bytes_written for tally in self._tallies)
        return Usage(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)

    def effort(self) -> Effort:
        stats = [tally.stats for tally in self._tallies if tally.stats is not None]
        written = sum(tally.bytes_written for tally in self._tallies)
        traversals = sum(each.traversals for each in stats) + sum(tally.scorings for tally in self._tallies)
        return Effort(
            mode=self.order.mode.value,
            seed=self.order.seed,
            bytes_written=written,
            traversals=traversals,
            bytes_per_traversal=written / traversals if traversals else 0.0,
            seconds=self._clock() - self._began_s,
            first_byte_s=self._first_byte_s,
            drafted=sum(each.drafted for each in stats),
            accepted=sum(each.accepted for each in stats),
            degraded=any(each.degraded for each in stats) or any(tally.degraded for tally in self._tallies),
        )

    async def _write_into(self, queue: asyncio.Queue[Part | Exception], text: Text) -> None:
        try:
            async with aclosing(self._write(text)) as choices:
                async for choice in choices:
                    await queue.put(Part(choice, self.effort()))
        except Exception as error:
            await queue.put(error)

    async def _write(self, text: Text) -> AsyncGenerator[Choice, None]:
        order, tally = self.order, self._tallies[text.index]
        scribe = Scribe(text.index, order.stops, order.logprobs)
        if order.echo and text.prompt:
            yield scribe.echo(await self._prompt_scores(text, tally))
        if text.request is not None:
            async with aclosing(decode(self._forward, text.request)) as steps:
                async for step in steps:
                    choice = scribe.take(_score(each, order.logprobs) for each in step.written)
                    tally.bytes_written, tally.stats = scribe.num_bytes, step.stats
                    if choice is not None:
                        self._note_first_byte()
                        yield choice
                    if scribe.stopped:
                        break
                    await asyncio.sleep(0)  # a forward in this process never waits: let others in, and a client out
        yield scribe.end()

    async def _prompt_scores(self, text: Text, tally: Tally) -> list[Score]:
        """Each byte under the model, given those before it: one traversal, where log-probabilities are asked for."""
        prompt = text.prompt
        if self.order.logprobs is None:
            return [Score(byte) for byte in prompt]
        session = f"{self.id}-{text.index}"
        try:
            reply = await self._forward(Traversal(session, prompt, read=len(prompt)))
        finally:
            await self._forward.forget(session)
        tally.scorings, tally.degraded = 1, reply.degraded
        assert reply.prompt_logits is not None
        following = (WrittenByte(*each) for each in zip(prompt[1:], reply.prompt_logits, strict=False))
        return [Score(prompt[0]), *(_score(each, self.order.logprobs) for each in following)]

    def _note_first_byte(self) -> None:
        if self._first_byte_s is None:
            self._first_byte_s = self._clock() - self._began_s


def _score(written: WrittenByte, logprobs: int | None) -> Score:
    if logprobs is None:
        return Score(written.value)
    return Score(written.value, written.log_probability, tuple(written.likeliest(logprobs)))


async def gather_answer(writing: Writing, seats: Seats) -> Completion:
    parts: list[list[Choice]] = [[] for _ in writing.order.texts]
    with seats.held(len(parts)):
        async with aclosing(writing.parts()) as coming:
            async for part in coming:
                parts[part.choice.index].append(part.choice)
    return writing.completion([joined(each) for each in parts], writing.effort(), writing.usage())


async def stream_answer(
    writing: Writing, seats: Seats, failure_of: Callable[[Exception], ApiError]
) -> AsyncGenerator[bytes, None]:
    """Server-sent events. What fails before the first is raised; later it is an event, the last one."""
    begun = False
    with seats.held(len(writing.order.texts)):
        try:
            async with aclosing(writing.parts()) as coming:
                async for part in coming:
                    begun = True
                    yield _event(writing.completion([part.choice], part.effort).model_dump_json())
        except Exception as error:
            if not begun:
                raise
            yield _event(failure_of(error).reply().model_dump_json())
            return
    if writing.order.include_usage:
        yield _event(writing.completion([], writing.effort(), writing.usage()).model_dump_json())
    yield DONE


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()
