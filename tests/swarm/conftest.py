"""A real coordinator and its service in this process: a real ledger, real blobs, and a clock that tests move. Members
are workers that make updates without training."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fastapi import FastAPI
from pydantic import ValidationError
from sqlalchemy import select

from blocktrain.data.corpus import load_corpus
from blocktrain.http.rate_limit import Rate
from blocktrain.io.arrays import as_arrays
from blocktrain.model.block import build_block
from blocktrain.spec import RunSpec, Stacked, preset
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.coordinator import Coordinator
from blocktrain.swarm.coordinator.routes import build_service
from blocktrain.swarm.coordinator.setup import found_run
from blocktrain.swarm.ledger import tables as ledger_tables
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.signatures import sign
from blocktrain.wire.codecs.table import make_codec
from blocktrain.wire.messages import PROTOCOL_VERSION, UNSIGNED, Blob, LeaseRequest, TrainLease, UpdateNotice
from blocktrain.wire.safetensors import Tensors, decode
from blocktrain.wire.updates import encode_update

TOKENS = {role: f"the-token-of-the-{role}" for role in ("admin", "worker", "viewer")}
RECEIPT_KEY = Ed25519PrivateKey.generate()


class House:
    """A run in a folder, its coordinator, and its HTTP service."""

    def __init__(self, spec: RunSpec, folder: Path, rate: Rate | None = None) -> None:
        self.rate = rate
        self.spec, self.folder, self.now_s = spec, folder, 1000.0
        self.ledger, self.blobs = Ledger(folder / "ledger.db"), Blobs(folder / "blobs")
        found_run(spec, load_corpus(spec.corpus, spec.model.context), self.ledger, self.blobs, now_s=0.0)
        if not self.ledger.access_tokens():
            for role, token in TOKENS.items():
                self.ledger.add_access_token(role, role, token, 0.0)
        self.restart()

    @property
    def run(self) -> str:
        """The id of its run."""
        return self.coordinator.info().run

    def another_coordinator(self, ledger: Ledger | None = None) -> Coordinator:
        def initial_block(block: int) -> Tensors:
            return as_arrays(build_block(self.spec, block).state_dict())

        return Coordinator(
            self.spec,
            ledger or self.ledger,
            self.blobs,
            initial_block=initial_block,
            clock=lambda: self.now_s,
            receipt_key=RECEIPT_KEY,
        )

    def member(self) -> Member:
        return Member(self)

    def restart(self) -> None:
        """As after a kill: a new coordinator on the same ledger and blobs."""
        self.coordinator = self.another_coordinator()
        self.__dict__.pop("service", None)

    @cached_property
    def service(self) -> FastAPI:
        """Built when it is asked first: not every test needs it."""
        return build_service(self.coordinator, self.ledger, self.rate, lambda: self.now_s)

    def settle(self) -> None:
        """Does the pending work of the coordinator's loop, as a thread of a server would beside the requests."""
        self.coordinator.loop.settle()

    def ask(self, method: str, path: str, role: str = "worker", **options: Any) -> httpx.Response:
        """The answer to a request that finds the loop idle, and leaves it idle."""
        self.settle()
        try:
            return self.ask_only(method, path, role, **options)
        finally:
            self.settle()

    def ask_only(self, method: str, path: str, role: str = "worker", **options: Any) -> httpx.Response:
        """The answer to a request alone: what follows from it is left to the loop."""
        headers = {"Authorization": f"Bearer {TOKENS.get(role, role)}", **options.pop("headers", {})}

        async def asked() -> httpx.Response:
            transport = httpx.ASGITransport(self.service, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://coordinator.test") as client:
                return await client.request(method, path, headers=headers, **options)

        return asyncio.run(asked())

    def facts(self) -> dict[str, Any]:
        """All rows of the ledger but its events, and all blobs."""
        with self.ledger.database.reading() as connection:
            rows = {
                table.name: connection.execute(select(table)).all()
                for table in ledger_tables.tables.sorted_tables
                if table.name != "events"
            }
        return {**rows, "blobs": sorted(self.blobs.iterate())}

    def refusals(self) -> list[str]:
        return [event.data["code"] for event in self.ledger.events() if event.kind == "refused"]

    def weights(self) -> dict[tuple[int, int], str]:
        """(block, version): its bytes' hash."""
        return {(x.block, x.version): x.sha256 for block in (0, 1) for x in self.ledger.versions(block)}


@dataclass
class Member:
    """A worker's side of the protocol. Tests may change every step."""

    house: House
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    nonces: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def id(self) -> str:
        return self.key.public_key().public_bytes_raw().hex()

    @property
    def run(self) -> str:
        return self.house.run

    def request(self, **changes: Any) -> dict[str, Any]:
        """Signed after the changes, if the result is a valid message."""
        said = {
            "protocol": PROTOCOL_VERSION,
            "nonce": next(self.nonces),
            "worker": self.id,
            "name": "w",
            "device": "cpu",
            "memory_bytes": 2**33,
            "steps_per_s": 1.0,
            **changes,
        }
        with suppress(ValidationError):
            return sign(LeaseRequest(**said), self.key, self.run).model_dump(mode="json")
        return {**said, "signature": UNSIGNED}

    def lease(self) -> TrainLease:
        answer = self.house.ask("POST", "/v1/leases", json=self.request())
        assert answer.status_code == 200, answer.text
        return TrainLease.model_validate(answer.json())

    def tensors(self, lease: TrainLease) -> Tensors:
        return {
            f"{x.block}.{name}": tensor
            for x in lease.trained
            for name, tensor in decode(self.house.blobs.get(x.tensors.sha256))[0].items()
        }

    def payload(self, lease: TrainLease, step: float = 1e-3) -> bytes:
        """An update that moves every weight by `step`."""
        before = self.tensors(lease)
        after = {name: tensor - step for name, tensor in before.items()}
        return encode_update(before, after, make_codec(self.house.spec.swarm.update))

    def upload(self, lease: str, data: bytes, sha256: str | None = None, **params: int) -> httpx.Response:
        path = f"/v1/leases/{lease}/uploads/{sha256 or hashlib.sha256(data).hexdigest()}"
        return self.house.ask("PUT", path, params={"offset": 0, "size": len(data), **params}, content=data)

    def notice(self, lease: TrainLease, data: bytes, **changes: Any) -> dict[str, Any]:
        """A notice with these changes, signed."""
        said = {
            "lease": lease.lease,
            "worker": self.id,
            "tensors": {name: tuple(tensor.shape) for name, tensor in self.tensors(lease).items()},
            "payload": Blob(sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data)),
            "steps": lease.steps,
            "tokens": lease.steps * self.house.spec.step_tokens,
            "loss": 5.0,
        }
        return sign(UpdateNotice(**{**said, **changes}), self.key, self.run).model_dump(mode="json")

    def submit(self, notice: dict[str, Any], **changes: Any) -> httpx.Response:
        return self.house.ask("POST", "/v1/updates", json={**notice, **changes})

    def send(self, lease: TrainLease, data: bytes, **changes: Any) -> httpx.Response:
        path = f"/v1/leases/{lease.lease}/uploads/{hashlib.sha256(data).hexdigest()}"
        received = self.house.ask("GET", path).json()["received"]
        params = {"offset": received, "size": len(data)}
        if received < len(data):
            assert self.house.ask("PUT", path, params=params, content=data[received:]).status_code == 200
        return self.submit(self.notice(lease, data, **changes))

    def work(self, step: float = 1e-3) -> None:
        """One round, alone."""
        lease = self.lease()
        answer = self.send(lease, self.payload(lease, step))
        assert answer.status_code == 200, answer.text


