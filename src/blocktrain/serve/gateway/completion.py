"""A completion while it is written: its texts side by side, and what they have cost so far. Knows the messages of
openai.py, not HTTP. Next: serve/decode/decoder.py writes one text, choices.py makes choices of its tokens."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass

from blocktrain.http.sse import event
from blocktrain.model.kv_cache import token_ids
from blocktrain.serve.decode.decoder import decode
from blocktrain.serve.decode.request import DecodeStats, WrittenToken
from blocktrain.serve.gateway.choices import ChoiceWriter, TokenLogprobs, join_choices
from blocktrain.serve.gateway.distance import Distant
from blocktrain.serve.gateway.openai import ApiError, Choice, Completion, Effort, Usage
from blocktrain.serve.gateway.validate import CompletionPlan, Text
from blocktrain.serve.traversal import Forward, ModelInfo, Traversal

MAX_QUEUED = 4  # chunks; a client that reads slowly has its text written slowly


@dataclass(frozen=True)
class CompletionChunk:
    """More of one text, and what all texts have cost by then, if the client gets it as an event."""

    choice: Choice
    effort: Effort | None


@dataclass
class TextCost:
    """What one text has cost so far."""

    tokens_written: int = 0
    bytes_written: int = 0
    prompt_traversals: int = 0  # to score the prompt
    degraded: bool = False  # when the prompt was scored
    prompt_bytes_unread: int = 0  # when it was scored
    stats: DecodeStats | None = None


class CompletionJob:
    """One completion, from the validated request to its answer or its events."""

    def __init__(
        self,
        forward: Forward,
        info: ModelInfo,
        plan: CompletionPlan,
        seats: Callable[[int], AbstractContextManager[None]],
        deadline_at_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`seats` holds a number of texts of the gateway's limit. `deadline_at_s` is event loop time."""
        self.id, self.plan = f"cmpl-{uuid.uuid4().hex}", plan
        self._forward = Distant(forward, plan.simulated_rtt_s) if plan.simulated_rtt_s else forward
        self._info, self._seats = info, seats
        self._deadline_at_s, self._clock = deadline_at_s, clock
        self._created, self._began_s = int(time.time()), clock()
        self._first_byte_s: float | None = None
        self._costs = [TextCost() for _ in plan.texts]

    async def answer(self) -> Completion:
        choices: list[list[Choice]] = [[] for _ in self.plan.texts]
        async with aclosing(self._chunks()) as chunks:
            async for chunk in chunks:
                choices[chunk.choice.index].append(chunk.choice)
        return self._completion([join_choices(each) for each in choices], self.effort(), self.usage())

    async def events(self, api_error: Callable[[Exception], ApiError]) -> AsyncGenerator[bytes, None]:
        """Server-sent events. A failure before the first event is raised; a later one becomes the last event."""
        begun = False
        try:
            async with aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    begun = True
                    yield event(self._completion([chunk.choice], chunk.effort or self.effort()).model_dump_json())
        except Exception as error:
            if not begun:
                raise
            yield event(api_error(error).reply().model_dump_json())
            return
        if self.plan.include_usage:
            yield event(self._completion([], self.effort(), self.usage()).model_dump_json())
        yield event("[DONE]")

    def usage(self) -> Usage:
        read, written = self.plan.prompt_tokens, sum(cost.tokens_written for cost in self._costs)
        return Usage(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)

    def effort(self) -> Effort:
        stats = [cost.stats for cost in self._costs if cost.stats is not None]
        written = sum(cost.bytes_written for cost in self._costs)
        traversals = sum(each.traversals for each in stats) + sum(cost.prompt_traversals for cost in self._costs)
        return Effort(
            mode=self.plan.mode.value,
            seed=self.plan.seed,
            tokens_written=sum(cost.tokens_written for cost in self._costs),
            bytes_written=written,
            traversals=traversals,
            bytes_per_traversal=written / traversals if traversals else 0.0,
            seconds=self._clock() - self._began_s,
            first_byte_s=self._first_byte_s,
            drafted=sum(each.drafted for each in stats),
            accepted=sum(each.accepted for each in stats),
            exact=sum(each.exact for each in stats),
            degraded=any(each.degraded for each in stats) or any(cost.degraded for cost in self._costs),
            prompt_bytes_unread=max(
                *(each.prompt_bytes_unread for each in stats), *(cost.prompt_bytes_unread for cost in self._costs), 0
            ),
        )

    def _chunk(self, choice: Choice) -> CompletionChunk:
        return CompletionChunk(choice, self.effort() if self.plan.stream else None)

    def _completion(self, choices: Sequence[Choice], effort: Effort, usage: Usage | None = None) -> Completion:
        return Completion(
            id=self.id,
            created=self._created,
            model=self._info.name,
            system_fingerprint=self._info.version,
            choices=list(choices),
            usage=usage,
            blocktrain=effort,
        )

    async def _chunks(self) -> AsyncGenerator[CompletionChunk, None]:
        """Chunks of all texts, as they come. When this ends, for whatever reason, all texts end."""
        with self._seats(len(self.plan.texts)):
            queue: asyncio.Queue[CompletionChunk | Exception] = asyncio.Queue(MAX_QUEUED)
            tasks = [asyncio.create_task(self._write(text, queue)) for text in self.plan.texts]
            unfinished = len(tasks)
            try:
                while unfinished:
                    async with asyncio.timeout_at(self._deadline_at_s):
                        came = await queue.get()
                    if isinstance(came, Exception):
                        raise came
                    unfinished -= came.choice.finish_reason is not None
                    yield came
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, text: Text, queue: asyncio.Queue[CompletionChunk | Exception]) -> None:
        """Puts the chunks of one text into the queue, or the error that ended it."""
        plan, cost = self.plan, self._costs[text.index]
        writer = ChoiceWriter(text.index, plan.stops, plan.logprobs, self._info.tokenizer)
        try:
            if plan.echo and text.prompt:
                choice = writer.echo(await self._score_prompt(text, cost))
                await queue.put(self._chunk(choice))
            if text.request is not None:
                async with aclosing(decode(self._forward, text.request)) as steps:
                    async for step in steps:
                        if plan.logprobs is None:
                            more = writer.take_plain([each.value for each in step.written])
                        else:
                            more = writer.take(_logprobs(each, plan.logprobs) for each in step.written)
                        cost.tokens_written, cost.bytes_written = writer.num_tokens, writer.num_bytes
                        cost.stats = step.stats
                        if more is not None:
                            if self._first_byte_s is None:
                                self._first_byte_s = self._clock() - self._began_s
                            await queue.put(self._chunk(more))
                        if writer.stopped:
                            break
                        # A model in this process never waits: let other requests run, and notice a client that left.
                        await asyncio.sleep(0)
            await queue.put(self._chunk(writer.end()))
        except Exception as error:
            await queue.put(error)

    async def _score_prompt(self, text: Text, cost: TextCost) -> list[TokenLogprobs]:
        """The log-probability of each token of the prompt given those before it, if the client asked for them. Takes
        one traversal, so only the last tokens of a long prompt have one."""
        vocabulary, tokenizer = self._info.vocabulary, self._info.tokenizer
        tokens = token_ids(tokenizer.encode(text.prompt).tolist(), vocabulary)
        first = max(0, len(tokens) - self._info.context)
        unread, prompt = tokens[:first], tokens[first:]
        cost.prompt_bytes_unread = len(tokenizer.decode(unread))
        if self.plan.logprobs is None:
            return [TokenLogprobs(token) for token in tokens]
        session = f"{self.id}-{text.index}"
        try:
            reply = await self._forward(Traversal(session, prompt, read=len(prompt)))
        finally:
            await self._forward.forget(session)
        cost.prompt_traversals, cost.degraded = 1, reply.degraded
        assert reply.prompt_logits is not None
        following = (WrittenToken(*each) for each in zip(prompt[1:], reply.prompt_logits, strict=False))
        scored = (_logprobs(each, self.plan.logprobs) for each in following)
        return [*map(TokenLogprobs, unread), TokenLogprobs(prompt[0]), *scored]


def _logprobs(written: WrittenToken, num_top: int | None) -> TokenLogprobs:
    if num_top is None:
        return TokenLogprobs(written.value)
    return TokenLogprobs(written.value, written.log_probability, tuple(written.likeliest(num_top)))
