"""BlockTrainer: one phase of one worker, step by step.
No network, no printing, no files. A worker needs no gradient from any other worker. All random numbers are a function
of (seed, block, shard, step), so a trainer that is restored at step n continues as if it had never stopped.
Next: losses.py, what it minimises; optim.py, the optimisers; run.py, which trains whole runs on one machine."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from blocktrain.data.shards import TokenShards
from blocktrain.data.windows import (
    STEPS_PER_SHARDS,
    Tokens,
    require_vocabulary,
    shards_of_step,
    step_seed,
    text_bytes,
    windows,
)
from blocktrain.io.allocator import keep_freed_memory
from blocktrain.model import noise
from blocktrain.model.block import Block, DenoiseBlock, StackedBlock, build_block
from blocktrain.spec import Denoise, Phase, RunSpec, Stacked
from blocktrain.tables import reads_tokens
from blocktrain.train.flops import own_losses_detached, phase_flops
from blocktrain.train.losses import denoise_loss, run_below, stacked_loss, stacked_only
from blocktrain.train.optim import BlockOptimizer, lr_factor
from blocktrain.wire.safetensors import continue_block

Function = TypeVar("Function", bound=Callable[..., Any])
Weights = Mapping[int, Mapping[str, Tensor]]  # published tensors of some blocks
COMPILE_PAYS_FLOPS = 1e13  # about half a minute on one fast core, which is how long compiling takes


@dataclass(frozen=True)
class StepReport:
    """What one step did. `loss` is the cross entropy at the end of the chain, in nats per byte."""

    phase: int
    step: int  # steps done, this one included
    steps: int
    loss: float
    grad_norm: float
    lr_factor: float
    step_bytes: int
    seconds: float


def pick_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


class BlockTrainer:
    """Trains the blocks of a phase on `train_bytes`. They start from `published`; a block that is not in it starts from
    the seed. With `micro_windows`, so many windows of a step go through the blocks at once; with
    `checkpoint_activations`, layers are computed again in the backward pass. Holds the trained blocks,
    the look-ahead's weights, and the weights of one earlier block at a time."""

    def __init__(
        self,
        spec: RunSpec,
        phase: Phase,
        train_bytes: Tokens,
        published: Weights,
        *,
        device: torch.device | None = None,
        shard: int = 0,
        compile: bool | None = None,
        micro_windows: int | None = None,
        checkpoint_activations: bool = False,
    ) -> None:
        keep_freed_memory()
        self.spec, self.phase, self.shard, self.step_done = spec, phase, shard, 0
        require_vocabulary(spec, train_bytes)
        self._opened = 0  # the text of the steps from here on is not opened yet
        self._train_bytes, self._micro_windows = train_bytes, micro_windows or spec.train.windows
        self._device, self._compute_again = device or pick_device(), checkpoint_activations
        self._compiled = compile if compile is not None else compile_pays(spec, phase)
        self._start(published)
        self._frozen = {index: self._block(index, {}).requires_grad_(False) for index in self._scratch_indices()}
        self._in_scratch: dict[tuple[int, int, bool], int] = {}  # depth -> the block whose weights are in its module
        self.refresh(published)
        self._stacked = maybe_compile(stacked_loss, self._compiled)
        self._denoise = maybe_compile(denoise_loss, self._compiled)
        self._run_below = maybe_compile(run_below, self._compiled)

    def _start(self, published: Weights) -> None:
        self.trained = [self._block(index, published) for index in self.phase.blocks]
        self._optimizer = BlockOptimizer(self.trained, self.spec.optim)

    def refresh(self, published: Weights) -> None:
        """Use newer snapshots of the blocks below and ahead."""
        self._published = published
        self._in_scratch.clear()
        for index in self.phase.ahead:
            if index in published:
                self._frozen[index].load_state_dict(dict(published[index]))

    def step(self) -> StepReport:
        started_s, tokens = time.perf_counter(), self.spec.step_tokens
        inputs, targets = self._batch()
        factor = lr_factor(self.step_done * tokens, self.phase.steps * tokens, tokens, self.spec.optim)
        loss, grad_norm = self._learn(inputs, targets, factor)
        self.step_done += 1
        num_bytes = int(text_bytes(self._train_bytes, targets.cpu().numpy()).sum())  # of the text that was predicted
        return StepReport(
            phase=self.phase.index,
            step=self.step_done,
            steps=self.phase.steps,
            loss=loss * (targets.numel() / num_bytes),
            grad_norm=grad_norm,
            lr_factor=factor,
            step_bytes=num_bytes,
            seconds=time.perf_counter() - started_s,
        )

    def _learn(self, inputs: Tensor, targets: Tensor, factor: float) -> tuple[float, float]:
        """One update of the trained blocks. Returns the cross entropy at the end of the chain and the gradient norm."""
        keep, end_loss = self._kept_states(inputs.size(0)), 0.0
        for part in self._parts(inputs.size(0)):
            share = inputs[part].size(0) / inputs.size(0)
            with self._autocast():
                loss, entropies = self._loss(inputs[part], targets[part], None if keep is None else keep[:, part])
            (share * loss).backward()  # type: ignore[no-untyped-call]
            end_loss += share * entropies[-1].item()
        return end_loss, self._optimizer.step(factor)

    def open_ahead(self) -> None:
        """Opens the text of later steps in a thread, once for the steps that read the same files."""
        text, coming = self._train_bytes, (self.step_done // STEPS_PER_SHARDS + 1) * STEPS_PER_SHARDS
        if isinstance(text, TokenShards) and self._opened < coming < self.phase.steps:
            self._opened = coming
            text.open_ahead(shards_of_step(text, **self._place(coming)))

    def held_out_loss(self, text: Tokens, shard: int, batches: int) -> float:
        """The cross entropy at the end of the chain, in nats per token, on windows of a text that is not trained on."""
        trained = self._train_bytes, self.shard, self.step_done
        self._train_bytes, self.shard = text, shard
        total = 0.0
        try:
            for self.step_done in range(batches):
                total += self._end_loss(*self._batch())
        finally:
            self._train_bytes, self.shard, self.step_done = trained
        return total / batches

    def _end_loss(self, inputs: Tensor, targets: Tensor) -> float:
        total = 0.0
        for part in self._parts(inputs.size(0)):
            with torch.no_grad(), self._autocast():
                _, entropies = self._loss(inputs[part], targets[part])
            total += entropies[-1].item() * inputs[part].size(0) / inputs.size(0)
        return total

    def _parts(self, num_windows: int) -> list[slice]:
        """The windows of a step that go through the blocks at once."""
        return [slice(start, start + self._micro_windows) for start in range(0, num_windows, self._micro_windows)]

    @property
    def finished(self) -> bool:
        return self.step_done >= self.phase.steps

    def current(self) -> dict[int, dict[str, Tensor]]:
        """The trained blocks' tensors, not copied: the next step changes them."""
        return {block.index: block.state_dict() for block in self.trained}

    def weights(self) -> dict[int, dict[str, Tensor]]:
        """A copy of the trained blocks' tensors, on the CPU."""
        return {
            block: {name: value.detach().cpu().clone() for name, value in tensors.items()}
            for block, tensors in self.current().items()
        }

    def adopt(self, weights: Weights) -> None:
        """Continue from other weights of the trained blocks, such as the mean of several replicas. The optimiser keeps
        its state."""
        for block in self.trained:
            block.load_state_dict(dict(weights[block.index]))

    def state(self) -> dict[str, Tensor]:
        """All that is needed to continue from here: weights and optimiser state, as named tensors."""
        weights = {f"weights:{k}.{name}": t for k, block in self.weights().items() for name, t in block.items()}
        return weights | {f"optim:{name}": tensor for name, tensor in self._optimizer.state().items()}

    def restore(self, state: Mapping[str, Tensor], step_done: int) -> None:
        for block in self.trained:
            prefix = f"weights:{block.index}."
            tensors = {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
            block.load_state_dict(tensors)
        optim = {name.removeprefix("optim:"): t for name, t in state.items() if name.startswith("optim:")}
        self._optimizer.load(optim)
        self.step_done = step_done

    def _block(self, index: int, published: Weights) -> Block:
        block = build_block(self.spec, index)
        block.compute_again = self._compute_again
        if index in published:
            block.load_state_dict(dict(published[index]))
        elif index - 1 in published and isinstance(block, StackedBlock):
            block.load_state_dict(continue_block(block.state_dict(), published[index - 1]))
        return block.to(self._device)

    def _scratch_indices(self) -> Sequence[int]:
        """The frozen blocks to build: every one ahead, and one below for each distinct depth."""
        by_depth = {self._depth(index): index for index in self.phase.below}
        return [*by_depth.values(), *self.phase.ahead]

    def _depth(self, index: int) -> tuple[int, int, bool]:
        """The weights of blocks that are alike in this can be loaded into the same module."""
        model = self.spec.model
        return model.layers_of(index), model.physical_layers_of(index), reads_tokens(self.spec, index)

    def _batch(self) -> tuple[Tensor, Tensor]:
        drawn = windows(self._train_bytes, count=self.spec.train.windows, **self._place(self.step_done))
        window = torch.from_numpy(drawn).to(self._device).long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def _place(self, step: int) -> dict[str, int]:
        """Where the windows of a step are."""
        return {
            "length": self.spec.model.context + 1,
            "seed": self.spec.draw_seed,
            "block": self.phase.block,
            "shard": self.shard,
            "step": step,
        }

    def _loss(self, inputs: Tensor, targets: Tensor, keep: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        settings = self.spec.objective
        if isinstance(settings, Denoise):
            return self._denoise_loss(settings, inputs, targets)
        trained, ahead = stacked_only(self.trained), stacked_only([self._frozen[k] for k in self.phase.ahead])
        state, detached = self._state_below(inputs), own_losses_detached(settings)
        return self._stacked(trained, ahead, inputs, targets, state, self._own_weight, keep, detached)

    @property
    def _own_weight(self) -> float:
        return self.spec.objective.own_weight if isinstance(self.spec.objective, Stacked) else 0.0

    def _kept_states(self, num_windows: int) -> Tensor | None:
        """For each block of the chain and each window: 0 if the state that enters the block is dropped, else 1."""
        dropout = self.spec.objective.state_dropout if isinstance(self.spec.objective, Stacked) else 0.0
        if not dropout:
            return None
        chain = len(self.phase.blocks) + len(self.phase.ahead)
        drawn = torch.rand(chain, num_windows, generator=self._generator())
        return (drawn >= dropout).float().to(self._device)

    def _generator(self) -> torch.Generator:
        """The random numbers of this step."""
        seed = step_seed(self.spec.draw_seed, self.phase.block, self.shard, self.step_done, "noise")
        return torch.Generator().manual_seed(seed)

    def _denoise_loss(self, settings: Denoise, inputs: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
        (block,), generator = self.trained, self._generator()
        assert isinstance(block, DenoiseBlock)
        low, high = noise.widen(block.sigma_low, block.sigma_high, settings)
        sigma_B = noise.sample_sigma(inputs.size(0), low, high, settings, generator).to(self._device)
        context = self.spec.model.context
        span_start = context - int(context * settings.span_share) if settings.span_share else None
        return self._denoise(
            block,
            inputs,
            targets,
            sigma_B,
            torch.randn(*inputs.shape, self.spec.model.code_width, generator=generator).to(self._device),
            span_start,
        )

    def _state_below(self, inputs: Tensor) -> Tensor | None:
        """The state that the earlier blocks' snapshots compute from these bytes. Their weights are loaded in turn."""
        state = None
        for index in self.phase.below:
            depth = self._depth(index)
            scratch = next(
                b for b in self._frozen.values() if self._depth(b.index) == depth and b.index in self.phase.below
            )
            if self._in_scratch.get(depth) != index:
                scratch.load_state_dict(dict(self._published[index]))
                self._in_scratch[depth] = index
            assert isinstance(scratch, StackedBlock)
            state = self._run_below(scratch, inputs, state)
        return state

    def _autocast(self) -> AbstractContextManager[None]:
        if self._device.type == "cuda":
            return torch.autocast("cuda", dtype=torch.bfloat16)
        return nullcontext()


def compile_pays(spec: RunSpec, phase: Phase) -> bool:
    """Whether torch.compile saves more time than it takes. Depends on the spec alone, so resuming never changes it."""
    compiler = torch.cuda.is_available() or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    return bool(compiler) and phase.steps * phase_flops(spec, phase) > COMPILE_PAYS_FLOPS


def maybe_compile(function: Function, compiled: bool) -> Function:
    return cast(Function, torch.compile(function, dynamic=False)) if compiled else function
