"""The serving experiment at its quick size: real stages, relays and a gateway; and the relay by itself."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

WAYS = ["autoregressive", "speculative", "sweep", "sweep-few", "window"]
pytestmark = pytest.mark.timeout(300)  # it starts processes that import torch


@pytest.fixture(scope="module")
def folder(bench, tmp_path_factory, small_text):
    out = tmp_path_factory.mktemp("serve")
    bench("serve").main(["--quick", "--corpus", str(small_text), "--out", str(out), "--work", str(out / "work")])
    return out


@pytest.fixture(scope="module")
def document(folder):
    return json.loads((folder / "serve.json").read_text())


def test_every_way_is_measured_at_every_distance(document):
    points = document["summary"]["points"]
    assert [(point["rtt_ms"], point["way"]) for point in points] == [(20, way) for way in WAYS]
    assert all(point["bytes_per_second"] > 0 and point["wire_bytes_per_byte"] > 0 for point in points)


def test_no_output_is_faster_than_its_traversals_allow(document):
    """Three one-way trips each: gateway, two stages, gateway."""
    for output in document["outputs"]:
        assert output["seconds"] >= output["traversals"] * 3 * output["rtt_ms"] / 2000
        assert output["first_byte_seconds"] <= output["seconds"]


def test_a_sweep_takes_at_most_two_traversals_and_the_other_one_a_byte(document):
    traversals = {output["way"]: (output["traversals"], output["output_bytes"]) for output in document["outputs"]}
    assert traversals["sweep"] in [(1, 24), (2, 24)]  # one if all of it was exact
    assert traversals["autoregressive"] == (24, 24)


def test_the_stages_share_the_blocks(document):
    assert [about["shares"] for about in document["settings"]["blocks"].values()] == [[[0, 1], [2, 3]]] * 3


def test_the_section_holds_each_way_against_the_baseline(bench, document):
    """Here the baseline is what autoregressive decoding took, at the distance of the goal."""
    outputs = [output | {"rtt_ms": 100} for output in document["outputs"]]
    baseline = [output | {"way": "baseline"} for output in outputs if output["way"] == "autoregressive"]
    changed = document | {"outputs": [*baseline, *outputs]}
    verdicts = {verdict.what: verdict for verdict in bench("serve").verdicts(changed)}
    speculative = verdicts["blocks, speculative at 100 ms, times the baseline's bytes/s"]
    lines = {line["way"]: line for line in bench("serving.report").lines_of(changed)}
    assert speculative.reached == (lines["speculative"]["speedup"] >= 30)
    assert f"- goal: {speculative.what} ≥ 30: {speculative.answer} (" in bench("serve").section(changed)


def test_the_results_say_what_was_drafted_compared_and_added(document):
    assert document["greedy_bytes_compared"] > 0
    assert len(document["gateway"]["gateway_seconds"]) == len(document["gateway"]["in_process_seconds"]) > 0
    points = {point["way"]: point for point in document["summary"]["points"]}
    assert 0 <= points["speculative"]["acceptance"] <= 1
    assert points["sweep"]["traversals_per_output"] == 1 or 1 <= points["sweep"]["effective_candidates"] <= 8


def test_results_name_the_corpus_and_not_its_place(folder, small_text):
    written = (folder / "serve.json").read_text()
    assert '"corpus": "text.txt"' in written
    assert str(folder) not in written
    assert str(small_text.parent) not in written
    assert (folder / "serve.html").is_file()


def test_a_relay_delays_each_direction_and_limits_the_rate(bench):
    """100 kB at 8 Mbit/s are 0.1 s on the line, each way, and each way is half of 0.2 s long."""
    relays, data = bench("serving.relay"), bytes(100_000)

    async def main() -> tuple[float, int]:
        distance = relays.Distance(rate_bits=8e6, rtt_s=0.2)
        echo = await asyncio.start_server(_echo, "127.0.0.1", 0)
        server = await relays.relay(("127.0.0.1", 0), echo.sockets[0].getsockname(), distance)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        began_s = time.monotonic()
        writer.write(data)
        assert await reader.readexactly(len(data)) == data
        took_s = time.monotonic() - began_s
        writer.close()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})  # both sides hear of it
        server.close()
        echo.close()
        return took_s, distance.num_bytes

    took_s, num_bytes = asyncio.run(main())
    assert took_s >= 0.3
    assert num_bytes == 2 * len(data)


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(2**16):
        writer.write(data)
    writer.close()
