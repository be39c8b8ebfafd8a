"""Block: what one worker trains. It reads the raw bytes itself and a state from the blocks before it:
block(bytes, state) -> (state', logits). Two kinds, one per family of objectives. Next: stack.py composes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blocktrain.model import noise
from blocktrain.model.kv_cache import CacheView
from blocktrain.model.transformer import Layer, Modulation, lean_norm, rms_norm, rotary_table, span_mask
from blocktrain.spec import Denoise, RunSpec
from blocktrain.tables import narrow_rank, reads_tokens


class Block(nn.Module):
    """Embedding, layers and read-out: what both kinds have. With narrow tables a block may have no embedding. Built
    from the spec and the seed alone, unless its physical layers are given."""

    cos: Tensor
    sin: Tensor
    embedding: nn.Parameter | None
    embedding_up: nn.Parameter | None  # from the rank of the tables to the width, if they differ
    readout_down: nn.Parameter | None  # and back
    compute_again = False  # layers keep only what enters them, and are computed again in the backward pass

    def __init__(self, spec: RunSpec, index: int, layers: Sequence[Layer] | None = None) -> None:
        super().__init__()
        model = spec.model
        generator = torch.Generator().manual_seed(_init_seed(spec.seed, index))
        self.index, self.width = index, model.width
        self.num_layers = model.layers_of(index)  # logical layers; `layers` holds the physical ones
        rank = narrow_rank(model) or model.width
        self.embedding = None
        if reads_tokens(spec, index):
            drawn = torch.randn(model.vocabulary, rank, generator=generator, device=generator.device)
            self.embedding = nn.Parameter(drawn)
        initial = (Layer(model.width, model.heads, generator) for _ in range(model.physical_layers_of(index)))
        self.layers = nn.ModuleList(initial if layers is None else layers)
        self.readout = nn.Parameter(torch.zeros(model.vocabulary, rank))
        self.embedding_up = self.readout_down = None
        if rank < model.width:
            up, down = (
                torch.randn(*shape, generator=generator, device=generator.device) / shape[1] ** 0.5
                for shape in ((model.width, rank), (rank, model.width))
            )
            down = down * (model.width / rank)  # Adam moves a logit by a step per column: so it learns as a wide one
            self.embedding_up = None if self.embedding is None else nn.Parameter(up)
            self.readout_down = nn.Parameter(down)
        cos, sin = rotary_table(model.context, model.width // model.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def embed(self, bytes_BT: Tensor) -> Tensor:
        return rms_norm(self._rows(bytes_BT))

    def _rows(self, tokens: Tensor) -> Tensor:
        """The tokens' rows of the embedding."""
        assert self.embedding is not None, "the block reads the state alone"
        rows = F.embedding(tokens, self.embedding)
        return rows if self.embedding_up is None else F.linear(rows, self.embedding_up)

    def embedding_table(self) -> Tensor:
        """The embedding of every token, [vocabulary, width]."""
        assert self.embedding is not None, "the block reads the state alone"
        return self.embedding if self.embedding_up is None else F.linear(self.embedding, self.embedding_up)

    def _logits(self, normed: Tensor) -> Tensor:
        return F.linear(normed if self.readout_down is None else F.linear(normed, self.readout_down), self.readout)

    def run_layers(
        self, hidden_BTD: Tensor, mask: Tensor | None = None, modulation: Modulation | None = None
    ) -> Tensor:
        T = hidden_BTD.size(1)
        again = self.compute_again and torch.is_grad_enabled()
        for index in range(self.num_layers):
            layer, rest = self._layer(index), ((self.cos[:T], self.sin[:T]), mask, modulation)
            hidden_BTD = _kept_short(layer, hidden_BTD, *rest) if again else layer(hidden_BTD, *rest)
        return hidden_BTD

    def run_steps(self, hidden_TD: Tensor, cache: CacheView, modulation: Modulation | None = None) -> Tensor:
        """The layers, for new positions of texts whose earlier positions are in the KV caches."""
        rotary = cache.batch.rotary(self.cos, self.sin)
        for index in range(self.num_layers):
            hidden_TD = self._layer(index).step(hidden_TD, rotary, cache.attend(index), modulation)
        return hidden_TD

    def _layer(self, index: int) -> Layer:
        """The physical layer that computes a logical layer."""
        layer = self.layers[index % len(self.layers)]
        assert isinstance(layer, Layer)
        return layer

    def step(self, bytes_T: Tensor, state_TD: Tensor | None, cache: CacheView) -> Tensor:
        """The block's hidden stream at new positions, from their bytes and the stream of the previous block."""
        raise NotImplementedError

    @property
    def step_gain(self) -> Tensor | None:
        """The gain of the block's own embedding, if `step` adds it to the stream of the previous block."""
        return None

    @property
    def step_modulation(self) -> Modulation | None:
        """The modulation of the layers in `step`."""
        return None

    def answer(self, hidden_TD: Tensor) -> Tensor:
        """The logits of what `step` returned."""
        return self._logits(lean_norm(hidden_TD))

    def read_out(self, hidden_BTD: Tensor) -> Tensor:
        return self._logits(rms_norm(hidden_BTD))

    def matrices(self) -> list[nn.Parameter]:
        """The layers' weights, which Muon orthogonalises. All other parameters are tables and vectors."""
        return list(self.layers.parameters())

    def tables(self) -> list[nn.Parameter]:
        inside = {id(matrix) for matrix in self.matrices()}
        return [parameter for parameter in self.parameters() if id(parameter) not in inside]


