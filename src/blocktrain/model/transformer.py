"""The layers: pre-norm, rotary, causal, squared ReLU, no biases, no parameters in the norms. Output projections start
at zero, so a new layer is the identity. Next: block.py."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from blocktrain.model.kv_cache import Attend

ROTARY_BASE = 10_000.0
Modulation = tuple[Tensor, ...]  # shift, scale and gate of the attention, then of the MLP; each [B, 1, D]


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def lean_norm(x: Tensor) -> Tensor:
    """rms_norm without a gradient. It takes half the time for few positions."""
    if x.dtype is not torch.float32:
        return rms_norm(x)  # which squares in full precision
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(_epsilon(x.device), size, size, value=1 / x.size(-1)).rsqrt_()


@lru_cache
def _epsilon(device: torch.device) -> Tensor:
    return torch.tensor(torch.finfo(torch.float32).eps, device=device)


def rotary_table(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    """cos and sin of position · frequency, [T, head_width / 2] each. On the CPU: block.py, `block_shapes`."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_width, 2, dtype=torch.float32, device="cpu") / head_width)
    angles = torch.outer(torch.arange(context, dtype=torch.float32, device="cpu"), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (first half, second half) of each head's channels by their position's angles."""
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def span_mask(context: int, span_start: int) -> Tensor:
    """Which position sees which: causal, and positions from span_start on also see each other in both directions."""
    position = torch.arange(context)
    in_span = position >= span_start
    return (position[:, None] >= position[None, :]) | (in_span[:, None] & in_span[None, :])


class Layer(nn.Module):
    """Attention, then MLP. Each has a norm before it and is added to the stream."""

    query: Tensor
    key: Tensor
    value: Tensor
    attention_out: Tensor
    up: Tensor
    down: Tensor

    def __init__(self, width: int, heads: int, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = heads

        def matrix(rows: int, columns: int) -> nn.Parameter:
            bound = math.sqrt(3 / columns)  # variance 1 / columns
            return nn.Parameter(torch.empty(rows, columns).uniform_(-bound, bound, generator=generator))

        self.query, self.key, self.value = (matrix(width, width) for _ in range(3))
        self.attention_out = nn.Parameter(torch.zeros(width, width))
        self.up = matrix(4 * width, width)
        self.down = nn.Parameter(torch.zeros(width, 4 * width))

    def forward(
        self,
        hidden_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        modulation: Modulation | None = None,
    ) -> Tensor:
        if modulation is None:
            hidden_BTD = hidden_BTD + self._attend(rms_norm(hidden_BTD), rotary, mask)
            return hidden_BTD + self._mlp(rms_norm(hidden_BTD))
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation
        attended = self._attend(rms_norm(hidden_BTD) * (1 + scale_a) + shift_a, rotary, mask)
        hidden_BTD = hidden_BTD + (1 + gate_a) * attended
        return hidden_BTD + (1 + gate_m) * self._mlp(rms_norm(hidden_BTD) * (1 + scale_m) + shift_m)

    def step(
        self, hidden_TD: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend, modulation: Modulation | None = None
    ) -> Tensor:
        """`forward` for new positions of texts whose earlier positions are in the KV caches behind `attend`. The same
        function in half as many operations: they are the cost of a single byte."""
        if modulation is None:
            hidden_TD = hidden_TD + self._attend_cached(lean_norm(hidden_TD), rotary, attend)
            return hidden_TD + self._mlp(lean_norm(hidden_TD))
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation
        attended = self._attend_cached(lean_norm(hidden_TD) * (1 + scale_a) + shift_a, rotary, attend)
        hidden_TD = hidden_TD + (1 + gate_a) * attended
        return hidden_TD + (1 + gate_m) * self._mlp(lean_norm(hidden_TD) * (1 + scale_m) + shift_m)

    def _attend_cached(self, x_TD: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Rotates and normalises query and key as one tensor."""
        cos, sin = rotary
        T, D = x_TD.shape
        both = torch.cat([self.linear(x_TD, self.query), self.linear(x_TD, self.key)], -1).view(T, 2 * self.heads, -1)
        both = lean_norm(torch.addcmul(both * cos, both.roll(D // self.heads // 2, -1), sin))
        value = self.linear(x_TD, self.value).view(T, self.heads, -1)
        mixed_THW = attend(both[:, : self.heads], both[:, self.heads :], value)
        return self.linear(mixed_THW.reshape(T, D), self.attention_out)

    def _attend(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        B, T, D = x_BTD.shape

        def heads(weight: Tensor) -> Tensor:
            return self.linear(x_BTD, weight).view(B, T, self.heads, D // self.heads).transpose(1, 2)

        query, key = (rms_norm(rotate(heads(weight), *rotary)) for weight in (self.query, self.key))
        mixed = F.scaled_dot_product_attention(query, key, heads(self.value), mask, is_causal=mask is None)
        return self.linear(mixed.transpose(1, 2).reshape(B, T, D), self.attention_out)

    def _mlp(self, x_BTD: Tensor) -> Tensor:
        positive = F.relu(self.linear(x_BTD, self.up))
        return self.linear(positive * positive, self.down)  # square's gradient takes one more tensor of this size

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x · weightᵀ. offload.py overrides it."""
        return F.linear(x, weight)
