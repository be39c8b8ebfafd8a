"""Segment: consecutive blocks of a model, and the KV caches of their sessions: what one stage computes. No socket. The
text of a traversal is always whole, so a KV cache changes only the speed, never the result. Next: sessions.py keeps the
KV caches; loading.py reads blocks; drafting.py writes drafts; chain/stage.py puts a segment on the network."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from blocktrain.data.tokenizer import Tokenizer
from blocktrain.errors import ConfigError
from blocktrain.model.block import DenoiseBlock
from blocktrain.model.cpu_draft import DraftBlock, DraftStepper
from blocktrain.model.kv_cache import (
    CacheView,
    KVCache,
    PositionBatch,
    Positions,
    TextPositions,
    TokenIds,
    joined,
    token_ids,
)
from blocktrain.serve.segment.drafting import Drafting, drafting_of
from blocktrain.serve.segment.loading import BlockTensors, loaded_block, read_blocks, require_consecutive
from blocktrain.serve.segment.sampling import verified, weighed
from blocktrain.serve.segment.sessions import (
    ActiveTraversal,
    Hidden,
    Sessions,
    one_per_session,
    parts_within,
    row_bytes,
)
from blocktrain.serve.traversal import (
    CacheMiss,
    ModelInfo,
    Outcome,
    StageTiming,
    Traversal,
    block_weight,
    check_states,
    check_traversal,
    last_present,
)
from blocktrain.spec import Denoise, RunSpec

DEFAULT_CACHE_BYTES = 2**30
LEAST_ROW_BUDGET_BYTES = 2**26  # for the rows of drafts, however small the KV caches of sessions are
DRAFTER = -1  # in the place of a block's index: the block that only drafts
Ahead = Callable[[Traversal], None]


class Segment:
    """`advance` takes traversals of many sessions at once. Each outcome equals that of the traversal alone, up to
    rounding. Blocks given as mapped tensors stay in their files: their layers pass through memory when they are
    used. `drafter` are the tensors of a block that continues the last one's states when a first segment drafts; without
    it the last block drafts with its own read-out."""

    def __init__(
        self,
        spec: RunSpec,
        tensors: BlockTensors,
        combine: Mapping[str, Sequence[float]] | None,
        *,
        version: str,
        device: torch.device | str | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        tokenizer: Tokenizer | None = None,
        drafter: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.spec, self.blocks, self.info = spec, tuple(sorted(tensors)), ModelInfo.of(spec, version, tokenizer)
        require_consecutive(self.blocks, spec.model.blocks)
        self._device = torch.device(device or "cpu")
        self._modules = {index: loaded_block(spec, index, tensors[index]).to(self._device) for index in self.blocks}
        if drafter is not None:
            self._modules[DRAFTER] = loaded_block(spec, self.blocks[-1] + 1, drafter).to(self._device)
        self._weights = (combine or {}).get("mean" if self.info.independent else "stack")
        self._sessions = Sessions(cache_bytes)
        self._row_budget_bytes = max(cache_bytes, LEAST_ROW_BUDGET_BYTES)
        self._draft_blocks: dict[int, DraftBlock | None] = {}
        self._first_layer, self._num_layers = {}, 0
        for index, block in self._modules.items():
            self._first_layer[index] = self._num_layers
            self._num_layers += block.num_layers

    @classmethod
    def open(
        cls,
        directory: str | Path,
        blocks: Sequence[int] | None = None,
        *,
        offload: bool = False,
        with_drafter: bool = True,
        **settings: Any,
    ) -> Self:
        """All or some blocks of a run directory; it reads no files of other blocks. `offload` leaves their layers on
        the disk, for blocks that are larger than the memory. The first segment drafts with the drafter behind its last
        block, if there is one."""
        read = read_blocks(Path(directory), blocks, offload, with_drafter)
        return cls(
            read.spec,
            read.tensors,
            read.combine,
            version=read.version,
            tokenizer=read.tokenizer,
            drafter=read.drafter,
            **settings,
        )

    @property
    def cached_bytes(self) -> int:
        return self._sessions.num_bytes

    def forget(self, session: str) -> None:
        self._sessions.forget(session)

    @torch.inference_mode()
    def advance(self, batch: Sequence[Traversal], ahead: Mapping[int, Ahead] | None = None) -> list[Outcome]:
        """Sends each traversal through these blocks, all in common passes. If one is refused, its error is its outcome,
        and the others are not affected. `ahead` maps indices of the batch to functions that take pieces of the draft
        while it is written; the outcome is then the last piece."""
        outcomes: dict[int, Outcome] = {}
        sizes = [self._row_bytes(traversal) for traversal in batch]
        for indices in parts_within(self._row_budget_bytes, sizes, one_per_session(batch)):
            began_s, admitted = time.perf_counter(), []
            for at in indices:
                try:
                    active = self._admit(batch[at])
                    active.ahead = (ahead or {}).get(at) if not self._ends(active) else None
                    admitted.append((at, active))
                except (CacheMiss, ConfigError) as refused:
                    outcomes[at] = refused
            drafted_s = self._compute([active for _, active in admitted])
            computed_s = time.perf_counter() - began_s
            outcomes |= {at: self._finish(active, computed_s, drafted_s) for at, active in admitted}
        self._sessions.make_room()
        return [outcomes[at] for at in range(len(batch))]

    def _admit(self, t: Traversal) -> ActiveTraversal:
        """Decides which positions must be computed. Raises CacheMiss or ConfigError."""
        present = [index for index in self.blocks if index not in t.missing]
        upstream = any(index not in t.missing for index in range(self.blocks[0]))
        check_traversal(t, self.info, upstream)
        if (needed := self._row_bytes(t)) > self._row_budget_bytes:
            most = self._row_budget_bytes
            raise ConfigError(
                f"the rows of this draft need {needed} bytes of memory, this stage gives them at most {most}: "
                f"ask for fewer candidates or bytes, or start it with a larger --cache"
            )
        needs_state = upstream and not self.info.independent and bool(present)
        vocabulary = self.info.vocabulary
        if t.noise is not None or not present:
            return ActiveTraversal(t, present, present, needs_state, vocabulary)
        drafts = DRAFTER in self._modules and t.draft is not None and not t.missing
        computed = [*present, DRAFTER] if drafts else present
        session = self._sessions.session(t, self._new_cache, drafts)
        cache, stream = session.cache, session.stream_of(t)
        if t.piece is not None and t.piece.first:
            if needs_state:
                check_states(t, self.spec.model.width)
            return ActiveTraversal(t, present, computed, needs_state, vocabulary, cache, stream=stream)
        first = min(cache.common_prefix(t.prompt), t.start if needs_state else len(t.prompt) - t.read)
        if needs_state:
            if first < t.start:
                raise CacheMiss(t.session, t.start, first)
            check_states(t, self.spec.model.width)
        elif not self.info.independent:
            first = min(first, t.start)  # the next segment needs the states from there on
        cache.keep(first)
        return ActiveTraversal(t, present, computed, needs_state, vocabulary, cache, first, stream=stream)

    def _row_bytes(self, t: Traversal) -> int:
        return row_bytes(t, self.spec.model.width, self._num_layers, len(self.blocks), self.info.vocabulary)

    def _new_cache(self) -> KVCache:
        model = self.spec.model
        like = self._modules[self.blocks[0]].readout
        return KVCache(self._num_layers, model.heads, model.width // model.heads, like)

    def _compute(self, actives: Sequence[ActiveTraversal]) -> float:
        """Computes all traversals. Those that need the same blocks share passes. Returns the seconds of drafting."""
        drafted_s = 0.0
        for active in actives:
            if active.present and active.traversal.noise is not None:
                active.traversal = self._denoise(active.traversal, active.present)
        cached = [active for active in actives if active.cache is not None]
        for _, group in groupby(sorted(cached, key=_alike), key=_alike):
            alike = list(group)
            self._run_prompts([active for active in alike if active.has_prompt])
            self._run_rows([active for active in alike if active.has_rows])
            drafters = [active for active in alike if active.traversal.draft is not None]
            if drafters:
                began_s = time.perf_counter()
                self._draft(drafters)
                drafted_s += time.perf_counter() - began_s
        return drafted_s

    def _run(
        self, present: Sequence[int], parts: Sequence[Positions], tokens_T: Tensor, state_TD: Tensor | None
    ) -> list[Hidden]:
        """One pass of a flat batch of positions through the blocks: each part's hidden vectors after each block."""
        batch = PositionBatch(parts)
        each: list[Hidden] = [{} for _ in parts]
        tokens_T = tokens_T.to(self._device, torch.long)
        state_TD = None if state_TD is None else state_TD.to(self._modules[present[0]].readout)
        for index in present:
            state_TD = self._modules[index].step(tokens_T, state_TD, CacheView(batch, self._first_layer[index]))
            for hidden, own in zip(each, torch.split(state_TD, batch.sizes), strict=True):
                hidden[index] = own
        return each

    def _run_prompts(self, actives: Sequence[ActiveTraversal]) -> None:
        """Computes the positions of the prompts that are not cached. A single tail is more of the same text."""
        if not actives:
            return
        parts, texts, states = [], [], []
        for active in actives:
            text = active.new_text()
            parts.append(TextPositions(active.the_cache, active.first, len(text)))
            texts.append(text)
            states.append(active.new_states())
        state_TD = torch.cat([state for state in states if state is not None]) if actives[0].needs_state else None
        each = self._run(actives[0].computed, parts, _tensor(joined(*texts)), state_TD)
        for active, hidden in zip(actives, each, strict=True):
            active.take_prompt(hidden)

    def _run_rows(self, actives: Sequence[ActiveTraversal]) -> None:
        """Computes several tails of one prompt, in copies of its KV cache, or a tree of tails."""
        if not actives:
            return
        parts, texts, states = [], [], []
        for active in actives:
            assert active.tails is not None
            parts.append(active.row_positions())
            texts.append(active.tails.reshape(-1))
            states.append(active.traversal.tail_state)
        state_TD = torch.cat([s.flatten(0, 1) for s in states if s is not None]) if actives[0].needs_state else None
        each = self._run(actives[0].present, parts, torch.cat(texts), state_TD)
        for active, hidden in zip(actives, each, strict=True):
            assert active.tails is not None
            active.tail_hidden = {index: own.view(*active.tails.shape, -1) for index, own in hidden.items()}

    def _draft(self, actives: Sequence[ActiveTraversal]) -> None:
        """Drafts the rows of all traversals, one token of every row per pass."""
        drafts = [drafting_of(active, self._draft_logits(active.prompt_hidden, last=1)) for active in actives]
        going: list[Drafting] = []
        while still := [drafting for drafting in drafts if drafting.remaining]:
            if len(still) != len(going):
                going, step = still, self._stepper(actives[0].computed, still)
            for drafting, hidden in zip(going, step([drafting.draw() for drafting in going]), strict=True):
                drafting.take(hidden, self._draft_logits(hidden))
                if drafting.piece_is_due and drafting.active.ahead is not None:
                    drafting.active.ahead(self._finish(drafting.cut_piece(), 0.0, 0.0))
        for drafting in drafts:
            drafting.finish()

    def _stepper(
        self, present: Sequence[int], drafts: Sequence[Drafting]
    ) -> Callable[[Sequence[Tensor]], list[Hidden]]:
        """A function from the drafts' next tokens to their hidden vectors after each block."""
        blocks = [block for index in present if (block := self._draft_block(index)) is not None]
        if len(blocks) < len(present):
            return lambda texts: self._run(
                present, [each.next_positions() for each in drafts], torch.cat([*texts]), None
            )
        first = self._modules[present[0]]
        stepper = DraftStepper(blocks, (first.cos, first.sin), [drafting.rows for drafting in drafts])

        def step(texts: Sequence[Tensor]) -> list[Hidden]:
            hidden = dict(zip(present, stepper.step(torch.cat([*texts]).numpy()), strict=True))
            return [{index: torch.from_numpy(each[rows]) for index, each in hidden.items()} for rows in stepper.rows]

        return step

    def _draft_block(self, index: int) -> DraftBlock | None:
        """Built for the first draft: segments that never draft need none."""
        if index not in self._draft_blocks:
            self._draft_blocks[index] = DraftBlock.of(self._modules[index], self._first_layer[index])
        return self._draft_blocks[index]

    def _draft_logits(self, hidden: Hidden, last: int = 0) -> Tensor:
        """The logits of these blocks alone [T, V]: those of the drafter, of the last block of a stack, or the mean of
        independent blocks."""
        readers = [*hidden] if self.info.independent else [*hidden][-1:]
        each = [self._modules[index].answer(hidden[index][-last:]) for index in readers]
        mean = each[0] if len(each) == 1 else torch.stack(each).mean(0)
        return mean.float().cpu()

    def _denoise(self, t: Traversal, present: Sequence[int]) -> Traversal:
        """The blocks' Euler steps on the whole window, as in BlockModel.sweep."""
        noise, objective = t.noise, self.spec.objective
        assert noise is not None
        assert isinstance(objective, Denoise)
        blank = token_ids([0] * (noise.length - 1), self.info.vocabulary)
        window = _tensor(joined(t.prompt, blank))[None].to(self._device, torch.long)
        z = t.prompt_state
        if z is None:
            generator = torch.Generator().manual_seed(noise.seed)
            z = objective.sigma_max * torch.randn(*window.shape, self.spec.model.code_width, generator=generator)
        z = z.to(self._device)
        for index in present:
            z, _ = self._modules[index](window, z, len(t.prompt))
        if present[-1] != last_present(self.info, t.missing):
            return t.with_(prompt_state=z)
        block = self._modules[present[-1]]
        assert isinstance(block, DenoiseBlock)
        nearest = (z[0, len(t.prompt) - 1 :] @ block.code_table.T).argmax(-1)
        return t.with_(prompt_state=None, written=token_ids(nearest.tolist(), self.info.vocabulary))

    def _finish(self, active: ActiveTraversal, computed_s: float, drafted_s: float) -> Traversal:
        """The traversal as the next segment gets it."""
        t = active.traversal
        timing = StageTiming("", self.blocks, 0.0, computed_s, drafted_s if t.draft else 0.0)
        t = t.with_(trace=(*t.trace, timing), degraded=t.degraded or bool(t.missing))
        if active.cache is None:
            return t
        last, ends_here = active.present[-1], self._ends(active)
        passes_states = not self.info.independent and not ends_here
        done = t.with_(
            draft=None,
            piece=active.piece,
            tails=active.tails,
            parents=active.parents,
            prompt_state=active.prompt_hidden[last][None, t.start - active.first :]
            if passes_states and active.prompt_hidden
            else None,
            tail_state=active.tail_hidden[last] if passes_states and active.tail_hidden else None,
            prompt_logits=self._add_logits(t.prompt_logits, active.prompt_hidden, t.missing, last=t.read),
            tail_logits=self._add_logits(t.tail_logits, active.tail_hidden, t.missing),
            draft_log_likelihood=active.draft_log_likelihood if t.draft else t.draft_log_likelihood,
        )
        if ends_here and active.stream is not None:
            done = active.stream.gather(done)
        if ends_here and done.verify is not None:
            return verified(done, done.verify)
        return weighed(done, done.weigh) if ends_here and done.piece is None and done.weigh is not None else done

    def _ends(self, active: ActiveTraversal) -> bool:
        """No block comes after these."""
        return bool(active.present) and active.present[-1] == last_present(self.info, active.traversal.missing)

    def _add_logits(
        self, so_far: Tensor | None, hidden: Hidden, missing: Collection[int], last: int = 0
    ) -> Tensor | None:
        """The logits so far plus the weighted logits of these blocks."""
        for index, own in hidden.items():
            weight = 0.0 if index == DRAFTER else block_weight(index, self.info, self._weights, missing)
            if weight:
                logits = weight * self._modules[index].answer(own[-last:]).float()
                so_far = logits if so_far is None else so_far.to(self._device) + logits
        return so_far


def _alike(active: ActiveTraversal) -> tuple[int, ...]:
    return (len(active.computed), *sorted(active.traversal.missing))


def _tensor(text: TokenIds) -> Tensor:
    if isinstance(text, bytes):
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return torch.tensor(text, dtype=torch.int32)
