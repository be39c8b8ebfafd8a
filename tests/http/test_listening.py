"""Where the coordinator and the gateway listen."""

from __future__ import annotations

import socket

from blocktrain.http.listening import listening


def test_an_answer_is_sent_at_once_and_waits_for_no_acknowledgement():
    with (
        listening("127.0.0.1", 0, "nobody") as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
