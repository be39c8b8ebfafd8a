"""The doctor's judgement, a row a case."""

from __future__ import annotations

import pytest

from blocktrain.cli.commands.swarm import doctor_checks as checks

GB = 10**9


@pytest.mark.parametrize(
    "check, level, words",
    [
        (checks.python_check((3, 11, 2)), "ok", "3.11.2"),
        (checks.python_check((3, 10, 9)), "fail", "install Python 3.11"),
        (checks.torch_check("2.13.0+cpu"), "ok", "2.13.0+cpu"),
        (checks.torch_check("2.12.1"), "warn", "pip install torch==2.13.0"),
        (checks.torch_check(None), "fail", "pip install torch==2.13.0"),
        (checks.memory_check(8 * GB), "ok", "8 GB free"),
        (checks.memory_check(GB // 2), "warn", "close other programs"),
        (checks.disk_check("~", 8 * GB, None), "ok", "8 GB free in ~"),
        (checks.disk_check("~", GB // 2, None), "warn", "make room"),
        (checks.disk_check("~", GB // 2, GB), "fail", "1 GB needed"),
        (checks.disk_check("~", None, GB), "fail", "choose another with --home"),
        (checks.clock_check(1000.0, 1003.0), "ok", "agrees"),
        (checks.clock_check(1000.0, 940.0), "warn", "60 s ahead of"),
        (checks.clock_check(1000.0, 1060.0), "warn", "60 s behind"),
        (checks.clock_check(1000.0, None), "warn", "no date"),
        (checks.dns_check("10.0.0.1", ()), "ok", "no lookup needed"),
        (checks.dns_check("there.test", ("10.0.0.1",)), "ok", "there.test is 10.0.0.1"),
        (checks.dns_check("there.test", (), "no such host"), "fail", "check the invite's host"),
        (checks.reach_check("there:80", 0.0123), "ok", "12.3 ms"),
        (checks.reach_check("there:80", None, "Connection refused"), "fail", "start the coordinator"),
        (checks.reach_check("there:80", None, "timed out"), "fail", "firewalls"),
        (checks.tls_check("there.test", True, True), "ok", "the invite's certificate"),
        (checks.tls_check("there.test", True, False), "ok", "this system trusts"),
        (checks.tls_check("127.0.0.1", False, False), "ok", "none needed"),
        (checks.tls_check("::1", False, False), "ok", "none needed"),
        (checks.tls_check("there.test", False, False), "warn", "--tls-self-signed"),
        (checks.role_check(True), "ok", "may train"),
        (checks.role_check(False), "warn", "blocktrain access-token add"),
        (checks.protocol_check(1, 1), "ok", "version 1"),
        (checks.protocol_check(1, 2), "fail", "install the coordinator's version"),
        (checks.rate_check("upload", 1e6, 10**6, 10.0), "ok", "1 MB/s"),
        (checks.rate_check("upload", 1e6, 10**7, 10.0), "warn", "increase swarm.deadline_ceiling_s"),
        (checks.blocks_check([(0, 1), (1,)], 2), "ok", "0+1, 1"),
        (checks.blocks_check([(0, 1)], 2), "warn", "0+1"),
        (checks.blocks_check([], 2), "fail", "smaller or fewer blocks"),
        (checks.speed_check([0, 1], 900.0), "ok", "fast enough"),
        (checks.speed_check([0, 0], 900.0), "warn", "within the 900 s of a round → increase swarm.deadline_ceiling_s"),
    ],
)
def test_a_fact_has_a_verdict_and_where_it_is_not_ok_a_remedy(check, level, words):
    assert check.level == level
    assert words in f"{check.found} → {check.remedy}"
    assert bool(check.remedy) == (level != "ok")
