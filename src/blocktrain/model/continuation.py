"""Continuation: the logits of the next token of a text that grows, with KV caches. It computes what BlockModel.logits
computes at the last position, up to rounding. On the CPU a single token goes through cpu_draft.py, where it costs few
calls. Next: kv_cache.py; stack.py, which generates with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from blocktrain.model.block import Block
from blocktrain.model.cpu_draft import DraftBlock, DraftRows, DraftStepper
from blocktrain.model.kv_cache import CacheView, KVCache, PositionBatch, TextPositions, common_prefix
from blocktrain.spec import ModelSpec


class Continuation:
    """`weights` are those of the blocks' logits in the answer; a block with weight 0 is not read."""

    def __init__(self, model: ModelSpec, blocks: Sequence[Block], weights: Sequence[float]) -> None:
        self._model, self._blocks, self._weights = model, blocks, weights
        self._first_layers = np.cumsum([0, *(block.num_layers for block in blocks)]).tolist()
        drafts = [DraftBlock.of(block, first) for block, first in zip(blocks, self._first_layers, strict=False)]
        self._drafts = [draft for draft in drafts if draft is not None]
        self._window: tuple[int, ...] = ()  # the tokens whose positions are in the KV cache
        self._begin(0)

    @torch.no_grad()
    def logits(self, text: Sequence[int], start: int) -> Tensor:
        """Of the token after `text`, which is read from `start` on, [vocabulary]. Only the positions after what it has
        in common with the text before are computed."""
        if start != self._start:
            self._begin(start)
        window = tuple(text[start:])
        self._done = min(common_prefix(self._window, window), len(window) - 1)  # the last position is always read
        self._window = window
        new = window[self._done :]
        streams = self._run_one(new[0]) if len(new) == 1 and self._done and self._is_quick else self._run(new)
        read = [
            weight * block.answer(stream)[-1]
            for block, weight, stream in zip(self._blocks, self._weights, streams, strict=True)
            if weight
        ]
        return read[0] if len(read) == 1 else torch.stack(read).sum(0)

    @property
    def _is_quick(self) -> bool:
        return len(self._drafts) == len(self._blocks)

    def _begin(self, start: int) -> None:
        """A new window. Its positions count from 0, so that nothing of the window before can be used."""
        self._start, self._done = start, 0
        self._window = ()
        model, like = self._model, self._blocks[0].readout
        self._cache = KVCache(self._first_layers[-1], model.heads, model.width // model.heads, like)
        self._cache.reserve(model.context)
        if self._is_quick:
            keys, values = ([each[None] for each in side] for side in (self._cache.keys, self._cache.values))
            self._rows = DraftRows(keys, values, filled=0)
            self._stepper = DraftStepper(self._drafts, (self._blocks[0].cos, self._blocks[0].sin), [self._rows])

    def _run_one(self, token: int) -> list[Tensor]:
        self._rows.filled = self._done
        return [torch.from_numpy(stream) for stream in self._stepper.step(np.array([token]))]

    def _run(self, tokens: Sequence[int]) -> list[Tensor]:
        """Each block's stream at these new positions."""
        batch = PositionBatch([TextPositions(self._cache, self._done, len(tokens))])
        tokens_T = torch.tensor(list(tokens), device=self._blocks[0].readout.device)
        streams: list[Tensor] = []
        for block, first_layer in zip(self._blocks, self._first_layers, strict=False):
            before = streams[-1] if streams else None
            streams.append(block.step(tokens_T, before, CacheView(batch, first_layer)))
        return streams
