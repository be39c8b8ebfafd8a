"""The coordinator's rate limit as HTTP shows it."""

from __future__ import annotations

from blocktrain.http.rate_limit import Rate, RateLimiter
from blocktrain.swarm.coordinator.routes import DEFAULT_RATE
from blocktrain.wire.messages import Problem


def test_too_many_requests_get_429_and_the_seconds_to_wait(new_house):
    house = new_house(rate=Rate.per_second(0.5, burst_s=4))
    answers = [house.ask("GET", "/v1/run") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    problem = Problem.model_validate_json(answers[-1].content)
    assert (problem.code, problem.retry, answers[-1].headers["retry-after"]) == ("rate", True, "2")
    assert house.ask("GET", "/v1/run", "viewer").status_code == 200  # another token, from the same address
    house.now_s += 2
    assert house.ask("GET", "/v1/run").status_code == 200


def test_tokens_made_up_one_after_the_other_do_not_help(new_house):
    house = new_house(rate=Rate.per_second(0.5, burst_s=4))
    answers = [house.ask("GET", "/v1/run", role=f"made-up-{n}") for n in range(10)]
    assert [answer.status_code for answer in answers] == [401] * 8 + [429] * 2


def test_hundreds_of_workers_behind_one_address_may_all_ask_with_one_token():
    now_s = 0.0
    limiter = RateLimiter(DEFAULT_RATE, lambda: now_s)
    for _ in range(30):
        assert not any(limiter.wait_s(("one address", "one token")) for _ in range(500))
        now_s += 5.0  # as long as a worker waits at most
