"""The costs of a swarm at their quick size: real processes, a few of everything."""

import asyncio
import json

import pytest

from blocktrain.spec import preset

pytestmark = pytest.mark.timeout(600)  # it starts processes that import torch, on a machine that may be busy


@pytest.fixture(scope="module")
def written(bench, tmp_path_factory, small_text):
    """One quick run of the whole script."""
    out = tmp_path_factory.mktemp("swarm")
    bench("swarm").main(["--quick", "--corpus", str(small_text), "--out", str(out)])
    return out


@pytest.fixture(scope="module")
def document(written):
    return json.loads((written / "swarm.json").read_text())


def test_the_result_says_what_was_run_on_which_machine(document, written):
    assert document["spec"]["name"] == "tiny"
    assert {"cores", "torch", "threads", "platform"} <= document["machine"].keys()
    assert document["load_average"].keys() == {"share", "merging", "bytes", "memory", "load"}
    assert (written / "swarm.html").is_file()


def test_a_round_of_a_worker_is_accounted_for_to_the_last_second(document):
    (row,) = document["share"]
    for cost in row["rounds"] + row["first_rounds"]:
        assert sum(cost["seconds"].values()) == pytest.approx(cost["wall_s"])
        assert 0 < cost["seconds"]["computing"] < cost["wall_s"]
    assert sum(row["spent"].values()) == pytest.approx(1)
    assert 0 < row["cpu_share"] < 1


def test_the_sockets_carry_the_update_and_little_more(document):
    (row,), (int8,) = document["share"], [row for row in document["bytes"]["up"] if row["codec"] == "int8"]
    carried_bytes = row["sent_bytes_per_parameter"] * row["parameters"]
    assert int8["num_bytes"] < carried_bytes < int8["num_bytes"] + 10_000  # HTTP's own


def test_smaller_codecs_take_fewer_bytes_and_leave_out_more(document):
    for way, codecs in (("up", ["fp32", "fp16", "int8", "vector", "sparse"]), ("down", ["fp32", "int8", "int6"])):
        rows = document["bytes"][way]
        assert [row["codec"] for row in rows] == codecs
        assert sorted(rows, key=lambda row: -row["num_bytes"]) == rows
        assert rows[0]["lost"] == 0 <= min(row["lost"] for row in rows)


def test_merges_are_compared_with_copying_memory(document):
    merging = document["merging"]
    for row in merging["rows"]:
        for kind in ("merge", "mean"):
            of_bandwidth = row[f"{kind}_bytes_per_s"] / merging["bandwidth_bytes_per_s"]
            assert row[f"{kind}_of_bandwidth"] == pytest.approx(of_bandwidth)
        assert row["merge_bytes_per_s"] > 0
        assert sum(row["spent"].values()) == pytest.approx(1)


def test_every_update_of_a_measured_round_was_merged(document):
    assert [(row["replicas"], row["merged"]) for row in document["memory"]["rows"]] == [(2, 2)]


def test_clients_are_answered_beside_a_bare_route(document):
    rows = {row["work"]: row for row in document["load"]["rows"]}
    assert rows.keys() == {"bare", "health", "leases", "updates"}
    assert rows["bare"]["of_bare"] == 1
    assert rows["updates"]["done"] == document["load"]["clients"]
    assert all(0 < row["p50_ms"] <= row["p99_ms"] for row in rows.values())


def test_goals_say_whether_they_are_reached(bench):
    verdicts = bench("swarm").verdicts({"share": [{"name": "x", "share": 0.94}, {"name": "y", "share": 0.95}]})
    assert [verdict.reached for verdict in verdicts] == [False, True]


def test_the_section_has_every_question_and_its_goals(bench, document):
    section = bench("swarm").section(document)
    assert section.count("\n| --- |") == 5
    for verdict in bench("swarm").verdicts(document):
        assert f"- goal: {verdict.what} {verdict.goal}: {verdict.answer} ({verdict.ours})" in section


def test_a_stopwatch_counts_a_second_once(bench):
    now_s = iter(range(10))
    watch = bench("swarms.processes").Stopwatch(lambda: next(now_s))
    inner = watch.timed(lambda: None, "inner")
    watch.timed(inner, "outer")()
    assert watch.seconds == {"inner": 1, "outer": 2}


def test_watched_calls_are_left_as_they_were(bench):
    processes = bench("swarms.processes")
    watch, before = processes.Stopwatch(), processes.Member.request
    with processes.watched(watch, (processes.Member, "request", "asking")):
        processes.Member(preset("tiny"), "run").request()
    assert processes.Member.request is before
    assert watch.seconds.keys() == {"asking"}


def test_a_refused_request_ends_a_load(bench):
    """What was not answered well is not counted as an answer."""

    async def refuse(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\nno!\n")
        writer.close()
        await writer.wait_closed()

    async def ask():
        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        connection = bench("swarms.load").Connection(bench("swarms.load").Invite(host, port, "a-token"))
        await connection.reopen()
        try:
            await connection.ask("GET", "/healthz")
        finally:
            await connection.close()
            server.close()
            await server.wait_closed()

    with pytest.raises(RuntimeError, match=r"GET /healthz: HTTP/1\.1 404 Not Found no!"):
        asyncio.run(ask())
