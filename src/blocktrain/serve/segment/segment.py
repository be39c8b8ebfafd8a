"""Segment: consecutive blocks of a model with the memories of their sessions: what one stage computes. No socket.
The text of a traversal is always whole, so a memory decides only how fast, never what. Next: decode.py asks, stage.py
puts a segment on the network."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from blocktrain.errors import ConfigError
from blocktrain.io.checkpoint import Manifest, RunDirectory
from blocktrain.io.tensor_file import MappedTensors
from blocktrain.model.block import Block, DenoiseBlock, block_shapes, build_block
from blocktrain.model.cpu_draft import QuickBlock, QuickSteps
from blocktrain.model.kv_cache import Memory, Part, Recall, Strand, Tokens
from blocktrain.model.offload import streamed_block
from blocktrain.serve.segment.drafting import Drafting
from blocktrain.serve.segment.resample import weighed
from blocktrain.serve.segment.work import Hidden, Streamed, Work
from blocktrain.serve.traversal import CacheMiss, Hop, ModelInfo, Traversal, check_states, check_traversal, last_present
from blocktrain.spec import NUM_SYMBOLS, Denoise, RunSpec, Stacked

DEFAULT_CACHE_BYTES = 2**30
Answer = Traversal | CacheMiss | ConfigError
Ahead = Callable[[Traversal], None]


class Segment:
    """`advance` takes many sessions at once; each answer is what the traversal alone would get, to rounding. Blocks
    given as mapped tensors stay in their files: their layers pass through memory as they are used."""

    def __init__(
        self,
        spec: RunSpec,
        tensors: Mapping[int, Mapping[str, Tensor] | MappedTensors],
        combine: Mapping[str, Sequence[float]] | None,
        *,
        version: str,
        device: torch.device | str | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        self.spec, self.blocks, self.info = spec, tuple(sorted(tensors)), model_info(spec, version)
        _require_consecutive(self.blocks, spec.model.blocks)
        self._device = torch.device(device or "cpu")
        self._modules = {index: _loaded(spec, index, tensors[index]).to(self._device) for index in self.blocks}
        self._weights = (combine or {}).get("mean" if self.info.independent else "stack")
        self._sessions = Sessions(cache_bytes)
        self._quick_blocks: dict[int, QuickBlock | None] = {}
        self._first_layer, self._num_layers = {}, 0
        for index, block in self._modules.items():
            self._first_layer[index] = self._num_layers
            self._num_layers += block.num_layers

    @classmethod
    def open(
        cls, directory: Path, blocks: Sequence[int] | None = None, *, offload: bool = False, **settings: Any
    ) -> Self:
        """The blocks of a run directory, all or some; the files of others are not read. `offload` leaves their layers
        on the disk: for blocks larger than the memory."""
        run = RunDirectory.open(directory)
        while True:
            manifest = run.manifest()
            wanted = range(run.spec.model.blocks) if blocks is None else blocks
            _require_known(wanted, run.spec.model.blocks, directory)
            get = run.map_block if offload else run.load_block
            tensors = {index: get(index, block_shapes(run.spec, index)) for index in wanted}
            if run.manifest() == manifest:  # else somebody published a block while we read: never mix two versions
                return cls(run.spec, tensors, manifest.combine, version=model_digest(manifest), **settings)

    @property
    def cached_bytes(self) -> int:
        return self._sessions.num_bytes

    def forget(self, session: str) -> None:
        self._sessions.forget(session)

    @torch.inference_mode()
    def advance(self, batch: Sequence[Traversal], ahead: Mapping[int, Ahead] | None = None) -> list[Answer]:
        """Each traversal through these blocks, all in common passes; what is wrong with one stands in its place and
        troubles no other. `ahead` takes pieces of the drafts at these places while they are drafted; the answer is
        then the last piece."""
        answers: dict[int, Answer] = {}
        for positions in _side_by_side(batch):
            began_s, works = time.perf_counter(), []
            for at in positions:
                try:
                    work = self._admit(batch[at])
                    work.ahead = (ahead or {}).get(at) if not self._ends(work) else None
                    works.append((at, work))
                except (CacheMiss, ConfigError) as refused:
                    answers[at] = refused
            drafted_s = self._compute([work for _, work in works])
            computed_s = time.perf_counter() - began_s
            answers |= {at: self._finish(work, computed_s, drafted_s) for at, work in works}
        self._sessions.make_room()
        return [answers[at] for at in range(len(batch))]

    def _admit(self, t: Traversal) -> Work:
        """What has to be computed for it, or why it cannot be."""
        present = [index for index in self.blocks if index not in t.missing]
        upstream = any(index not in t.missing for index in range(self.blocks[0]))
        check_traversal(t, self.info, upstream)
        needs_state = upstream and not self.info.independent and bool(present)
        if t.noise is not None or not present:
            return Work(t, present, needs_state)
        session = self._sessions.session(t, self._new_memory)
        memory, streamed = session.memory, session.stream_of(t)
        if t.piece is not None and t.piece.first:
            if needs_state:
                check_states(t, self.spec.model.width)
            return Work(t, present, needs_state, memory, streamed=streamed)
        first = min(memory.common_prefix(t.prompt), t.start if needs_state else len(t.prompt) - t.read)
        if needs_state:
            if first < t.start:
                raise CacheMiss(t.session, t.start, first)
            check_states(t, self.spec.model.width)
        elif not self.info.independent:
            first = min(first, t.start)  # the next segment wants the states from there on
        memory.keep(first)
        return Work(t, present, needs_state, memory, first, streamed=streamed)

    def _new_memory(self) -> Memory:
        model = self.spec.model
        like = self._modules[self.blocks[0]].embedding
        return Memory(self._num_layers, model.heads, model.width // model.heads, like)

    def _compute(self, works: Sequence[Work]) -> float:
        """All works, those that skip the same blocks in common passes. Seconds spent on drafting."""
        drafted_s = 0.0
        for work in works:
            if work.present and work.traversal.noise is not None:
                work.traversal = self._denoise(work.traversal, work.present)
        mine = [work for work in works if work.memory is not None]
        for _, group in groupby(sorted(mine, key=_skipping), key=_skipping):
            alike = list(group)
            self._run_prompts([work for work in alike if work.has_prompt])
            self._run_fans([work for work in alike if work.tails is not None and work.tails.size(0) != 1])
            drafters = [work for work in alike if work.traversal.draft is not None]
            if drafters:
                began_s = time.perf_counter()
                self._draft(drafters)
                drafted_s += time.perf_counter() - began_s
        return drafted_s

    def _run(
        self, present: Sequence[int], parts: Sequence[Part], bytes_T: Tensor, state_TD: Tensor | None
    ) -> list[Hidden]:
        """One pass of a flat batch of tokens through the blocks: each part's hidden vectors after each block."""
        tokens = Tokens(parts)
        each: list[Hidden] = [{} for _ in parts]
        bytes_T = bytes_T.to(self._device, torch.long)
        state_TD = None if state_TD is None else state_TD.to(self._modules[present[0]].embedding)
        for index in present:
            state_TD = self._modules[index].step(bytes_T, state_TD, Recall(tokens, self._first_layer[index]))
            for hidden, own in zip(each, torch.split(state_TD, tokens.sizes), strict=True):
                hidden[index] = own
        return each

    def _run_prompts(self, works: Sequence[Work]) -> None:
        """The positions of the prompts that are not in memory; a single tail is just more of the same text."""
        if not works:
            return
        parts, texts, states = [], [], []
        for work in works:
            text = work.new_text()
            parts.append(Strand(work.the_memory, work.first, len(text)))
            texts.append(text)
            states.append(work.new_states())
        in_common = torch.cat([state for state in states if state is not None]) if works[0].needs_state else None
        for work, hidden in zip(
            works, self._run(works[0].present, parts, _tensor(b"".join(texts)), in_common), strict=True
        ):
            work.take_prompt(hidden)

    def _run_fans(self, works: Sequence[Work]) -> None:
        """Several tails of one prompt: they share its memory."""
        if not works:
            return
        parts, texts, states = [], [], []
        for work in works:
            assert work.tails is not None
            parts.append(work.fan().next(work.tails.size(1)))
            texts.append(work.tails.reshape(-1))
            states.append(work.traversal.tail_state)
        in_common = torch.cat([s.flatten(0, 1) for s in states if s is not None]) if works[0].needs_state else None
        for work, hidden in zip(works, self._run(works[0].present, parts, torch.cat(texts), in_common), strict=True):
            assert work.tails is not None
            work.tail_hidden = {index: own.view(*work.tails.shape, -1) for index, own in hidden.items()}

    def _draft(self, works: Sequence[Work]) -> None:
        """Every drafter's rows, a byte a pass, all drafters in the same passes."""
        drafts = [Drafting(work, self._draft_logits(work.prompt_hidden, last=1)) for work in works]
        going: list[Drafting] = []
        while still := [drafting for drafting in drafts if drafting.remaining]:
            if len(still) != len(going):
                going, step = still, self._stepper(works[0].present, still)
            for drafting, hidden in zip(going, step([drafting.draw() for drafting in going]), strict=True):
                drafting.take(hidden, self._draft_logits(hidden))
                if drafting.piece_is_due and drafting.work.ahead is not None:
                    drafting.work.ahead(self._finish(drafting.cut_piece(), 0.0, 0.0))
        for drafting in drafts:
            drafting.finish()

    def _stepper(
        self, present: Sequence[int], drafts: Sequence[Drafting]
    ) -> Callable[[Sequence[Tensor]], list[Hidden]]:
        """How the drafts' next bytes become their hidden vectors after each block."""
        quick = [self._quick(index) for index in present]
        if None in quick:
            return lambda texts: self._run(present, [each.next_part() for each in drafts], torch.cat([*texts]), None)
        first = self._modules[present[0]]
        blocks = [block for block in quick if block is not None]
        steps = QuickSteps(blocks, (first.cos, first.sin), [drafting.lane for drafting in drafts])

        def step(texts: Sequence[Tensor]) -> list[Hidden]:
            hidden = dict(zip(present, steps.step(torch.cat([*texts]).numpy()), strict=True))
            return [{index: torch.from_numpy(each[rows]) for index, each in hidden.items()} for rows in steps.rows]

        return step

    def _quick(self, index: int) -> QuickBlock | None:
        """Made by the first draft: other segments need none."""
        if index not in self._quick_blocks:
            self._quick_blocks[index] = QuickBlock.of(self._modules[index], self._first_layer[index])
        return self._quick_blocks[index]

    def _draft_logits(self, hidden: Hidden, last: int = 0) -> Tensor:
        """What these blocks alone say [T, 256]: the last one of a stack, all of them in equal shares where they are
        independent. Rounded to half precision before anything is drawn from it, so that what travels is exactly what
        was drawn from."""
        readers = [*hidden] if self.info.independent else [*hidden][-1:]
        each = [self._modules[index].answer(hidden[index][-last:]) for index in readers]
        mean = each[0] if len(each) == 1 else torch.stack(each).mean(0)
        return mean.half().float().cpu()

    def _denoise(self, t: Traversal, present: Sequence[int]) -> Traversal:
        """The blocks' Euler steps on the whole window, as BlockModel.sweep has them."""
        noise, objective = t.noise, self.spec.objective
        assert noise is not None
        assert isinstance(objective, Denoise)
        window = _tensor(t.prompt + bytes(noise.length - 1))[None].to(self._device, torch.long)
        z = t.prompt_state
        if z is None:
            generator = torch.Generator().manual_seed(noise.seed)
            z = objective.sigma_max * torch.randn(*window.shape, NUM_SYMBOLS, generator=generator)
        z = z.to(self._device)
        for index in present:
            z, _ = self._modules[index](window, z, len(t.prompt))
        if present[-1] != last_present(self.info, t.missing):
            return t.with_(prompt_state=z)
        block = self._modules[present[-1]]
        assert isinstance(block, DenoiseBlock)
        nearest = (z[0, len(t.prompt) - 1 :] @ block.code_table.T).argmax(-1)
        return t.with_(prompt_state=None, written=bytes(nearest.tolist()))

    def _finish(self, work: Work, computed_s: float, drafted_s: float) -> Traversal:
        """The traversal as the next segment gets it."""
        t = work.traversal
        hop = Hop("", self.blocks, 0.0, computed_s, drafted_s if work.traversal.draft else 0.0)
        t = t.with_(trace=(*t.trace, hop), degraded=t.degraded or bool(t.missing))
        if work.memory is None:
            return t
        last, ends_here = work.present[-1], self._ends(work)
        hands_on = not self.info.independent and not ends_here
        done = t.with_(
            draft=None,
            piece=work.piece,
            tails=work.tails,
            prompt_state=work.prompt_hidden[last][None, t.start - work.first :]
            if hands_on and work.prompt_hidden
            else None,
            tail_state=work.tail_hidden[last] if hands_on and work.tail_hidden else None,
            prompt_logits=self._evidence(t.prompt_logits, work.prompt_hidden, t.missing, last=t.read),
            tail_logits=self._evidence(t.tail_logits, work.tail_hidden, t.missing),
            draft_prompt_logits=work.draft_prompt_logits if t.draft else t.draft_prompt_logits,
            draft_tail_logits=work.draft_tail_logits if t.draft else t.draft_tail_logits,
            draft_log_likelihood=work.draft_log_likelihood if t.draft else t.draft_log_likelihood,
        )
        if ends_here and work.streamed is not None:
            done = work.streamed.gather(done)
        return weighed(done, done.weigh) if ends_here and done.piece is None and done.weigh is not None else done

    def _ends(self, work: Work) -> bool:
        """Whether no block comes after these."""
        return bool(work.present) and work.present[-1] == last_present(self.info, work.traversal.missing)

    def _evidence(
        self, so_far: Tensor | None, hidden: Hidden, missing: Collection[int], last: int = 0
    ) -> Tensor | None:
        """The weighted logits of these blocks added to those of the blocks before."""
        for index, own in hidden.items():
            share = evidence_share(index, self.info, self._weights, missing)
            if share:
                logits = share * self._modules[index].answer(own[-last:]).float()
                so_far = logits if so_far is None else so_far.to(self._device) + logits
        return so_far


