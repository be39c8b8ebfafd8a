"""StreamedTrainer: trains all blocks of a phase through one loss with one block in memory. The other blocks, their
gradients and their optimiser state wait on disk. Its weights are bit-identical to BlockTrainer's; a step takes one more
forward pass of every block but the last and those whose activations are kept. Next: trainer.py; io/shelf.py, where
blocks wait; memory_estimate.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from blocktrain.data.windows import Tokens
from blocktrain.io.shelf import Shelf
from blocktrain.model.block import StackedBlock
from blocktrain.spec import Phase, RunSpec
from blocktrain.train.flops import FORWARD, layers_flops, own_losses_detached, run_flops
from blocktrain.train.losses import byte_cross_entropy
from blocktrain.train.memory_estimate import can_stream, memory_plan
from blocktrain.train.optim import BlockOptimizer, gradient_norms, total_norm
from blocktrain.train.trainer import BlockTrainer, Weights, maybe_compile


def streamed_run_flops(spec: RunSpec) -> int:
    """The work of a run whose phases are streamed: every block but a phase's last runs forward once more."""
    again = sum(
        phase.steps * layers_flops(spec, block, FORWARD)
        for phase in spec.phases
        if can_stream(spec, phase)
        for block in phase.blocks[:-1]
    )
    return run_flops(spec) + again


def fitting_trainer(
    spec: RunSpec,
    phase: Phase,
    train_bytes: Tokens,
    published: Weights,
    *,
    memory_bytes: int | None,
    scratch: Path,
    **options: Any,
) -> BlockTrainer:
    """The trainer of a phase on a machine with this much memory."""
    plan = memory_plan(spec, phase, memory_bytes)
    options["micro_windows"] = plan.micro_windows
    if plan.streamed:
        options["kept_blocks"] = plan.kept_blocks
        return StreamedTrainer(spec, phase, train_bytes, published, scratch=scratch, **options)
    return BlockTrainer(spec, phase, train_bytes, published, **options)


@dataclass(frozen=True)
class _Ran:
    """One block run with gradients on some windows: what its backward pass starts from."""

    entering: Tensor | None
    leaving: Tensor
    own: Tensor | None  # the cross entropy of the block's own read-out, if it is trained


