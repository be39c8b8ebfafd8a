"""Several coordinators: the counts and rates of a quick run, and the page that they make."""

from __future__ import annotations

import json

import pytest

RATE = {"server_cpu_ms": 5.0, "per_s": 100.0, "p99_ms": 20.0}
COUNTS = {"requests": 80, "statements": 600, "writing_statements": 120, "rows": 60, "bucket_bytes_in": 4000}


@pytest.fixture
def document() -> dict:
    counts = [
        {"coordinators": n, "clients": 20, "work": "updates", "merged_updates": 20, **COUNTS}
        | {"bucket_requests": {"PUT": 40, "GET": 20}}
        for n in (1, 2)
    ]
    rates = [{"coordinators": n, "clients": 200, "merged_updates": 200, "rows": [RATE, RATE]} for n in (1, 2)]
    return {"busy": False, "counts": counts, "rates": rates}


def test_everything_is_shown_per_update_and_the_goals_are_named(bench, document):
    page = bench("scale_out").section(document)
    assert "| 1 | 20 | in one request | 4.0 | 30.0 | 6.0 | 3.0 | 3.0 | 200 |" in page
    assert "| 2 | 200 | 200 | 5.0 | 5.0 | 100 | 100 | 20 |" in page
    assert "exactly once = 0: reached" in page


def test_on_a_busy_machine_no_rate_is_shown(bench, document):
    page = bench("scale_out").section({**document, "busy": True})
    assert "leases per s" not in page
    assert "Other work ran" in page


def test_an_update_that_is_not_merged_is_a_goal_missed(bench, document):
    document["rates"][0]["merged_updates"] = 199
    assert [verdict.reached for verdict in bench("scale_out").verdicts(document)] == [False, True]


def test_what_several_servers_did_at_once_is_added_up(bench):
    seen = [
        {"latencies_s": [1.0], "seconds": 2.0, "server_cpu_s": 1.0},
        {"latencies_s": [3.0], "seconds": 3.0, "server_cpu_s": 2.0},
    ]
    assert bench("scale_out").together(seen) == {
        "latencies_s": [1.0, 3.0], "seconds": 3.0, "server_cpu_s": 3.0, "payload_bytes": None,
    }  # fmt: skip


def test_the_proxy_counts_requests_and_bytes(bench, tmp_path):
    import http.server
    import threading
    import urllib.request

    class Quiet(http.server.SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *given: Quiet(*given, directory=tmp_path))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    (tmp_path / "file").write_bytes(b"x" * 1000)
    proxy = bench("swarms.counting_proxy").CountingProxy(server.server_port)
    with urllib.request.urlopen(f"http://127.0.0.1:{proxy.port}/file") as answer:
        assert len(answer.read()) == 1000
    found = proxy.read()
    assert found.requests == {"GET": 1}
    assert found.bytes_out > 1000
    proxy.close()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.timeout(600)
def test_a_quick_run_merges_every_update_once(bench, tmp_path):
    bench("scale_out").main(["--quick", "--out", str(tmp_path)])
    document = json.loads((tmp_path / "scale_out.json").read_text())
    cases = [*document["counts"], *document["rates"]]
    assert [case["merged_updates"] for case in cases] == [case["clients"] for case in cases]
    for each in document["counts"]:
        assert 0 < each["writing_statements"] <= each["statements"]
        assert each["rows_of_tables"]["updates"] == each["clients"]
        assert each["bucket_requests"]["PUT"] >= each["clients"]
