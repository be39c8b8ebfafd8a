"""BlockModel: all blocks of a model in one process. Every served model must equal it. It reads and generates; it does
not train. Next: train/trainer.py trains its blocks, train/evaluate.py scores it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from blocktrain.errors import ConfigError
from blocktrain.model.block import Block, DenoiseBlock, StackedBlock, build_block
from blocktrain.model.continuation import Continuation
from blocktrain.model.kv_cache import TokenIds, token_ids
from blocktrain.spec import Denoise, RunSpec, usable_weights

Readings = list[Tensor]  # the logits of each block that took part, [B, T, vocabulary] each
EMPTY_PROMPT = b"\n"  # an empty prompt starts at a new line


class BlockModel(nn.Module):
    """`combine` holds the blocks' weights in the product of experts for each path, fitted on held-out text."""

    def __init__(self, spec: RunSpec, combine: Mapping[str, Sequence[float]] | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.combine: dict[str, Sequence[float]] = {**usable_weights(combine or {}, spec.model.blocks)}
        self.blocks = nn.ModuleList(build_block(spec, index) for index in range(spec.model.blocks))

    @classmethod
    def from_tensors(
        cls,
        spec: RunSpec,
        blocks: Mapping[int, Mapping[str, Tensor]],
        combine: Mapping[str, Sequence[float]] | None = None,
    ) -> BlockModel:
        """A trained model from the named tensors of its blocks. A block that is not given stays an initial block."""
        model = cls(spec, combine)
        for index, tensors in blocks.items():
            model.blocks[index].load_state_dict(dict(tensors))
        return model.eval()

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths through the blocks. The first one gives the model's answer."""
        return ("mean", "euler") if isinstance(self.spec.objective, Denoise) else ("stack",)

    def readings(
        self, bytes_BT: Tensor, path: str, generator: torch.Generator | None = None, missing: Collection[int] = ()
    ) -> Readings:
        """What each block reads out along a path. Blocks in `missing` are skipped, as if their hosts were dead."""
        present = [block for block in self.blocks if block.index not in missing]
        if path == "stack":
            return self._stack(bytes_BT, present)
        if path == "mean":
            return [block.without_evidence(bytes_BT) for block in present if isinstance(block, DenoiseBlock)]
        return self._euler(bytes_BT, present, generator)[1]

    def combined(self, readings: Readings, path: str) -> Tensor:
        """log p(x) = Σ_k w_k logits_k + const. Before the weights are fitted: the last block (stack) or equal weights.
        If blocks are missing, the others have equal weights."""
        weights = self._weights(len(readings), path)
        if not any(weights[:-1]) and weights[-1] == 1:
            return readings[-1]
        return torch.stack([weight * logits for weight, logits in zip(weights, readings, strict=True)]).sum(0)

    def _weights(self, count: int, path: str) -> Sequence[float]:
        if count == len(self.blocks) and path in self.combine:
            return self.combine[path]
        return [0.0] * (count - 1) + [1.0] if path == "stack" else [1 / count] * count

    @torch.no_grad()
    def logits(self, bytes_BT: Tensor) -> Tensor:
        """The model's answer: the next token at every position, [B, T, vocabulary]."""
        path = self.paths[0]
        return self.combined(self.readings(bytes_BT, path), path)

    def continuation(self) -> Continuation:
        """Gives the last position of `logits` for one text after the other, fast if each continues the one before."""
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        return Continuation(self.spec.model, blocks, self._weights(len(blocks), self.paths[0]))

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        generator: torch.Generator,
        temperature: float = 1.0,
        top_p: float = 1.0,
    ) -> Iterator[int]:
        """Yields one token after the other, each read from its window of the text. The tokens of a model without
        tokenizer are bytes."""
        text, continuation = list(prompt or EMPTY_PROMPT), self.continuation()
        for _ in range(max_tokens):
            logits = continuation.logits(text, window_start(len(text), self.spec.model.context))
            token = draw(logits.cpu(), generator, temperature, top_p)
            text.append(token)
            yield token

    @torch.no_grad()
    def sweep(self, prompt: TokenIds, num_tokens: int, generator: torch.Generator) -> TokenIds:
        """All tokens in one traversal: every position starts as noise, and each block takes one Euler step on all of
        them. The tokens of a model without tokenizer are bytes."""
        objective, context = self.spec.objective, self.spec.model.context
        if not isinstance(objective, Denoise) or not objective.span_share:
            raise ConfigError(
                "this model's blocks were not trained on spans, which a sweep needs: generate autoregressively, "
                'or train with objective kind = "denoise" and span_share = 0.5'
            )
        longest = int(context * objective.span_share)
        if not 1 <= num_tokens <= longest:
            unit = "bytes" if self.spec.corpus.tokenizer_sha256 is None else "tokens"
            raise ConfigError(
                f"a sweep of this model writes 1 to {longest} {unit}, asked for {num_tokens}: ask for fewer"
            )
        text = (prompt or EMPTY_PROMPT)[-(context - num_tokens) :]
        window = torch.tensor([[*text, *[0] * (num_tokens - 1)]], device=self._device)
        z, _ = self._euler(window, list(self.blocks), generator, span_start=len(text))
        last = self.blocks[-1]
        assert isinstance(last, DenoiseBlock)
        nearest = (z[0, len(text) - 1 :] @ last.code_table.T).argmax(-1)
        return token_ids(nearest.tolist(), self.spec.model.vocabulary)

    def _stack(self, bytes_BT: Tensor, present: Sequence[nn.Module]) -> Readings:
        state, readings = None, []
        for block in present:
            assert isinstance(block, StackedBlock)
            state, logits = block(bytes_BT, state)
            readings.append(logits)
        return readings

    def _euler(
        self,
        bytes_BT: Tensor,
        present: Sequence[nn.Module],
        generator: torch.Generator | None,
        span_start: int | None = None,
    ) -> tuple[Tensor, Readings]:
        objective = self.spec.objective
        assert isinstance(objective, Denoise)
        noise_BTV = torch.randn(*bytes_BT.shape, self.spec.model.code_width, generator=generator)
        z, readings = objective.sigma_max * noise_BTV.to(bytes_BT.device), []
        for block in present:
            z, logits = block(bytes_BT, z, span_start)
            readings.append(logits)
        return z, readings

    @property
    def _device(self) -> torch.device:
        return next(self.parameters()).device


def draw(logits: Tensor, generator: torch.Generator, temperature: float = 1.0, top_p: float = 1.0) -> int:
    """Draws one byte from its logits. Temperature 0 takes the most likely byte; top_p keeps the most likely bytes with
    that total probability."""
    if temperature == 0:
        return int(logits.argmax())
    shares = (logits.double() / temperature).softmax(-1)
    if top_p < 1:
        ordered, order = shares.sort(descending=True)
        shares[order[ordered.cumsum(0) - ordered >= top_p]] = 0
    # In the order of the vocabulary: sorted, two tokens that are almost equally likely would change places with the
    # last bit of their logits, and the same random number would draw another token on another machine.
    return int(torch.multinomial(shares, 1, generator=generator))


def window_start(length: int, context: int) -> int:
    """Where the window of a text of `length` bytes begins. It moves by half a context at a time, so that KV caches stay
    valid between the moves. It depends on the length alone, so that all decoders see the same windows."""
    if length <= context:
        return 0
    stride = max(1, context // 2)
    return -(-(length - context) // stride) * stride


def count_parameters(block: Block | BlockModel) -> int:
    return sum(parameter.numel() for parameter in block.parameters())
