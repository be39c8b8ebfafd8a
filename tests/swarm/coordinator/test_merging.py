"""How workers that have one version get the next: from its updates where these are fewer bytes."""

import pytest

from blocktrain.wire.recipes import is_recipe, read_recipe
from blocktrain.wire.updates import read_update

VECTOR = {"swarm.update": "vector", "swarm.update_ratio": 20.0}


def ways(house):
    """To the newest version of each block of the first phase."""
    versions = [version.from_previous for version in house.member().lease().trained]
    return [house.blobs.get(blob.sha256) for blob in versions if blob is not None]


def test_few_small_updates_are_the_way_to_all_blocks_of_their_phase(new_house):
    house = new_house(**VECTOR)
    house.member().work()
    update = house.ledger.contributions()[0].update
    first, second = ways(house)
    assert first == second
    recipe = read_recipe(first)
    assert recipe.blocks == house.spec.phases[0].blocks
    assert [(each.payload.sha256, each.share) for each in recipe.updates] == [(update.id, 1.0)]


@pytest.mark.parametrize(
    "changes",
    [
        {"swarm.averaging": "median"},
        {"swarm.averaging": "trimmed"},
        {"swarm.outer": "nesterov"},
        {"swarm.update": "int8"},
    ],
    ids=lambda changes: next(iter(changes.values())),
)
def test_a_version_that_is_no_sum_of_small_updates_is_sent_as_its_difference(new_house, changes):
    house = new_house(**(VECTOR | changes))
    house.member().work()
    for block, data in enumerate(ways(house)):
        assert not is_recipe(data)
        initial = house.coordinator._blocks.initial_block(block)
        assert read_update(data, {name: tuple(tensor.shape) for name, tensor in initial.items()})


def test_a_late_update_is_sent_as_a_difference_since_its_course_may_be_forgotten(new_house):
    house = new_house(**VECTOR)
    slow, fast = house.member(), house.member()
    late = slow.lease()
    house.now_s += 1e6
    fast.work()
    assert slow.send(late, slow.payload(late, 2e-3)).status_code == 200
    fast.work()
    assert not any(map(is_recipe, ways(house)))


def test_the_shares_of_unequal_updates_are_those_of_their_weights(new_house):
    house = new_house(**VECTOR, **{"swarm.min_updates": 2})
    members = [house.member(), house.member()]
    leases = [member.lease() for member in members]
    for member, lease, steps in zip(members, leases, (1, 2), strict=True):
        tokens = steps * house.spec.step_tokens
        member.send(lease, member.payload(lease, 1e-3 * steps), steps=steps, tokens=tokens)
    recipe = read_recipe(ways(house)[0])
    assert sorted(each.share for each in recipe.updates) == pytest.approx([1 / 3, 2 / 3])