@dataclass
class Session:
    memory: Memory
    missing: tuple[int, ...]  # other blocks below make other keys
    streamed: Streamed | None = None

    @property
    def num_bytes(self) -> int:
        return self.memory.num_bytes + (self.streamed.num_bytes if self.streamed else 0)

    def stream_of(self, t: Traversal) -> Streamed | None:
        """What is remembered of the pieces before this one; the last one is the end of it."""
        if t.piece is None or t.tails is None:
            return None
        rows, columns = t.tails.shape
        if not t.piece.first:
            self.streamed = Streamed(t.piece.stream, rows, t.piece.total)
        known = self.streamed
        if known is None or not known.expects(t.piece, rows):
            raise CacheMiss(t.session, len(t.prompt) + t.piece.first, len(t.prompt) + (known.columns if known else 0))
        known.columns += columns
        if t.is_last:
            self.streamed = None
        return known


class Sessions:
    """The memories, the longest unused one given up first when they are more than `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held: OrderedDict[str, Session] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        return sum(session.num_bytes for session in self._held.values())

    def session(self, t: Traversal, new: Callable[[], Memory]) -> Session:
        held = self._held.get(t.session)
        if held is None or held.missing != t.missing:
            held = self._held[t.session] = Session(new(), t.missing)
        self._held.move_to_end(t.session)
        return held

    def forget(self, session: str) -> None:
        self._held.pop(session, None)

    def make_room(self) -> None:
        """At least the newest stays: without it a session would never get on."""
        excess = self.num_bytes - self._limit_bytes
        while excess > 0 and len(self._held) > 1:
            excess -= self._held.popitem(last=False)[1].num_bytes


class LocalForward:
    """A Forward in this process: a chain of segments, one after the other."""

    def __init__(self, *segments: Segment) -> None:
        self.segments, self.info = segments, segments[0].info
        held = [index for segment in segments for index in segment.blocks]
        if held != list(range(self.info.blocks)) or len({segment.info.version for segment in segments}) > 1:
            raise ConfigError(
                f"segments with blocks {held} do not make the {self.info.blocks} blocks of one version: "
                f"give each block once and in order"
            )

    @classmethod
    def open(cls, directory: Path, *, drafter_blocks: int | None = None, **settings: Any) -> Self:
        """A run directory as two segments, so that the first blocks (half of them, if nobody says) can draft."""
        count = RunDirectory.open(directory).spec.model.blocks
        first = (count + 1) // 2 if drafter_blocks is None else drafter_blocks
        shares = [range(count)[:first], range(count)[first:]]
        return cls(*(Segment.open(directory, list(share), **settings) for share in shares if share))

    def run(self, traversal: Traversal) -> Traversal:
        """A segment that has lost a session gets everything once more."""
        try:
            return self._walk(traversal)
        except CacheMiss:
            return self._walk(traversal.with_(start=0))

    def _walk(self, t: Traversal) -> Traversal:
        for segment in self.segments:
            answer = segment.advance([t])[0]
            if isinstance(answer, Exception):
                raise answer
            t = answer
        return t

    async def __call__(self, traversal: Traversal) -> Traversal:
        return self.run(traversal)

    async def forget(self, session: str) -> None:
        for segment in self.segments:
            segment.forget(session)


def model_info(spec: RunSpec, version: str) -> ModelInfo:
    objective = spec.objective
    return ModelInfo(
        name=spec.name,
        version=version,
        objective=objective.kind,
        blocks=spec.model.blocks,
        context=spec.model.context,
        longest_sweep=int(spec.model.context * objective.span_share) if isinstance(objective, Denoise) else 0,
        survives_loss=isinstance(objective, Denoise)
        or (isinstance(objective, Stacked) and objective.state_dropout > 0),
    )


def model_digest(manifest: Manifest) -> str:
    """Names exactly these blocks and weights."""
    return hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()[:16]


def evidence_share(index: int, info: ModelInfo, weights: Sequence[float] | None, missing: Collection[int]) -> float:
    """A block's weight in the answer, as BlockModel.combined has it."""
    if not missing and weights is not None:
        return weights[index]
    if info.independent:
        return 1 / (info.blocks - len(set(missing)))
    return float(index == last_present(info, missing))


