"""LocalForward: a whole model in this process, as a Forward. Next: segment.py computes; decode/decoder.py asks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from blocktrain.data.tokenizer import Tokenizer
from blocktrain.errors import ConfigError
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.serve.segment.segment import Segment
from blocktrain.serve.traversal import CacheMiss, Traversal
from blocktrain.spec import RunSpec


class LocalForward:
    """A Forward in this process: a chain of segments, one after the other."""

    def __init__(self, *segments: Segment) -> None:
        self.segments, self.info = segments, segments[0].info
        held = [index for segment in segments for index in segment.blocks]
        if held != list(range(self.info.blocks)) or len({segment.info.version for segment in segments}) > 1:
            raise ConfigError(
                f"segments with blocks {held} do not make up the {self.info.blocks} blocks of one version: "
                f"give each block once and in order"
            )

    @classmethod
    def open(cls, directory: str | Path, *, drafter_blocks: int | None = None, **settings: Any) -> Self:
        """A run directory as two segments, so that the first blocks can draft (half of them by default)."""
        count = RunDirectory.open(directory).spec.model.blocks
        first = (count + 1) // 2 if drafter_blocks is None else drafter_blocks
        shares = [range(count)[:first], range(count)[first:]]
        return cls(*(Segment.open(directory, list(share), **settings) for share in shares if share))

    @classmethod
    def of(cls, spec: RunSpec, tensors: Mapping[int, Mapping[str, Tensor]], version: str, tokenizer: Tokenizer) -> Self:
        """The same from tensors, without the weights of a composition."""
        first = (spec.model.blocks + 1) // 2
        shares = [range(spec.model.blocks)[:first], range(spec.model.blocks)[first:]]
        parts = [{k: tensors[k] for k in share} for share in shares if share]
        return cls(*(Segment(spec, part, {}, version=version, tokenizer=tokenizer) for part in parts))

    def run(self, traversal: Traversal) -> Traversal:
        """Makes a second attempt with the whole text if a segment has lost the session."""
        try:
            return self._attempt(traversal)
        except CacheMiss:
            return self._attempt(traversal.with_(start=0))

    def _attempt(self, t: Traversal) -> Traversal:
        for segment in self.segments:
            outcome = segment.advance([t])[0]
            if isinstance(outcome, Exception):
                raise outcome
            t = outcome
        return t

    async def __call__(self, traversal: Traversal) -> Traversal:
        return self.run(traversal)

    async def forget(self, session: str) -> None:
        for segment in self.segments:
            segment.forget(session)
