"""Peers: a stage's connections to the stages after it. Next: stage.py sends through them; sockets.py opens them."""

from __future__ import annotations

from blocktrain.serve.chain.event_socket import EventSocket
from blocktrain.serve.chain.sockets import Network, zmq_errors

MAX_PEERS = 64


class Peers:
    """Connections are kept; above MAX_PEERS the least recently used one is closed."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._sockets: dict[str, EventSocket] = {}

    def to(self, address: str) -> EventSocket:
        """The connection to another stage."""
        peer = self._sockets.pop(address, None)
        if peer is None:
            peer = self._network.connect(address)
            tunnel = self._network.tunnel(peer)
            with zmq_errors(address):
                peer.connect(tunnel.address if tunnel else address)
            if len(self._sockets) >= MAX_PEERS:
                self._network.close_socket(self._sockets.pop(next(iter(self._sockets))))
        self._sockets[address] = peer
        return peer