@pytest.fixture(scope="session")
def beer_text(tmp_path_factory: pytest.TempPathFactory, sentences: bytes) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_bytes(sentences)
    return path


@pytest.fixture(scope="session")
def tiny_run(beer_text: Path) -> RunSpec:
    return preset("tiny").with_(
        objective=Stacked(),
        **{
            "corpus.source": str(beer_text),
            "train.steps": 40,
            "swarm.update": "fp32",
            "swarm.download": "int6",
            "swarm.round_steps": 2,
            "swarm.max_lag": 1,
            "swarm.evaluate_every": 1000,
            "swarm.audit_share": 0.0,
        },
    )


@pytest.fixture(scope="session")
def new_house(tiny_run: RunSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., House]]:
    """Makes a new run with its coordinator at every call. Equal settings make equal runs."""
    houses: list[House] = []

    def build(rate: Rate | None = None, **changes: Any) -> House:
        houses.append(House(tiny_run.with_(**changes), tmp_path_factory.mktemp("house"), rate))
        return houses[-1]

    yield build
    for house in houses:
        house.ledger.close()


@pytest.fixture
def house(new_house: Callable[..., House]) -> House:
    return new_house()


@pytest.fixture
def member(house: House) -> Member:
    return house.member()


@pytest.fixture
def another_member(house: House) -> Member:
    return house.member()
