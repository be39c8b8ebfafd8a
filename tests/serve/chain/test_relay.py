"""Stages behind routers: reached through connections that they open themselves, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import zmq

from blocktrain.errors import ConfigError, StageUnreachable
from blocktrain.serve.chain.pipeline import Pipeline
from blocktrain.serve.chain.relay import Dialer, Relay, relayed_address
from blocktrain.serve.chain.sockets import ChainKey, Network
from blocktrain.serve.chain.stage import Stage, StageSettings
from blocktrain.serve.traversal import Traversal

ANY_PORT = "tcp://127.0.0.1:*"
NAMES, SPANS = ("a", "b", "c"), ((0, 1), (2,), (3,))
ADDRESSES = [relayed_address(name) for name in NAMES]
TEXT = Traversal("s", b"The quick brown fox", read=3)
KEY = ChainKey(*zmq.curve_keypair())


@asynccontextmanager
async def dialling(relay: str, name: str, target: str, key: ChainKey | None, said: list[str]) -> AsyncIterator[None]:
    task = asyncio.create_task(Dialer(f"tcp://{relay}", name, target, key, said.append).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def hidden_stages(serve, relay: str, said: list[str], names: Sequence[str] = NAMES) -> AsyncIterator[None]:
    """Nobody knows where they listen: they are reached through the relay alone."""
    settings = StageSettings(listen=ANY_PORT, pass_s=serve.limit_s, relay=relay)
    async with asyncio.TaskGroup() as group:
        ends = asyncio.Event()
        for name, span in zip(names, SPANS, strict=False):
            group.create_task(
                _hidden(Stage(serve.segment_of("stacked", span), settings, key=KEY), relay, name, said, ends)
            )
        yield
        ends.set()


async def _hidden(stage: Stage, relay: str, name: str, said: list[str], ends: asyncio.Event) -> None:
    async with stage, dialling(relay, name, stage.address, KEY, said):
        await ends.wait()


def test_a_chain_behind_a_relay_computes_what_the_model_in_one_process_computes(serve):
    async def main():
        async with (
            Relay(ANY_PORT, KEY) as relay,
            hidden_stages(serve, relay.address, []),
            Pipeline(ADDRESSES, replace(serve.quick, relay=relay.address), key=KEY) as pipeline,
        ):
            serve.assert_right(await pipeline(TEXT), TEXT)

    asyncio.run(main())


def test_when_the_relay_dies_stages_say_so_and_a_new_one_is_used(serve):
    async def main():
        said: list[str] = []
        async with Relay(ANY_PORT, KEY) as first:
            address = first.address
            stages = hidden_stages(serve, address, said)
            await stages.__aenter__()
            async with Pipeline(ADDRESSES, replace(serve.quick, relay=address), key=KEY) as pipeline:
                serve.assert_right(await pipeline(TEXT), TEXT)
        try:
            await serve.until(lambda: sum("does not answer" in line for line in said) == len(NAMES))
            async with (
                Relay(f"tcp://{address}", KEY) as second,
                Pipeline(ADDRESSES, replace(serve.quick, relay=second.address), key=KEY) as pipeline,
            ):
                serve.assert_right(await pipeline(TEXT.with_(session="t")), TEXT)
                assert sum("answers again" in line for line in said) == len(NAMES)
        finally:
            await stages.__aexit__(None, None, None)

    asyncio.run(main())


@pytest.mark.parametrize("relay_key, stage_key", [(KEY, None), (None, KEY), (KEY, ChainKey(*zmq.curve_keypair()))])
def test_a_stage_with_another_key_is_refused_and_says_so(serve, relay_key, stage_key):
    async def main():
        said: list[str] = []
        async with (
            Relay(ANY_PORT, relay_key) as relay,
            dialling(relay.address, "a", "tcp://127.0.0.1:1", stage_key, said),
        ):
            await serve.until(lambda: bool(said))
        assert "refuses our key: give the stage and the gateway the same --keys file" in said[0]

    asyncio.run(main())


def test_a_name_belongs_to_one_stage_until_that_one_is_gone(serve):
    async def main():
        first, second = [], []
        async with Relay(ANY_PORT, KEY) as relay:
            async with dialling(relay.address, "a", "tcp://127.0.0.1:1", KEY, first):
                await serve.until(lambda: "a" in relay._stages)
                later = dialling(relay.address, "a", "tcp://127.0.0.1:1", KEY, second)
                await later.__aenter__()
                await serve.until(lambda: bool(second))
            assert 'has another stage "a"' in second[0]
            await serve.until(lambda: "answers again" in second[-1])
            await later.__aexit__(None, None, None)
        assert first == []

    asyncio.run(main())


SOCKS_HELLO = b"\x05\x01\x00"


@pytest.mark.parametrize(
    "sent, answer",
    [
        (SOCKS_HELLO + b"\x05\x01\x00\x03\x05a.via\x00\x01", b"\x05\x04"),  # no stage of this name is there
        (SOCKS_HELLO + b"\x05\x01\x00\x01\x7f\x00\x00\x01\x00\x16", b"\x05\x08"),  # the relay reaches nothing else
        (SOCKS_HELLO + b"\x05\x02\x00\x03\x05a.via\x00\x01", b"\x05\x07"),
        (b"GET / HTTP/1.1\r\n\r\n", b""),
        (b"", b""),
    ],
)
def test_strangers_reach_nothing_through_the_relay(sent, answer):
    async def main():
        async with Relay(ANY_PORT, KEY) as relay:
            reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
            writer.write(sent)
            writer.write_eof()
            said = await reader.read()
            writer.close()
        assert said.removeprefix(b"\x05\x00")[:2] == answer

    asyncio.run(main())


def test_without_a_relay_a_hidden_stage_is_refused_with_the_remedy():
    async def main():
        network = Network(KEY)
        try:
            with pytest.raises(StageUnreachable, match="give the gateway --relay, and every stage of its chain --via"):
                network.connect(ADDRESSES[0])
        finally:
            network.close()

    asyncio.run(main())


def test_a_link_can_be_closed_after_its_relay_has_hung_up(serve):
    """With ZeroMQ's own SOCKS5 client the process ended here."""

    async def main():
        calls = []

        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            calls.append(await reader.read(1))
            writer.close()

        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        relay = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        network = Network(KEY, relay)
        socket = network.connect(ADDRESSES[0])
        socket.connect(network.tunnel(socket).address)
        await serve.until(lambda: len(calls) > 1)
        network.close()
        server.close()

    asyncio.run(main())


@pytest.mark.parametrize("name", ["", "A", "a.b", "a" * 41])
def test_a_wrong_name_is_refused(name):
    with pytest.raises(ConfigError, match="is not a valid stage name"):
        relayed_address(name)
