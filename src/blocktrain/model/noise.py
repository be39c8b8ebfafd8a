"""The mathematics of `denoise`: one pure function per formula, in the papers' symbols. Nothing here has weights.
Karras et al. 2022 (EDM) for the scalings; DiffusionBlocks (arXiv 2506.14202) for the partition. Next: block.py."""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor

from blocktrain.spec import NUM_SYMBOLS, Denoise

STANDARD = NormalDist()


def codes(seed: int, vocabulary: int = NUM_SYMBOLS, code_width: int = NUM_SYMBOLS) -> Tensor:
    """e_x: one unit vector per token, [vocabulary, code_width]. They are orthonormal if the width is that of the
    vocabulary, as for bytes. Otherwise their directions are random, which is nearly orthogonal. The same seed gives the
    same vectors on every machine."""
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(vocabulary, code_width, generator=generator, dtype=torch.float64, device=generator.device)
    if vocabulary == code_width:
        gaussian = torch.linalg.qr(gaussian)[0]
    else:
        gaussian /= gaussian.norm(dim=1, keepdim=True)
    return gaussian.float().contiguous()


def log_normal_cdf(sigma: float, p_mean: float, p_std: float) -> float:
    """P(noise level < σ) where ln σ ~ N(P_mean, P_std²)."""
    return STANDARD.cdf((math.log(sigma) - p_mean) / p_std)


def lognormal_edges(num_blocks: int, objective: Denoise) -> list[float]:
    """B + 1 noise levels from σ_max down to σ_min, with equal shares of the (truncated) prior mass between them.
    Block k has the range [edges[k + 1], edges[k]]."""
    o = objective
    low, high = (log_normal_cdf(sigma, o.p_mean, o.p_std) for sigma in (o.sigma_min, o.sigma_max))
    shares = [high + (low - high) * i / num_blocks for i in range(1, num_blocks)]
    return [o.sigma_max, *(math.exp(o.p_mean + o.p_std * STANDARD.inv_cdf(p)) for p in shares), o.sigma_min]


def widen(low: float, high: float, objective: Denoise) -> tuple[float, float]:
    """The range that a block trains on: wider by γ of its log width on each side, clipped to [σ_min, σ_max]."""
    reach = (high / low) ** objective.overlap
    return max(low / reach, objective.sigma_min), min(high * reach, objective.sigma_max)


def sample_sigma(count: int, low: float, high: float, objective: Denoise, generator: torch.Generator) -> Tensor:
    """Noise levels from the lognormal prior, truncated to [low, high], by inversion of its CDF."""
    p_mean, p_std = objective.p_mean, objective.p_std
    p_low, p_high = log_normal_cdf(low, p_mean, p_std), log_normal_cdf(high, p_mean, p_std)
    p = p_low + (p_high - p_low) * torch.rand(count, generator=generator, dtype=torch.float64)
    return torch.exp(p_mean + p_std * torch.special.ndtri(p)).clamp(low, high).float()


def scalings(sigma: Tensor, sigma_data: float) -> tuple[Tensor, Tensor, Tensor]:
    """c_skip, c_out, c_in of Karras et al. (2022), table 1."""
    total = sigma**2 + sigma_data**2
    return sigma_data**2 / total, sigma * sigma_data / total**0.5, total**-0.5


def c_noise(sigma: Tensor) -> Tensor:
    """The noise level as the network sees it."""
    return 0.25 * sigma.log()


def loss_weight(sigma: Tensor, sigma_data: float) -> Tensor:
    """λ(σ) = (σ² + σ_d²) / (σ σ_d)². It makes the effective weight of every noise level one."""
    return (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2


def expected_code(logits: Tensor, code_table: Tensor) -> Tensor:
    """D = Σ_x softmax(logits)_x e_x."""
    return logits.softmax(-1) @ code_table


def euler_step(z: Tensor, denoised: Tensor, sigma: float, sigma_next: float) -> Tensor:
    """z ← z + (σ' − σ)(z − D)/σ."""
    return z + (sigma_next - sigma) * (z - denoised) / sigma