def _loaded(spec: RunSpec, index: int, tensors: Mapping[str, Tensor] | MappedTensors) -> Block:
    if isinstance(tensors, MappedTensors):
        return streamed_block(spec, index, tensors.tensors, tensors)
    block = build_block(spec, index)
    block.load_state_dict(dict(tensors))
    return block.eval().requires_grad_(False)


def _side_by_side(batch: Sequence[Traversal]) -> Iterable[list[int]]:
    """The batch's indices in rounds that name each session once: two traversals of one session share its memory."""
    rounds: list[list[int]] = []
    seen: dict[str, int] = {}
    for at, traversal in enumerate(batch):
        turn = seen[traversal.session] = seen.get(traversal.session, -1) + 1
        rounds += [[] for _ in range(turn + 1 - len(rounds))]
        rounds[turn].append(at)
    return rounds


def _skipping(work: Work) -> tuple[int, ...]:
    return tuple(sorted(work.traversal.missing))


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _require_consecutive(blocks: Sequence[int], count: int) -> None:
    if not blocks or list(blocks) != list(range(blocks[0], blocks[-1] + 1)) or blocks[-1] >= count:
        raise ConfigError(
            f"a segment holds consecutive blocks of 0 to {count - 1}, got {list(blocks)}: name for example 0-1"
        )


def _require_known(wanted: Iterable[int], count: int, directory: Path) -> None:
    if strange := sorted(set(wanted) - set(range(count))):
        raise ConfigError(f"there is no block {strange[0]}: {directory} has blocks 0 to {count - 1}, name some of them")
