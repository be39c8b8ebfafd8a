"""The optimisers and the learning-rate schedule. Muon (Jordan et al. 2024) for the layers' matrices, torch's AdamW for
the tables. torch.optim.Muon exists; ours runs equal shapes as one batch and in fp32, which a CPU is fast at, and a
test holds the two together. Next: trainer.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from blocktrain.model.block import Block
from blocktrain.spec import OptimSpec

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


def lr_factor(seen_bytes: int, total_bytes: int, step_bytes: int, optim: OptimSpec) -> float:
    """The learning rate's share of its peak at the step that starts at seen_bytes: warm-up, constant, linear to 0."""
    warmup = (seen_bytes + step_bytes) / (optim.warmup_steps * step_bytes) if optim.warmup_steps else 1.0
    decay = (total_bytes - seen_bytes) / (optim.decay_share * total_bytes) if optim.decay_share else 1.0
    return min(1.0, warmup, decay)


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrices, roughly: quintic Newton-Schulz iterations, batched over [N, ., .]."""
    a, b, c = NEWTON_SCHULZ
    x: Tensor = matrices / (torch.linalg.matrix_norm(matrices, keepdim=True) + 1e-7)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; the step of a matrix is scaled by √(rows / columns), at least 1."""

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float, momentum: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})
        for parameter in parameters:
            self.state[parameter]["momentum"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                shapes.setdefault(parameter.shape, []).append(parameter)
            for parameters in shapes.values():
                self._step_shape(parameters, group["lr"], group["momentum"])

    def _step_shape(self, parameters: list[nn.Parameter], lr: float, momentum: float) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        averages = [self.state[parameter]["momentum"] for parameter in parameters]
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        nesterov = torch.stack(torch._foreach_lerp(gradients, averages, momentum))
        rows, columns = parameters[0].shape
        steps = orthogonalise(nesterov) * (lr * max(1.0, rows / columns) ** 0.5)
        torch._foreach_sub_(list[Tensor](parameters), list(steps.unbind()))


class BlockOptimizer:
    """Muon and AdamW over some blocks, with one learning-rate factor and a state of named tensors."""

    def __init__(self, blocks: Sequence[Block], optim: OptimSpec) -> None:
        self._names: dict[Tensor, str] = {p: f"{b.index}.{name}" for b in blocks for name, p in b.named_parameters()}
        self._clip_norm = optim.clip_norm
        matrices = [p for b in blocks for p in b.matrices()]
        tables = [p for b in blocks for p in b.tables()]
        self._muon = Muon(matrices, optim.muon_lr, optim.muon_momentum)
        self._adam = torch.optim.AdamW(tables, optim.adam_lr, optim.adam_betas, weight_decay=0.0, fused=True)
        self._peaks = [(group, group["lr"]) for o in (self._muon, self._adam) for group in o.param_groups]

    def step(self, factor: float) -> float:
        """Move along the gradients, clipped together, and drop them; returns their norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self._names, self._clip_norm)
        for group, peak in self._peaks:
            group["lr"] = peak * factor
        self._muon.step()
        self._adam.step()
        for parameter in self._names:
            parameter.grad = None
        return float(norm)

    def state(self) -> dict[str, Tensor]:
        return {
            f"{self._names[parameter]}:{key}": value
            for optimizer in (self._muon, self._adam)
            for parameter, entries in optimizer.state.items()
            for key, value in entries.items()
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over a state saved by an optimiser of the same blocks."""
        by_name = {name: parameter for parameter, name in self._names.items()}
        owner = {p: o for o in (self._muon, self._adam) for group in o.param_groups for p in group["params"]}
        for label, value in state.items():
            name, key = label.rsplit(":", 1)
            parameter = by_name[name]
            device = torch.device("cpu") if key == "step" else parameter.device
            owner[parameter].state[parameter][key] = value.to(device).clone()
