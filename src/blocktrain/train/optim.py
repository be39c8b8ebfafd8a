"""The optimisers, Muon (Jordan et al. 2024) for the layers' matrices and AdamW for the tables, and the learning rate.
torch.optim has both, and tests compare ours with them. But its classes import torch's compiler, which costs every
process 80 MB and one second. Our Muon also runs equal shapes as one batch and in fp32, which is fast on a CPU.
Next: trainer.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from blocktrain.model.block import Block
from blocktrain.spec import OptimSpec

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
ADAM_EPS = 1e-8


def lr_factor(seen_tokens: int, total_tokens: int, step_tokens: int, optim: OptimSpec) -> float:
    """The learning rate of the step that starts at seen_tokens, as a share of its peak: up, constant, linear to 0."""
    warmup = (seen_tokens + step_tokens) / (optim.warmup_steps * step_tokens) if optim.warmup_steps else 1.0
    decay = (total_tokens - seen_tokens) / (optim.decay_share * total_tokens) if optim.decay_share else 1.0
    return min(1.0, warmup, decay)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Roughly the nearest (semi-)orthogonal matrices: quintic Newton-Schulz iterations, batched over [N, ., .]."""
    a, b, c = NEWTON_SCHULZ
    x: Tensor = matrices / (torch.linalg.matrix_norm(matrices, keepdim=True) + 1e-7)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Orthogonalised Nesterov momentum. The step of a matrix is scaled by √(rows / columns), at least 1."""

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float, momentum: float) -> None:
        self.parameters, self._lr, self._momentum = parameters, lr, momentum
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self, factor: float = 1.0) -> None:
        shapes: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in self.parameters:
            shapes.setdefault(parameter.shape, []).append(parameter)
        for parameters in shapes.values():
            self._step_shape(parameters, self._lr * factor)

    def _step_shape(self, parameters: list[nn.Parameter], lr: float) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        averages = [self._state_of(parameter)["momentum"] for parameter in parameters]
        torch._foreach_lerp_(averages, gradients, 1 - self._momentum)
        nesterov = torch.stack(torch._foreach_lerp(gradients, averages, self._momentum))
        rows, columns = parameters[0].shape
        steps = orthogonalise(nesterov) * (lr * max(1.0, rows / columns) ** 0.5)
        torch._foreach_sub_(list[Tensor](parameters), list(steps.unbind()))

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if parameter not in self.state:
            self.state[parameter] = {"momentum": torch.zeros_like(parameter)}
        return self.state[parameter]


class AdamW:
    """AdamW of Loshchilov and Hutter (2019), without weight decay, computed by torch's kernel."""

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float, betas: tuple[float, float]) -> None:
        self.parameters, self._lr, self._betas = parameters, lr, betas
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self, factor: float = 1.0) -> None:
        """Moves only the parameters that have a gradient."""
        moved = {parameter: parameter.grad for parameter in self.parameters if parameter.grad is not None}
        self.state |= {parameter: _unmoved(parameter) for parameter in moved if parameter not in self.state}
        states = [self.state[parameter] for parameter in moved]
        steps, means, squares = ([state[key] for state in states] for key in ("step", "exp_avg", "exp_avg_sq"))
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            list[Tensor](moved),
            list(moved.values()),
            means,
            squares,
            [],
            steps,
            lr=self._lr * factor,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=0.0,
            eps=ADAM_EPS,
            amsgrad=False,
            maximize=False,
        )


def _unmoved(parameter: nn.Parameter) -> dict[str, Tensor]:
    return {
        "step": torch.zeros((), device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def gradient_norms(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The norm of each gradient, for `total_norm`."""
    return list(torch._foreach_norm([parameter.grad for parameter in parameters if parameter.grad is not None]))


def total_norm(norms: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients together."""
    total: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return total


class BlockOptimizer:
    """Muon and AdamW for some blocks, with one learning-rate factor and a state of named tensors."""

    def __init__(self, blocks: Sequence[Block], optim: OptimSpec) -> None:
        self._names: dict[Tensor, str] = {p: f"{b.index}.{name}" for b in blocks for name, p in b.named_parameters()}
        self._clip_norm = optim.clip_norm
        matrices = [p for b in blocks for p in b.matrices()]
        tables = [p for b in blocks for p in b.tables()]
        self._optimizers: tuple[Muon | AdamW, ...] = (
            Muon(matrices, optim.muon_lr, optim.muon_momentum),
            AdamW(tables, optim.adam_lr, optim.adam_betas),
        )

    def step(self, factor: float) -> float:
        """Apply the gradients, clipped by their common norm, and clear them. Returns the norm before clipping."""
        norm = total_norm(gradient_norms(self._names))
        self.apply(factor, norm)
        return float(norm)

    def apply(self, factor: float, norm: Tensor) -> None:
        """The same if these are only some of the gradients: `norm` is the norm of all of them."""
        nn.utils.clip_grads_with_norm_(self._names, self._clip_norm, norm)
        for optimizer in self._optimizers:
            optimizer.step(factor)
        for parameter in self._names:
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        return {
            f"{self._names[parameter]}:{key}": value
            for optimizer in self._optimizers
            for parameter, entries in optimizer.state.items()
            for key, value in entries.items()
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Load a state that an optimiser of the same blocks saved."""
        owners = {self._names[p]: (optimizer, p) for optimizer in self._optimizers for p in optimizer.parameters}
        for label, value in state.items():
            name, key = label.rsplit(":", 1)
            optimizer, parameter = owners[name]
            optimizer.state.setdefault(parameter, {})[key] = value.to(parameter.device).clone()
