"""A bare FastAPI route, to hold a coordinator's against: the message of a lease request in, a message out, and nothing
between. Imports next to nothing, so that it starts at once.

    python bench/swarms/bare.py     prints its port; load.py starts it"""

from __future__ import annotations

from fastapi import FastAPI

from blocktrain.http.server import listening, serve
from blocktrain.wire.messages import LeaseRequest, Wait

BARE_PATH = "/bare"


def serve_bare() -> None:
    app = FastAPI()

    @app.post(BARE_PATH)
    def bare(request: LeaseRequest) -> Wait:
        return Wait(seconds=1.0, reason="nothing to do")

    with listening("127.0.0.1", 0, "nobody") as listener:  # as the coordinator listens
        print(listener.getsockname()[1], flush=True)
        serve(app, listener)


if __name__ == "__main__":
    serve_bare()
