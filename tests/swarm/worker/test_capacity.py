"""What a machine could do for a run: the arithmetic."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from blocktrain.model.block import build_block
from blocktrain.spec import preset
from blocktrain.swarm.worker import capacity
from blocktrain.swarm.worker.capacity import DAY_S, TransferRates, measure_speeds, muon_flops, plan, round_bytes
from blocktrain.train.memory_estimate import least_memory_bytes
from blocktrain.train.optim import Muon

SPEC = preset("tiny").with_(**{"train.steps": 1000, "swarm.round_steps": 50, "swarm.deadline_ceiling_s": 100})
PLENTY = 2**40


@pytest.mark.parametrize("speed, limit_s, steps", [(10.0, 100.0, 50), (0.5, 100.0, 40), (0.5, 10.0, 4), (0.0, 10.0, 0)])
def test_a_lease_fills_most_of_a_deadline_and_no_more_than_a_round(speed, limit_s, steps):
    first = plan(SPEC, PLENTY, {0: speed}, TransferRates(), {0: limit_s})[0]
    assert first.steps_per_lease == steps


def test_a_phase_that_does_not_fit_is_named_so():
    needs = [least_memory_bytes(SPEC, phase) for phase in SPEC.phases]
    plans = plan(SPEC, min(needs), dict.fromkeys(range(3), 1.0), TransferRates(), {})
    assert [each.fits for each in plans] == [need == min(needs) for need in needs]
    assert plans[0].streamed


def test_a_day_of_rounds_moves_a_version_down_and_an_update_up_in_each():
    first = plan(SPEC, PLENTY, {0: 50.0}, TransferRates(), {})[0]
    down, up = round_bytes(SPEC, SPEC.phases[0])
    assert first.rounds_a_day == pytest.approx(DAY_S)
    assert (first.down_bytes_a_day, first.up_bytes_a_day) == pytest.approx((DAY_S * down, DAY_S * up))


def test_a_slow_line_leaves_time_for_fewer_rounds():
    down, up = round_bytes(SPEC, SPEC.phases[0])
    slow = plan(SPEC, PLENTY, {0: 50.0}, TransferRates(down, up), {})[0]
    assert slow.rounds_a_day == pytest.approx(DAY_S / 3)  # a second each to train, fetch and send


def test_every_phase_that_fits_is_given_a_speed_by_its_work():
    speeds = measure_speeds(SPEC, PLENTY, b"some text", torch.device("cpu"))
    assert speeds[0] > speeds[1] > speeds[2] > 0  # later ones run more blocks below
    assert measure_speeds(SPEC, 0, b"", torch.device("cpu")) == {}


def test_the_work_of_muon_is_what_torch_counts():
    blocks = [build_block(SPEC, index) for index in SPEC.phases[0].blocks]
    matrices = [matrix for block in blocks for matrix in block.matrices()]
    for matrix in matrices:
        matrix.grad = torch.ones_like(matrix)
    with FlopCounterMode(display=False) as counter:
        Muon(matrices, 0.1, 0.9).step()
    assert muon_flops(SPEC, SPEC.phases[0]) == counter.get_total_flops()


def test_a_long_first_step_is_measurement_enough(monkeypatch):
    steps = []

    def step(trainer):
        steps.append(trainer)
        return SimpleNamespace(seconds=capacity.ENOUGH_S)

    monkeypatch.setattr(capacity.BlockTrainer, "step", step)
    measure_speeds(SPEC, PLENTY, b"some text", torch.device("cpu"))
    assert len(steps) == 1
