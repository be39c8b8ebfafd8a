"""The adaptive partition of `denoise`: a short probe measures how hard each noise level is, and the ranges are cut so
that every block gets an equal part of the difficulty. The edges become part of the spec. Next: model/noise.py."""

from __future__ import annotations

import torch

from blocktrain.data.corpus import Corpus, consecutive_windows, step_seed
from blocktrain.model import noise
from blocktrain.model.block import DenoiseBlock
from blocktrain.spec import NUM_SYMBOLS, Denoise, RunSpec
from blocktrain.train import objective
from blocktrain.train.trainer import BlockTrainer

PROBE_SHARE = 0.1  # of a phase's steps
PROBE_LEVELS = 24
PROBE_WINDOWS = 16


def resolve_partition(spec: RunSpec, corpus: Corpus) -> RunSpec:
    """The spec with the edges of its adaptive partition filled in; any other spec as it is."""
    settings = spec.objective
    if not isinstance(settings, Denoise) or settings.partition == "lognormal" or settings.edges:
        return spec
    sigmas, losses = loss_profile(spec, settings, corpus)
    edges = noise.adaptive_edges(sigmas, losses, spec.model.blocks)
    return spec.with_(**{"objective.edges": edges})


def loss_profile(spec: RunSpec, settings: Denoise, corpus: Corpus) -> tuple[list[float], list[float]]:
    """Held-out cross entropy at noise levels from σ_min to σ_max, of one block trained briefly on all of them."""
    probe = _trained_probe(spec, corpus)
    windows = torch.from_numpy(consecutive_windows(corpus.valid, spec.model.context + 1)[:PROBE_WINDOWS].copy()).long()
    inputs, targets = windows[:, :-1], windows[:, 1:]
    generator = torch.Generator().manual_seed(step_seed(spec.seed, 0, 0, 0, "probe"))
    noise_BTV = torch.randn(*inputs.shape, NUM_SYMBOLS, generator=generator)
    inner = torch.logspace(0, 1, PROBE_LEVELS, base=settings.sigma_max / settings.sigma_min) * settings.sigma_min
    sigmas = [settings.sigma_min, *inner.tolist()[1:-1], settings.sigma_max]
    with torch.no_grad():
        losses = [_loss_at(probe, inputs, targets, sigma, noise_BTV) for sigma in sigmas]
    return sigmas, losses


def _trained_probe(spec: RunSpec, corpus: Corpus) -> DenoiseBlock:
    changes = {
        "model.blocks": 1,
        "model.layers": spec.model.layers_of(0),
        "model.physical_layers": spec.model.physical_layers_of(0) if spec.model.physical_layers else None,
        "train.steps": max(1, round(PROBE_SHARE * max(phase.steps for phase in spec.phases))),
        "objective.partition": "lognormal",
    }
    probe_spec = spec.with_(**changes)
    trainer = BlockTrainer(probe_spec, probe_spec.phases[0], corpus.train, {}, device=torch.device("cpu"))
    while not trainer.finished:
        trainer.step()
    (block,) = trainer.trained
    assert isinstance(block, DenoiseBlock)
    return block


def _loss_at(
    block: DenoiseBlock, inputs: torch.Tensor, targets: torch.Tensor, sigma: float, noise_BTV: torch.Tensor
) -> float:
    sigma_B = torch.full((inputs.size(0),), sigma)
    _, (entropy,) = objective.denoise(block, inputs, targets, sigma_B, noise_BTV, None)
    return float(entropy)
