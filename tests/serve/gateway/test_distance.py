"""A simulated distance: the same text, and every traversal waits as long as its messages would travel."""

from __future__ import annotations

import asyncio

from blocktrain.serve.gateway.distance import Distant
from blocktrain.serve.traversal import StageTiming, Traversal


class ThreeStages:
    info = None

    async def __call__(self, traversal: Traversal) -> Traversal:
        return traversal.with_(trace=(StageTiming("tcp://127.0.0.1:1", (0,), 0.0, 0.0),) * 3)


def test_a_traversal_of_three_stages_waits_for_four_messages():
    waited_s = []

    async def sleep(seconds: float) -> None:
        waited_s.append(seconds)

    asyncio.run(Distant(ThreeStages(), rtt_s=0.1, sleep=sleep)(Traversal("session", b"text")))
    assert waited_s == [0.2]


def test_a_simulated_distance_changes_the_time_and_not_the_text(client):
    plain, distant = (
        client.completions.create(
            model="tiny", prompt="The ", max_tokens=4, seed=3, extra_body={"simulated_rtt_ms": rtt_ms}
        )
        for rtt_ms in (0, 40)
    )
    assert distant.choices[0].text == plain.choices[0].text
    effort = distant.model_extra["blocktrain"]
    assert effort["seconds"] >= 0.04 * effort["traversals"]
