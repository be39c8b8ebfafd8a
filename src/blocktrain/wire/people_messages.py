"""HTTP messages for people and their pages: events, curves, the leaderboard, and what an admin orders.
Next: messages.py, those of workers; swarm/coordinator/api/people.py, which answers these."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from blocktrain.wire.messages import InQuery, Loss, Message, Name, Natural, ScoreValue, Seconds


class Page(Message):
    """Asks for the entries of a growing list that follow a known one."""

    after: InQuery = 0  # the number of the last known entry


class MergesPage(Message):
    """Asks for the merged rounds of a phase from one round on."""

    phase: InQuery
    first: InQuery = 0


class EventPage(Page):
    """Asks for the newest events after one number and, to page back, before another."""

    before: InQuery = 2**53 - 1


class EventEntry(Message):
    """Something that happened: `text` is for people, `data` for programs."""

    number: Natural
    at_s: Seconds
    kind: Name
    text: str
    data: dict[str, Any]


class LossPoint(Message):
    """A closed round: the mean training loss of its updates, weighted by their tokens."""

    round: Natural
    step: Natural  # of the phase's schedule, at the round's start
    at_s: Seconds
    nats_per_byte: Loss
    updates: Natural
    tokens: Natural


class LossCurve(Message):
    phase: Natural
    blocks: tuple[Natural, ...]
    points: tuple[LossPoint, ...]


class HeldOutPoint(Message):
    """The score of the composed model, as `blocktrain eval` computes it."""

    at_s: Seconds
    versions: dict[InQuery, InQuery]  # block -> version
    path: str
    reading: str
    nats_per_byte: ScoreValue
    blocks: dict[InQuery, ScoreValue] = {}  # noqa: RUF012 (pydantic copies it)  # block -> its own score on the same path


class Curves(Message):
    """Loss over time. Long curves are thinned to at most `max_points`; the newest point is always included."""

    max_points: Natural
    training: tuple[LossCurve, ...]
    held_out: tuple[HeldOutPoint, ...]


class LeaderboardEntry(Message):
    """One worker, by the name that its key gives it."""

    rank: Natural
    alias: Name
    updates: Natural
    tokens: Natural
    active: bool  # it asked for something in the last minutes


class LeaderboardReply(Message):
    """Who contributed most, for everybody: without keys, addresses, devices and names of machines."""

    run: str
    at_s: Seconds
    progress: Annotated[float, Field(ge=0, le=1)]
    nats_per_byte: ScoreValue | None
    unit: Literal["bytes", "tokens"]
    num_workers: Natural
    tokens: Natural
    entries: tuple[LeaderboardEntry, ...]


class AccessTokenRole(Message):
    """What the access token of the request may do."""

    role: Literal["admin", "worker", "viewer"]


class InviteReply(Message):
    """The string with which a machine joins the run."""

    invite: str


class BanOrder(Message):
    """An admin excludes a worker or, with `lifted`, lets it work again."""

    worker: Name  # its key, the beginning of its key, or its alias
    reason: Annotated[str, Field(max_length=200, pattern="^[^\x00-\x1f\x7f]*$")] = ""  # its user reads it
    lifted: bool = False


class RollbackOrder(Message):
    """An admin returns a block, with the others of its phase, to a version, or removes what a worker contributed."""

    block: Natural | None = None
    version: Natural | None = None
    without: Name | None = None


class OrderReply(Message):
    """What was done, in a sentence."""

    done: str