class StackedBlock(Block):
    """The state is the stream of hidden vectors: each block adds its own embedding of the bytes, if it has one, and
    continues the stream.

    An initial block behind others adds nothing: its gain is zero and its layers are the identity. With the read-out of
    the previous block it starts where that block ended."""

    def __init__(self, spec: RunSpec, index: int, layers: Sequence[Layer] | None = None) -> None:
        super().__init__(spec, index, layers)
        initial = torch.zeros(spec.model.width) if index else torch.ones(spec.model.width)
        self.gain = None if self.embedding is None else nn.Parameter(initial)

    def forward(self, bytes_BT: Tensor, state_BTD: Tensor | None) -> tuple[Tensor, Tensor]:
        state_BTD = self.advance(bytes_BT, state_BTD)
        return state_BTD, self.read_out(state_BTD)

    def step(self, bytes_T: Tensor, state_TD: Tensor | None, cache: CacheView) -> Tensor:
        return self.run_steps(self._entering(bytes_T, state_TD, lean_norm), cache)

    @property
    def step_gain(self) -> Tensor | None:
        return self.gain

    def advance(self, bytes_BT: Tensor, state_BTD: Tensor | None) -> Tensor:
        """The next state alone, if the logits are not needed."""
        return self.run_layers(self._entering(bytes_BT, state_BTD, rms_norm))

    def _entering(self, tokens: Tensor, state: Tensor | None, norm: Callable[[Tensor], Tensor]) -> Tensor:
        """The state and the block's own embedding. A block that has neither, since the first one is missing, gets
        zeros."""
        if self.gain is None:
            return self.readout.new_zeros(*tokens.shape, self.width) if state is None else state
        own = self.gain * norm(self._rows(tokens))
        return own if state is None else own + state


