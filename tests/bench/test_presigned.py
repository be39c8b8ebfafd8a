"""What bench/presigned.py makes of its counts. It starts a coordinator twice, so no test runs it; that bytes of
workers go to the bucket is tested in tests/swarm/test_presigned.py."""

from __future__ import annotations

import pytest

COUNTS = {
    "cpu_ms": 40.0,
    "requests": 4.0,
    "bytes_to_workers": 1000.0,
    "bucket_requests": 16.0,
    "bytes_to_bucket": 9000.0,
    "bytes_from_bucket": 8000.0,
}


def document(direct_bytes):
    rows = [
        {"presigned": presigned, "bytes_from_workers": num_bytes, **COUNTS}
        for presigned, num_bytes in ((False, 99_000.0), (True, direct_bytes))
    ]
    return {"workers": 4, "rounds": 4, "load_average": 1.0, "per_update": rows}


@pytest.mark.parametrize("direct_bytes, reached", [(9_000.0, True), (9_001.0, False)])
def test_the_bytes_that_a_coordinator_carries_are_compared(bench, direct_bytes, reached):
    [verdict] = bench("presigned").verdicts(document(direct_bytes))
    assert verdict.reached == reached


def test_the_section_has_a_row_for_each_way(bench):
    page = bench("presigned").section(document(2000.0))
    assert "| through the coordinator | 40 | 4.0 | 99.0 | 1.0 | 16.0 | 9.0 | 8.0 |" in page
    assert "| by presigned URLs | 40 | 4.0 | 2.0 | 1.0 | 16.0 | 9.0 | 8.0 |" in page
