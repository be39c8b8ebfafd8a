"""A ZeroMQ socket on the event loop: nothing is lost, nothing overtakes, and who waits is told. Real sockets on this
machine."""

from __future__ import annotations

import asyncio
import select
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq

from blocktrain.serve.chain.event_socket import IN_A_ROW, EventSocket

MANY = 3 * IN_A_ROW


@asynccontextmanager
async def opened(context: zmq.Context, kind: int) -> AsyncIterator[EventSocket]:
    plain = context.socket(kind)
    plain.set(zmq.IMMEDIATE, 1)
    socket = EventSocket(plain)
    try:
        yield socket
    finally:
        socket.close()


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[EventSocket, EventSocket, str]]:
    """One that is not connected yet, one that listens, and where."""
    with zmq.Context() as context:
        async with opened(context, zmq.DEALER) as caller, opened(context, zmq.DEALER) as listener:
            port = listener.plain.bind_to_random_port("tcp://127.0.0.1")
            yield caller, listener, f"tcp://127.0.0.1:{port}"


def numbers(taken: list[list[bytes]]) -> list[int]:
    return [int(frames[0]) for frames in taken]


def test_more_messages_than_are_taken_in_a_row_all_come_in_order(serve):
    async def main():
        async with pair() as (caller, listener, address):
            taken: list[list[bytes]] = []
            caller.connect(address)
            for number in range(MANY):
                await caller.send([b"%d" % number])
            listener.receive(taken.append)
            await serve.until(lambda: len(taken) == MANY)
            assert numbers(taken) == list(range(MANY))

    asyncio.run(main())


def test_nothing_overtakes_what_waits_for_the_other_side(serve):
    async def main():
        async with pair() as (caller, listener, address):
            taken: list[list[bytes]] = []
            listener.receive(taken.append)
            waiting = [asyncio.create_task(caller.send([b"%d" % number])) for number in range(2)]
            await asyncio.sleep(0)
            assert not caller.post([b"2"])
            caller.connect(address)
            await asyncio.gather(*waiting)
            assert caller.post([b"3"])
            await serve.until(lambda: len(taken) == 3)
            assert numbers(taken) == [0, 1, 3]

    asyncio.run(main())


def test_what_nobody_waits_for_any_more_is_not_sent(serve):
    async def main():
        async with pair() as (caller, listener, address):
            taken: list[list[bytes]] = []
            listener.receive(taken.append)
            given_up, waiting = (asyncio.create_task(caller.send([text])) for text in (b"1", b"2"))
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
            caller.connect(address)
            await waiting
            await serve.until(lambda: bool(taken))
            assert numbers(taken) == [2]

    asyncio.run(main())


def test_answers_that_come_while_it_sends_are_noticed(serve):
    async def main():
        async with pair() as (caller, listener, address):
            answers: list[list[bytes]] = []
            listener.receive(lambda frames: listener.post(frames))
            caller.receive(answers.append)
            caller.connect(address)
            for number in range(MANY):
                await caller.send([b"%d" % number])
            await serve.until(lambda: len(answers) == MANY)
            assert numbers(answers) == list(range(MANY))

    asyncio.run(main())


def test_a_socket_that_takes_no_messages_lets_the_event_loop_rest_when_one_comes(serve):
    async def main():
        async with pair() as (caller, listener, address):
            taken: list[list[bytes]] = []
            listener.receive(taken.append)
            caller.connect(address)
            await caller.send([b"1"])
            await serve.until(lambda: bool(taken))
            assert listener.post([b"2"])
            descriptor = caller.plain.get(zmq.FD)
            assert select.select([descriptor], [], [], serve.limit_s)[0]
            await serve.until(lambda: not select.select([descriptor], [], [], 0)[0])

    asyncio.run(main())


def test_a_message_that_cannot_be_taken_does_not_stop_the_next(serve):
    async def main():
        complaints, taken = [], []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context["exception"]))

        def take(frames: list[bytes]) -> None:
            if frames == [b"0"]:
                raise ValueError("0")
            taken.append(frames)

        async with pair() as (caller, listener, address):
            listener.receive(take)
            caller.connect(address)
            for number in range(3):
                await caller.send([b"%d" % number])
            await serve.until(lambda: len(taken) == 2)
            assert numbers(taken) == [1, 2]
            assert [str(error) for error in complaints] == ["0"]

    asyncio.run(main())


def test_who_waits_is_told_when_the_socket_closes():
    async def main():
        async with pair() as (caller, _, _):
            waiting = asyncio.create_task(caller.send([b"1"]))
            await asyncio.sleep(0)
            caller.close()
            with pytest.raises(zmq.ZMQError):
                await waiting

    asyncio.run(main())
