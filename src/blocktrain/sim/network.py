"""The simulated network between workers and coordinators: latency, loss, duplicates, reordering, partitions and broken
connections. It replaces the sockets below httpx and nothing else: requests and answers are the real ones.
Next: service.py, which answers; world.py, which changes the weather."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import httpx

from blocktrain.sim.tasks import Scheduler, Task, TimedOut

TIMEOUT_S = 5.0  # for an answer; real workers are more patient, and simulations would last longer
REFUSED_S = 0.01  # until a connection to a machine without a coordinator is refused


@dataclass(frozen=True)
class Weather:
    """What happens to messages now. Shares are probabilities for each message."""

    latency_s: float = 0.02
    jitter: float = 0.5  # of the latency
    lost: float = 0.0  # requests, and as many answers
    twice: float = 0.0  # requests that arrive a second time, later
    broken: float = 0.0  # bodies that end early
    swapped_s: float = 0.0  # by up to so much a message is late, so that later ones overtake it


@dataclass
class Delivery:
    """One arrival of a request at a coordinator."""

    request: httpx.Request
    body: bytes
    is_whole: bool
    answer: Callable[[httpx.Response | httpx.TransportError], None]


Handler = Callable[[Delivery], None]


@dataclass
class SimNetwork:
    """`route` finds the machine that a worker's request goes to."""

    scheduler: Scheduler
    seed: int
    route: Callable[[str], Handler | None]
    weather: Weather = field(default_factory=Weather)
    cut: set[str] = field(default_factory=set)  # workers that reach nobody
    _sent: dict[str, int] = field(default_factory=dict)

    def change(self, **changes: float) -> None:
        self.weather = replace(self.weather, **changes)

    def randomness(self, sender: str) -> random.Random:
        """Of the sender's next message: what happens to others' messages does not change it."""
        number = self._sent[sender] = self._sent.get(sender, 0) + 1
        return random.Random(f"{self.seed}/{sender}/{number}")

    def delay_s(self, draw: random.Random) -> float:
        now = self.weather
        return now.latency_s * (1 + now.jitter * draw.random()) + now.swapped_s * draw.random()

    def send(self, sender: str, request: httpx.Request, body: bytes) -> httpx.Response:
        """Called by a worker's task, which waits for the answer."""
        scheduler, draw, now = self.scheduler, self.randomness(sender), self.weather
        task = scheduler.current
        assert task is not None
        if sender not in self.cut and draw.random() >= now.lost:
            cut_off = draw.random() < now.broken
            arrives = body[: draw.randrange(len(body))] if cut_off and body else body
            answer = self._answering(sender, task, task.turn + 1, draw.random() < now.lost, draw)
            delivery = Delivery(request, arrives, len(arrives) == len(body), answer)
            scheduler.after(self.delay_s(draw), lambda: self._arrive(sender, delivery))
            if draw.random() < now.twice:
                again = replace(delivery, answer=lambda _: None)
                scheduler.after(1.0 + 10 * self.delay_s(draw), lambda: self._arrive(sender, again))
        came = scheduler.wait(TIMEOUT_S)
        if isinstance(came, TimedOut):
            raise httpx.ReadTimeout("no answer in time", request=request)
        if isinstance(came, httpx.TransportError):
            raise came
        assert isinstance(came, httpx.Response)
        if draw.random() < now.broken and len(came.content) > 1:
            return _ending_early(came, draw.randrange(1, len(came.content)))
        return came

    def _arrive(self, sender: str, delivery: Delivery) -> None:
        handler = None if sender in self.cut else self.route(sender)
        if not delivery.is_whole and delivery.request.method != "PUT":
            delivery.answer(httpx.WriteError("the connection was reset"))
        elif handler is None:
            delivery.answer(httpx.ConnectError("connection refused"))
        else:
            handler(delivery)

    def _answering(
        self, sender: str, task: Task, turn: int, is_lost: bool, draw: random.Random
    ) -> Callable[[httpx.Response | httpx.TransportError], None]:
        def answer(reply: httpx.Response | httpx.TransportError) -> None:
            if not is_lost and sender not in self.cut:
                self.scheduler.wake(task, turn, reply, self.delay_s(draw))

        return answer


class SimTransport(httpx.BaseTransport):
    """What a worker's httpx client has in the place of sockets."""

    def __init__(self, network: SimNetwork, worker: str) -> None:
        self._network, self._worker = network, worker

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self._network.send(self._worker, request, request.read())


class _EarlyEnd(httpx.SyncByteStream):
    def __init__(self, data: bytes) -> None:
        self._data = data

    def __iter__(self) -> Iterator[bytes]:
        yield self._data
        raise httpx.RemoteProtocolError("the connection ended before the body did")


def _ending_early(response: httpx.Response, num_bytes: int) -> httpx.Response:
    return httpx.Response(
        response.status_code, headers=response.headers, stream=_EarlyEnd(response.content[:num_bytes])
    )