class DenoiseBlock(Block):
    """The state is z, a noisy code of the next byte at every position. The block lowers the noise over its own range.

    F of the papers is computed in the basis of the codes, where D̂·e_x is coordinate x. The transposed read-out matrix
    also projects z into the stream."""

    code_table: Tensor
    NUM_NOISE_FEATURES: ClassVar[int] = 8

    def __init__(self, spec: RunSpec, index: int, layers: Sequence[Layer] | None = None) -> None:
        super().__init__(spec, index, layers)
        assert isinstance(spec.objective, Denoise)
        self.objective = spec.objective
        borders = noise.lognormal_edges(spec.model.blocks, spec.objective)
        self.sigma_high, self.sigma_low = borders[index], borders[index + 1]
        self.modulate = nn.Parameter(torch.zeros(6 * spec.model.width, self.NUM_NOISE_FEATURES))
        self.sharpness = nn.Parameter(torch.tensor(self.objective.sigma_data**-2))
        self.register_buffer(
            "code_table", noise.codes(spec.seed, spec.model.vocabulary, spec.model.code_width), persistent=False
        )

    def denoise(self, bytes_BT: Tensor, scores_BTV: Tensor, sigma_B: Tensor, span_start: int | None = None) -> Tensor:
        """Logits of the next byte at every position, from the context and z·e_x at noise level σ (one per window).
        From span_start on, positions have no clean byte and see each other in both directions."""
        sigma = sigma_B[:, None, None]
        c_skip, c_out, c_in = noise.scalings(sigma, self.objective.sigma_data)
        hidden_BTD, mask = self.embed(bytes_BT), None
        if span_start is not None:
            T = bytes_BT.size(1)
            mask = span_mask(T, span_start).to(bytes_BT.device)
            hidden_BTD = hidden_BTD * (torch.arange(T, device=bytes_BT.device) < span_start)[None, :, None]
        projected = scores_BTV @ self.readout
        hidden_BTD = torch.addcmul(
            hidden_BTD, c_in, projected if self.readout_down is None else projected @ self.readout_down
        )
        hidden_BTD = self.run_layers(hidden_BTD, mask, self._modulation(sigma_B))
        # scaled before the read-out: after it the gradient would hold one more tensor of the logits' size
        out = self._logits(self.sharpness * c_out * rms_norm(hidden_BTD))
        return out.addcmul_(self.sharpness * c_skip, scores_BTV)

    def forward(self, bytes_BT: Tensor, z_BTV: Tensor, span_start: int | None = None) -> tuple[Tensor, Tensor]:
        """One Euler step over the block's own range."""
        sigma_B = z_BTV.new_full((z_BTV.size(0),), self.sigma_high)
        logits = self.denoise(bytes_BT, z_BTV @ self.code_table.T, sigma_B, span_start)
        denoised = noise.expected_code(logits, self.code_table)
        return noise.euler_step(z_BTV, denoised, self.sigma_high, self.sigma_low), logits

    def without_evidence(self, bytes_BT: Tensor) -> Tensor:
        """Logits for z = 0 (the mean path): a language model of the context alone."""
        B, T = bytes_BT.shape
        scores_BTV = self.readout.new_zeros(B, T, len(self.readout))
        return self.denoise(bytes_BT, scores_BTV, scores_BTV.new_full((B,), self.sigma_high))

    def step(self, bytes_T: Tensor, state_TD: Tensor | None, cache: CacheView) -> Tensor:
        """Along the mean path, where z = 0: it needs no other block's stream."""
        return self.run_steps(lean_norm(self._rows(bytes_T)), cache, self.step_modulation)

    @cached_property
    def step_modulation(self) -> Modulation:
        """Cached: steps are taken only after training."""
        modulation = self._modulation(self.readout.new_full((1,), self.sigma_high))
        return tuple(each[0] for each in modulation)

    def answer(self, hidden_TD: Tensor) -> Tensor:
        """What `denoise` returns for z = 0: c_skip·z is zero there."""
        c_out = self.sigma_high * self.objective.sigma_data / math.hypot(self.sigma_high, self.objective.sigma_data)
        return self.sharpness * c_out * super().answer(hidden_TD)

    def _modulation(self, sigma_B: Tensor) -> Modulation:
        """AdaLN: shift, scale and gate as a linear function of a few waves of c_noise."""
        frequencies = torch.arange(1, self.NUM_NOISE_FEATURES // 2 + 1, device=sigma_B.device) * math.pi
        waves = noise.c_noise(sigma_B)[:, None] * frequencies
        features = torch.cat([waves.cos(), waves.sin()], -1)
        return F.linear(features, self.modulate)[:, None, :].chunk(6, -1)


def build_block(spec: RunSpec, index: int, layers: Sequence[Layer] | None = None) -> Block:
    """An initial block, equal on every machine; or a block with these physical layers."""
    kind = DenoiseBlock if isinstance(spec.objective, Denoise) else StackedBlock
    return kind(spec, index, layers)


def _kept_short(layer: Layer, *arguments: Any) -> Tensor:
    hidden: Tensor = checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)  # it draws nothing
    return hidden


def block_shapes(spec: RunSpec, index: int) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a block's tensors: what a checkpoint of it must hold. It takes almost no memory. The
    layers are on the meta device. What is drawn or computed is not: for that torch would import its compiler, which
    costs a process 80 MB and a second."""
    return dict(_block_shapes(spec, index))


@lru_cache(maxsize=256)
def _block_shapes(spec: RunSpec, index: int) -> Mapping[str, tuple[int, ...]]:
    with torch.device("meta"):
        block = build_block(spec, index)
    return {name: tuple(tensor.shape) for name, tensor in block.state_dict().items()}


def matrix_shapes(spec: RunSpec, index: int) -> list[tuple[int, ...]]:
    """The shapes of `Block.matrices`."""
    return [shape for name, shape in block_shapes(spec, index).items() if name.startswith("layers.")]


def physical_parameters(spec: RunSpec) -> int:
    """The number of parameters that a model of this shape stores: what `count_parameters` counts in a built one."""
    return sum(math.prod(shape) for block in range(spec.model.blocks) for shape in block_shapes(spec, block).values())


def logical_parameters(spec: RunSpec) -> int:
    """The number of parameters if every layer were physical. Equal to physical_parameters if none is shared."""
    every_layer = tuple(spec.model.layers_of(block) for block in range(spec.model.blocks))
    return physical_parameters(spec.with_(**{"model.physical_layers": every_layer}))


def table_parameters(spec: RunSpec) -> int:
    """How many of the parameters are in the tables of embedding and read-out, with the matrices of narrow ones."""
    names = ("embedding", "embedding_up", "readout", "readout_down")
    shapes = [block_shapes(spec, block) for block in range(spec.model.blocks)]
    return sum(math.prod(each[name]) for each in shapes for name in names if name in each)


def initial_block_tensors(spec: RunSpec) -> Callable[[int], dict[str, Tensor]]:
    """The tensors of initial blocks, each built once: a coordinator asks for their shapes with every update."""

    @cache
    def tensors(block: int) -> dict[str, Tensor]:
        return build_block(spec, block).state_dict()

    return tensors


def _init_seed(seed: int, index: int) -> int:
    return (seed * 1_000_003 + index * 7_919 + 17) % 2**63
