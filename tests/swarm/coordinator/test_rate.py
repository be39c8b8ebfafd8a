"""The coordinator's rate limit as HTTP shows it."""

from __future__ import annotations

from blocktrain.http.rate_limit import Rate
from blocktrain.wire.messages import Problem


def test_too_many_requests_get_429_and_the_seconds_to_wait(new_house):
    house = new_house(rate=Rate(per_s=0.5, burst_s=4))
    answers = [house.ask("GET", "/v1/run") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    problem = Problem.model_validate_json(answers[-1].content)
    assert (problem.code, problem.retry, answers[-1].headers["retry-after"]) == ("rate", True, "2")
    assert house.ask("GET", "/v1/run", "viewer").status_code == 200  # another token, from the same address
    house.now_s += 2
    assert house.ask("GET", "/v1/run").status_code == 200


def test_tokens_made_up_one_after_the_other_do_not_help(new_house):
    house = new_house(rate=Rate(per_s=0.5, burst_s=4))
    answers = [house.ask("GET", "/v1/run", role=f"made-up-{n}") for n in range(10)]
    assert [answer.status_code for answer in answers] == [401] * 8 + [429] * 2