class StreamedTrainer(BlockTrainer):
    """`scratch` is a folder for the blocks that wait: 16 bytes per trained parameter. A block is copied to the device
    when it is used. One module per depth takes all blocks of that depth in turn. The activations of `kept_blocks`
    blocks before the last stay in memory, so that these blocks do not run forward again."""

    def __init__(
        self,
        spec: RunSpec,
        phase: Phase,
        train_bytes: Tokens,
        published: Weights,
        *,
        scratch: Path,
        kept_blocks: int = 0,
        **options: Any,
    ) -> None:
        assert can_stream(spec, phase)
        self._shelf, self._kept_blocks = Shelf(scratch), kept_blocks
        super().__init__(spec, phase, train_bytes, published, **options)

    def _start(self, published: Weights) -> None:
        self.trained = []
        self._run = maybe_compile(_run_block, self._compiled)
        self._modules: dict[tuple[int, int, bool], StackedBlock] = {}
        self._loaded: dict[tuple[int, int, bool], int] = {}  # depth -> the block whose weights are in its module
        for index in self.phase.blocks:
            block = self._block(index, published)
            assert isinstance(block, StackedBlock)
            self._shelf.put(("weights", index), block.state_dict())
            self._modules[self._depth(index)] = block
            self._loaded[self._depth(index)] = index

    def _learn(self, inputs: Tensor, targets: Tensor, factor: float) -> tuple[float, float]:
        keep = self._kept_states(inputs.size(0))
        states, kept = self._run_forward(inputs, targets, keep)
        gradient: Tensor | None = None
        norms: dict[int, list[Tensor]] = {}
        loss = 0.0
        for position in reversed(range(len(self.phase.blocks))):
            index = self.phase.blocks[position]
            block, state = self._load(index), states.pop()
            ran = kept.pop(position, None) or (
                self._run_part(block, position, inputs[part], targets[part], state, part, keep)
                for part in self._parts(inputs.size(0))
            )
            entropy, gradient = self._run_backward(ran, gradient, inputs.size(0))
            loss = entropy if position == len(self.phase.blocks) - 1 else loss
            norms[index] = gradient_norms(block.parameters())
            self._put_gradients(block, index)
        norm = total_norm([each for index in self.phase.blocks for each in norms[index]])
        for index in self.phase.blocks:
            self._update(index, factor, norm)
        return loss, float(norm)

    def _end_loss(self, inputs: Tensor, targets: Tensor) -> float:
        state, last = self._run_forward(inputs, None, None)[0][-1], self._load(self.phase.blocks[-1])
        total = 0.0
        for part in self._parts(inputs.size(0)):
            with torch.no_grad(), self._autocast():
                _, own = self._run(last, inputs[part], targets[part], None if state is None else state[part], False)
            assert own is not None
            total += own.item() * inputs[part].size(0) / inputs.size(0)
        return total

    def _run_forward(
        self, inputs: Tensor, targets: Tensor | None, keep: Tensor | None
    ) -> tuple[list[Tensor | None], dict[int, list[_Ran]]]:
        """The state that enters each block of the chain, without gradients; and by their position the blocks that need
        not run again. Without targets there is no backward pass, and none is kept."""
        states, kept = [self._state_below(inputs)], dict[int, list[_Ran]]()
        last, parts = len(self.phase.blocks) - 1, self._parts(inputs.size(0))
        for position, index in enumerate(self.phase.blocks[:-1]):
            block = self._load(index)
            if targets is not None and position >= last - self._kept_blocks:
                with saved_tensors_hooks(Tensor.detach, _as_it_is):
                    kept[position] = [
                        self._run_part(block, position, inputs[part], targets[part], states[-1], part, keep)
                        for part in parts
                    ]
                states.append(torch.cat([ran.leaving.detach() for ran in kept[position]]))
                continue
            entering = _dropped(states[-1], keep, position)
            with self._autocast():
                states.append(
                    torch.cat(
                        [
                            self._run_below(block, inputs[part], None if entering is None else entering[part])
                            for part in parts
                        ]
                    )
                )
        return states, kept

    def _run_part(
        self,
        block: StackedBlock,
        position: int,
        inputs: Tensor,
        targets: Tensor,
        state: Tensor | None,
        part: slice,
        keep: Tensor | None,
    ) -> _Ran:
        """Runs the block with gradients on some of the windows."""
        entering = None if state is None else state[part].detach().requires_grad_(position > 0)
        ends = position == len(self.phase.blocks) - 1
        with self._autocast():
            leaving, own = self._run(
                block,
                inputs,
                targets if ends or self._own_weight else None,
                _dropped(entering, None if keep is None else keep[:, part], position),
                not ends and own_losses_detached(self.spec.objective),
            )
        return _Ran(entering, leaving, own)

    def _run_backward(
        self, parts: Iterable[_Ran], gradient: Tensor | None, num_windows: int
    ) -> tuple[float, Tensor | None]:
        """Given the gradient of a block's output (None: the end of the chain), returns its own cross entropy and the
        gradient of the state that entered it."""
        entropy, weight, done = 0.0, 1.0 if gradient is None else self._own_weight, 0
        entering_gradients: list[Tensor] = []
        for ran in parts:
            part = slice(done, done + ran.leaving.size(0))
            done = part.stop
            roots: list[Tensor] = []
            gradients: list[Tensor | None] = []
            if ran.own is not None:
                share = ran.leaving.size(0) / num_windows
                entropy += share * ran.own.item()
                roots.append(weight * share * ran.own)
                gradients.append(None)
            if gradient is not None:
                roots.append(ran.leaving)
                gradients.append(gradient[part])
            torch.autograd.backward(roots, gradients)
            if ran.entering is not None and ran.entering.grad is not None:
                entering_gradients.append(ran.entering.grad)
        return entropy, torch.cat(entering_gradients) if entering_gradients else None

    def _put_gradients(self, block: StackedBlock, index: int) -> None:
        parameters = dict(block.named_parameters())
        gradients = {name: each.grad for name, each in parameters.items() if each.grad is not None}
        self._shelf.put(("gradients", index), gradients)
        for parameter in parameters.values():
            parameter.grad = None

    def _update(self, index: int, factor: float, norm: Tensor) -> None:
        """One step of the optimiser on a block whose gradients wait on the shelf."""
        block = self._load(index)
        optimizer = BlockOptimizer([block], self.spec.optim)
        with self._shelf.taken(("gradients", index)) as gradients:
            for name, parameter in block.named_parameters():
                parameter.grad = gradients[name].to(self._device, copy=True) if name in gradients else None
        with self._shelf.taken(("optim", index)) as state:
            optimizer.load(state)
        optimizer.apply(factor, norm)
        self._shelf.put(("weights", index), block.state_dict())
        self._shelf.put(("optim", index), optimizer.state())

    def _load(self, index: int) -> StackedBlock:
        depth = self._depth(index)
        block = self._modules[depth]
        if self._loaded.get(depth) != index:
            with self._shelf.taken(("weights", index)) as weights:
                block.load_state_dict(weights)
            self._loaded[depth] = block.index = index
        return block

    def current(self) -> dict[int, dict[str, Tensor]]:
        """The trained blocks' tensors as they lie on the disk: the next step changes them."""
        return {index: self._shelf.lying(("weights", index)) for index in self.phase.blocks}

    def weights(self) -> dict[int, dict[str, Tensor]]:
        """The same: a copy would take the memory that the machine does not have."""
        return self.current()

    def adopt(self, weights: Weights) -> None:
        for index in self.phase.blocks:
            self._shelf.put(("weights", index), weights[index])
        self._loaded.clear()

    def state(self) -> dict[str, Tensor]:
        weights = {f"weights:{k}.{name}": t for k, block in self.current().items() for name, t in block.items()}
        optim = (self._shelf.lying(("optim", index)) for index in self.phase.blocks)
        return weights | {f"optim:{name}": tensor for each in optim for name, tensor in each.items()}

    def restore(self, state: Mapping[str, Tensor], step_done: int) -> None:
        for index in self.phase.blocks:
            self._shelf.put(("weights", index), dict(_beginning(state, f"weights:{index}.", "")))
            self._shelf.put(("optim", index), dict(_beginning(state, f"optim:{index}.", f"{index}.")))
        self._loaded.clear()
        self.step_done = step_done


def _run_block(
    block: StackedBlock, inputs: Tensor, targets: Tensor | None, state: Tensor | None, detached: bool
) -> tuple[Tensor, Tensor | None]:
    """The state that leaves the block, and the cross entropy of its own read-out if targets are given, which trains the
    read-out alone if it is detached."""
    leaving = block.advance(inputs, state)
    if targets is None:
        return leaving, None
    return leaving, byte_cross_entropy(block.read_out(leaving.detach() if detached else leaving), targets)


def _as_it_is(kept: Tensor) -> Tensor:
    """What the backward pass gets for a kept tensor. Weights are kept as the memory of their module, which other blocks
    use meanwhile: the block's own weights are loaded again first. torch trusts a hook where it would refuse that."""
    return kept


def _beginning(state: Mapping[str, Tensor], prefix: str, new_prefix: str) -> Iterator[tuple[str, Tensor]]:
    return ((new_prefix + name.removeprefix(prefix), t) for name, t in state.items() if name.startswith(prefix))


def _dropped(state: Tensor | None, keep: Tensor | None, position: int) -> Tensor | None:
    return state if state is None or keep is None else state * keep[position, :, None, None]
