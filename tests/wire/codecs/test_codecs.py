"""How many bytes a round's update takes, and the bytes themselves as docs/protocol.md describes them."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from typing import get_args

import numpy as np
import pytest

from blocktrain.model.block import block_shapes
from blocktrain.spec import SwarmSpec, preset
from blocktrain.wire.codecs.integers import Int6, Int8
from blocktrain.wire.codecs.sparse import Sparse
from blocktrain.wire.codecs.table import CODECS, make_codec, update_codec
from blocktrain.wire.codecs.vector import LEFT_BY_STAGE, MAX_SPENT, ROW, Vector
from blocktrain.wire.safetensors import decode
from blocktrain.wire.updates import encode_update, max_update_bytes, read_update

WIKITEXT = preset("wikitext")
SHAPES = {"up": (40, 30), "gain": (7,)}


def codecs_of_all_rounds(spec, phase):
    swarm = spec.swarm
    return [update_codec(swarm, phase.steps, s + swarm.round_steps) for s in range(0, phase.steps, swarm.round_steps)]


@pytest.mark.parametrize("codec", ["sparse", "vector"])
@pytest.mark.parametrize("round_steps", [5, 10, 50])
@pytest.mark.parametrize("ratio", [50.0, 100.0, 200.0])
def test_the_updates_of_a_whole_run_are_that_much_smaller_than_fp32(ratio, round_steps, codec):
    changes = {"swarm.update": codec, "swarm.update_ratio": ratio, "swarm.round_steps": round_steps}
    spec, plain, sent = WIKITEXT.with_(**changes), 0, 0
    for phase in spec.phases:
        shapes = {f"{b}.{name}": shape for b in phase.blocks for name, shape in block_shapes(spec, b).items()}
        zeros = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        sizes = {x: len(encode_update(zeros, zeros, x)) for x in set(codecs_of_all_rounds(spec, phase))}
        rounds = codecs_of_all_rounds(spec, phase)
        plain += len(rounds) * 4 * sum(map(math.prod, shapes.values()))
        sent += sum(sizes[x] for x in rounds)
    header = 0.02 if (codec, ratio) == ("vector", 200.0) else 0.0  # it counts in the smallest
    assert (1 - header) * ratio <= plain / sent < 1.12 * ratio


@pytest.mark.parametrize("codec, setting", [("sparse", "kept"), ("vector", "spent")])
def test_the_last_rounds_keep_more_and_no_round_more_than_the_run_takes(codec, setting):
    spec = WIKITEXT.with_(**{"swarm.update": codec, "swarm.round_steps": 20})
    phase = spec.phases[0]
    kept = [getattr(one, setting) for one in codecs_of_all_rounds(spec, phase)]
    usual, more = set(kept[:-3]), set(kept[-3:])
    assert len(kept) == 24
    assert len(usual) == len(more) == 1
    assert more.pop() > 4 * usual.pop()
    widest = update_codec(spec.swarm, phase.steps, phase.steps)
    assert all(widest.covers(one) for one in codecs_of_all_rounds(spec, phase))


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_other_codecs_are_the_same_in_every_round(codec):
    spec = WIKITEXT.with_(**{"swarm.update": codec})
    assert set(codecs_of_all_rounds(spec, spec.phases[0])) == {make_codec(codec)}


def test_a_spec_allows_exactly_the_codecs_of_the_table():
    allowed = [get_args(SwarmSpec.model_fields[key].annotation) for key in ("update", "download")]
    assert {name for names in allowed for name in names} == CODECS.keys()


def test_no_round_spends_more_than_the_codec_can():
    spec = WIKITEXT.with_(**{"swarm.update": "vector", "swarm.update_ratio": 20.0, "swarm.round_steps": 1})
    steps = spec.phases[0].steps
    assert update_codec(spec.swarm, steps, steps) == Vector(MAX_SPENT)


def test_small_rows_beside_large_ones_are_coded_as_precisely_as_alone():
    rows = np.random.default_rng(0).standard_normal((32, ROW)).astype(np.float32)
    rows[::2] *= 100
    codec, shapes = Vector(MAX_SPENT), {"rows": rows.shape}
    data = encode_update({"rows": rows}, {"rows": np.zeros_like(rows)}, codec)
    left = rows - read_update(data, shapes).change("rows")
    stages = decode(data)[0]["counts"][1::2]
    share = np.square(left[1::2]).sum(axis=1) / np.square(rows[1::2]).sum(axis=1)
    assert share.mean() == pytest.approx((LEFT_BY_STAGE**stages).mean(), rel=0.05)


def test_more_values_never_take_fewer_bytes():
    sizes = [max_update_bytes(Sparse(kept=kept), SHAPES) for kept in range(8, 2049, 8)]
    assert sizes == sorted(sizes)


# A reader of its own, from docs/protocol.md alone


def file_of(data):
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    metadata = header.pop("__metadata__")
    return metadata, {name: body[slice(*entry["data_offsets"])] for name, entry in header.items()}


def bfloat16s(data):
    return [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)]


def numbers(row, bits, count):
    groups = [int.from_bytes(row[i : i + bits], "little") for i in range(0, len(row), bits)]
    return [groups[i // 8] >> (i % 8 * bits) & (2**bits - 1) for i in range(count)] if bits else [0] * count


def rows(part, count):
    length = len(part) // count
    return [part[i * length : (i + 1) * length] for i in range(count)]


def sparse_by_the_page(data, n):
    metadata, parts = file_of(data)
    chunk, kept, bits = (int(metadata[key]) for key in ("chunk", "kept", "value_bits"))
    count, L = -(-n // chunk), 2 ** (bits - 1)
    l = min(8, int(math.log2(chunk // kept)))  # noqa: E741
    values = [0.0] * (count * chunk)
    tables = zip(*(rows(parts[name], count) for name in ("low", "high", "codes", "levels")), strict=True)
    for r, (low, high, codes, levels) in enumerate(tables):
        ones = [j for j in range(8 * len(high)) if high[j // 8] >> (j % 8) & 1]
        places = [(j - i) * 2**l + x for i, (j, x) in enumerate(zip(ones, numbers(low, l, kept), strict=True))]
        for place, c in zip(places, numbers(codes, bits, kept), strict=True):
            values[r * chunk + place] = bfloat16s(levels)[c % L] * (-1 if c >= L else 1)
    return values[:n]


def turned_by_the_page(row):
    for h in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        low = np.array([i for i in range(1024) if not i & h])
        sums, differences = row[low] + row[low + h], row[low] - row[low + h]
        row = row.copy()
        row[low], row[low + h] = sums, differences
    return row / np.float32(32)


def bits_of(data):
    return [data[i // 8] >> (i % 8) & 1 for i in range(8 * len(data))]


def word_by_the_page(u, v, signs):
    terms = [[], [(0, 3), (1, 2)], [(0, 2), (0, 3), (1, 3)], [(0, 2), (1, 2), (1, 3), (2, 3)]][u % 4]
    odd = [
        sum(1 for a, b in terms if c >> a & c >> b & 1) + (v & c).bit_count() + (u >> 2 & c >> 3) + (u >> 3) + signs[c]
        for c in range(16)
    ]
    return [(-1) ** x for x in odd]


def vector_by_the_page(data, n):
    _, parts = file_of(data)
    gains, values, s = bfloat16s(parts["gains"]), [], 0
    bits = b"".join(hashlib.sha256(parts["book"] + f"flip {part}".encode()).digest() for part in range(4))
    flips = 1 - 2 * np.array(bits_of(bits), np.float32)
    for count in parts["counts"]:
        row = np.zeros(1024, np.float32)
        for t in range(count):
            signs = bits_of(hashlib.sha256(parts["book"] + f"stage {t}".encode()).digest()[:2])
            patterns = numbers(parts["patterns"][12 * s : 12 * s + 12], 3, 32)
            blocks = [[]] * 64
            for p, (w, v) in enumerate(zip(parts["words"][32 * s : 32 * s + 32], patterns, strict=True)):
                blocks[p] = word_by_the_page(w % 16, v, signs)
                blocks[32 + (p + t) % 32] = word_by_the_page(w // 16, v, signs)
            row += turned_by_the_page(np.array(blocks, np.float32).reshape(1024)) * flips * np.float32(gains[s])
            s += 1
        values += row.tolist()
    return values[:n]


def steps_by_the_page(data, n):
    metadata, parts = file_of(data)
    bits, count = int(metadata["codec"].removeprefix("int")), -(-n // 256)
    return [
        (code - (2 ** (bits - 1) - 1)) * scale
        for row, scale in zip(rows(parts["codes"], count), bfloat16s(parts["scale"]), strict=True)
        for code in numbers(row, bits, 256)
    ][:n]


@pytest.mark.parametrize(
    "codec, reader",
    [
        (Sparse(256, 24), sparse_by_the_page),
        (Sparse(500, 33, 3), sparse_by_the_page),
        (Vector(spent=3500), vector_by_the_page),
        (Int8(), steps_by_the_page),
        (Int6(), steps_by_the_page),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_page_on_the_protocol_says_enough_to_read_an_update(codec, reader):
    before = {name: np.random.default_rng(1).standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    data = encode_update(before, {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}, codec)
    update = read_update(data, SHAPES)
    ours = np.concatenate([update.delta(name).reshape(-1) for name in ("up", "gain")]).astype(np.float32)
    assert np.array_equal(np.array(reader(data, 1207), np.float32), ours)
