"""The table of codecs, and how much a round's update may spend. The names that a spec allows are `swarm.update` and
`swarm.download` in settings.py; a test compares them with this table.
Next: base.py, what a codec is; wire/updates.py, which makes updates with one."""

from __future__ import annotations

from blocktrain.errors import ConfigError
from blocktrain.spec import SwarmSpec
from blocktrain.wire.codecs.base import Codec
from blocktrain.wire.codecs.floats import Float16, Float32
from blocktrain.wire.codecs.integers import Int4, Int6, Int8
from blocktrain.wire.codecs.packing import ceil_div
from blocktrain.wire.codecs.sparse import Sparse
from blocktrain.wire.codecs.vector import Vector

CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Float32, Float16, Int8, Int6, Int4, Sparse, Vector)}
LAST_FACTOR, MOST_LAST_ROUNDS = 4, 3
SPENT_SHARE = 0.97  # of the bytes that an update may have; the rest is for its header


def codec_type(name: str) -> type[Codec]:
    if name not in CODECS:
        raise ConfigError(f'codec = "{name}" is unknown: use one of {", ".join(CODECS)}')
    return CODECS[name]


def make_codec(name: str, **settings: int) -> Codec:
    return codec_type(name)(**settings)


def update_codec(swarm: SwarmSpec, phase_steps: int, steps_done: int) -> Codec:
    """The codec of an update that brings a phase of `phase_steps` steps to `steps_done`.

    `sparse` and `vector` spend what `swarm.update_ratio` allows evenly over the rounds, except in the last tenth of
    them (one to MOST_LAST_ROUNDS rounds). Those get LAST_FACTOR times as much, because what is still unsent at the end
    is lost."""
    num_rounds = ceil_div(phase_steps, swarm.round_steps)
    num_last = min(ceil_div(num_rounds, 10), MOST_LAST_ROUNDS)
    mean = (num_rounds + (LAST_FACTOR - 1) * num_last) / num_rounds
    is_last = ceil_div(steps_done, swarm.round_steps) > num_rounds - num_last
    bits_per_value = (LAST_FACTOR if is_last else 1) / mean * SPENT_SHARE * 32 / swarm.update_ratio
    return codec_type(swarm.update).for_budget(bits_per_value)
