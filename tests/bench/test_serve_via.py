"""What bench/serve_via.py makes of its measurements. It starts nine processes, so no test runs it; what it starts is
tested in tests/e2e/test_serve_process.py."""

from __future__ import annotations

import pytest


def document(direct_s, via_s):
    rows = {
        setup: {
            "autoregressive": {"seconds_per_traversal": took_s, "bytes_per_second": 1 / took_s},
            "speculative": {"seconds_per_traversal": took_s, "bytes_per_second": 20 / took_s},
            "trips": trips,
            "load": 1.0,
        }
        for setup, took_s, trips in (("direct", direct_s, 4), ("via", via_s, 6))
    }
    return {"settings": {"stages": 3, "rtt_ms": 100, "tokens": 24, "repeats": 3}, "rows": rows}


def test_a_traversal_behind_a_relay_makes_two_trips_for_each_stage(bench):
    assert [bench("serve_via").trips(setup, 3) for setup in ("direct", "via")] == [4, 6]


@pytest.mark.parametrize("direct_s, via_s, reached", [(0.21, 0.32, [True, True]), (0.21, 0.40, [True, False])])
def test_each_chain_is_held_against_its_own_trips(bench, direct_s, via_s, reached):
    assert [verdict.reached for verdict in bench("serve_via").verdicts(document(direct_s, via_s))] == reached


def test_the_section_says_how_much_longer_the_relay_takes(bench):
    assert "takes 1.50 times as long through the relay" in bench("serve_via").section(document(0.2, 0.3))
