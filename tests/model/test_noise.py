"""Each formula against a value computed by hand or derived another way."""

import math

import pytest
import torch

from blocktrain.model import noise
from blocktrain.spec import Denoise

UNIT = Denoise(p_mean=0.0, p_std=1.0, sigma_min=math.exp(-1), sigma_max=math.exp(1))


def test_codes_are_orthonormal():
    table = noise.codes(seed=3)
    torch.testing.assert_close(table @ table.T, torch.eye(256), atol=1e-5, rtol=0)


def test_codes_depend_on_the_seed_alone():
    assert torch.equal(noise.codes(3), noise.codes(3))
    assert not torch.equal(noise.codes(3), noise.codes(4))


def test_codes_of_a_large_vocabulary_are_unit_vectors_of_a_stated_width():
    table = noise.codes(3, vocabulary=1000, code_width=256)
    torch.testing.assert_close(table.norm(dim=1), torch.ones(1000))
    assert (table @ table.T - torch.eye(1000)).abs().max() < 0.4


def test_two_symmetric_ranges_meet_at_the_median():
    assert noise.lognormal_edges(2, UNIT) == pytest.approx([math.e, 1.0, 1 / math.e])


def test_four_ranges_hold_equal_prior_mass():
    objective = Denoise()
    borders = noise.lognormal_edges(4, objective)
    prior = torch.distributions.LogNormal(objective.p_mean, objective.p_std)
    mass = -prior.cdf(torch.tensor(borders, dtype=torch.float64)).diff()
    torch.testing.assert_close(mass, mass.mean().expand(4), rtol=1e-5, atol=0)


def test_the_first_block_has_the_highest_noise():
    borders = noise.lognormal_edges(4, Denoise())
    assert borders[0] == 10.0
    assert borders[-1] == 1.0
    assert borders == sorted(borders, reverse=True)


def test_a_training_range_is_widened_by_a_share_of_its_log_width():
    objective = Denoise(overlap=0.5, sigma_min=0.1, sigma_max=100)
    assert noise.widen(1.0, 4.0, objective) == pytest.approx((0.5, 8.0))


def test_a_widened_range_stays_within_the_whole():
    assert noise.widen(1.0, 10.0, Denoise()) == (1.0, 10.0)


def test_sampled_noise_levels_follow_the_truncated_prior():
    generator = torch.Generator().manual_seed(0)
    sigma = noise.sample_sigma(20_000, UNIT.sigma_min, UNIT.sigma_max, UNIT, generator)
    assert UNIT.sigma_min <= sigma.min() <= sigma.max() <= UNIT.sigma_max
    assert (sigma < 1).float().mean().item() == pytest.approx(0.5, abs=0.02)


def test_scalings_where_the_noise_equals_the_data():
    c_skip, c_out, c_in = noise.scalings(torch.tensor(0.5), sigma_data=0.5)
    assert (c_skip.item(), c_out.item(), c_in.item()) == pytest.approx((0.5, 0.5 / math.sqrt(2), math.sqrt(2)))


def test_c_in_gives_the_network_inputs_of_unit_variance():
    generator = torch.Generator().manual_seed(0)
    sigma, sigma_data = torch.tensor(3.0), 0.5
    data, noise_ = (torch.randn(100_000, generator=generator) for _ in range(2))
    _, _, c_in = noise.scalings(sigma, sigma_data)
    assert (c_in * (sigma_data * data + sigma * noise_)).var().item() == pytest.approx(1.0, abs=0.02)


def test_c_noise_is_a_quarter_of_the_log():
    assert noise.c_noise(torch.tensor(math.exp(2.0))).item() == pytest.approx(0.5)


def test_the_loss_weight_undoes_c_out():
    """λ(σ) c_out² = 1: every noise level weighs the same on the network's own output (Karras et al., eq. 8)."""
    sigma = torch.tensor([0.002, 0.5, 1.0, 10.0])
    _, c_out, _ = noise.scalings(sigma, 0.5)
    torch.testing.assert_close(noise.loss_weight(sigma, 0.5) * c_out**2, torch.ones(4))


def test_a_certain_read_out_expects_the_code_itself():
    table = noise.codes(0)
    logits = torch.full((256,), -1e9)
    logits[65] = 0.0
    torch.testing.assert_close(noise.expected_code(logits, table), table[65])


@pytest.mark.parametrize("sigma_next, expected", [(2.0, 10.0), (1.0, 7.0), (0.0, 4.0)])
def test_an_euler_step_moves_in_proportion_to_the_noise_it_removes(sigma_next, expected):
    moved = noise.euler_step(torch.tensor(10.0), torch.tensor(4.0), 2.0, sigma_next)
    assert moved.item() == pytest.approx(expected)
