"""Routes: which stages a traversal goes through, and why none will do. Pure: no socket, no clock, no global random
state. Next: journey.py, which walks a route; links.py, which keeps the views."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random

from blocktrain.serve.chain.messages import Served

FADES_S = 30.0  # half of what was measured is forgotten after so long: who was slow is tried again
DEFAULT_WORK_S = 0.01
AVOID_COST_S = 1e4  # taken only where there is no other
SKIP_COST_S = 1e7  # a block done without
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0


@dataclass(frozen=True)
class StageView:
    """One stage as the gateway sees it now."""

    address: str
    blocks: tuple[int, ...]
    models: tuple[Served, ...]  # the newest first
    healthy: bool = True  # it answers
    out: bool = False  # it has failed of late: used where there is no other
    waiting: int = 0  # in its own room
    under_way: int = 0  # that this gateway has sent and not got back
    work_s: float = 0.0  # what a walk took there of late, the way to it included
    measured_s: float = 0.0  # when

    @property
    def end(self) -> int:
        return self.blocks[-1] + 1

    def rank(self, version: str) -> int | None:
        """0: its newest; None: it does not hold it."""
        held = [model.version for model in self.models]
        return held.index(version) if version in held else None


@dataclass(frozen=True)
class Route:
    addresses: tuple[str, ...]
    missing: tuple[int, ...] = ()  # blocks that it goes without


def expected_wait_s(view: StageView, now_s: float) -> float:
    """Until it has done one more walk."""
    faded = 0.5 ** (max(0.0, now_s - view.measured_s) / FADES_S)
    return float(DEFAULT_WORK_S + view.work_s * faded) * (1 + view.waiting + view.under_way)


def choose_route(
    views: Collection[StageView],
    version: str,
    first: int,
    end: int,
    now_s: float,
    *,
    prefer: Collection[str] = (),
    avoid: Collection[str] = (),
    may_skip: Collection[int] = (),
    rng: Random | None = None,
) -> Route | None:
    """The cheapest exact cover of blocks first to end - 1 by healthy stages that hold the version. A session's own
    stages cost nothing, since its caches are there; stages of `avoid` are a last resort; blocks of `may_skip` are left
    out where nobody holds them."""
    usable = [view for view in views if view.healthy and view.rank(version) is not None]
    if rng is not None:
        usable = rng.sample(usable, len(usable))  # ties fall differently each time

    def cost_s(view: StageView) -> float:
        own = 0.0 if view.address in prefer else expected_wait_s(view, now_s)
        return own + AVOID_COST_S * (view.out or view.address in avoid)

    best: dict[int, tuple[float, Route]] = {end: (0.0, Route(()))}
    for block in range(end - 1, first - 1, -1):
        ways = [
            (cost_s(view) + best[view.end][0], _before(best[view.end][1], view.address))
            for view in usable
            if view.blocks[0] == block and view.end in best
        ]
        if block in may_skip and block + 1 in best:
            cost, route = best[block + 1]
            ways.append((cost + SKIP_COST_S, Route(route.addresses, (block, *route.missing))))
        if ways:
            best[block] = min(ways, key=lambda way: way[0])
    found = best.get(first)
    return found[1] if found and (found[1].addresses or first == end) else None


def _before(route: Route, address: str) -> Route:
    return Route((address, *route.addresses), route.missing)


def newest_whole(views: Collection[StageView], *, may_skip: bool = False) -> Served | None:
    """The version that new sessions begin with: all its blocks are held by healthy stages (or with `may_skip` as many
    as can be), and it is the newest such."""
    models = {model.version: model for view in views if view.healthy for model in view.models}
    whole = []
    for model in models.values():
        route = choose_route(
            views, model.version, 0, model.blocks, 0.0, may_skip=range(model.blocks if may_skip else 0)
        )
        if route is not None:
            whole.append((len(route.missing), _age(views, model.version), model))
    return min(whole, key=lambda each: each[:2])[2] if whole else None


def _age(views: Collection[StageView], version: str) -> int:
    return sum(rank for view in views if view.healthy and (rank := view.rank(version)) is not None)


def pause_s(failures: int) -> float:
    """How long a stage stays out after so many failures in a row."""
    return min(FIRST_PAUSE_S * 2.0 ** max(0, failures - 1), LONGEST_PAUSE_S) if failures else 0.0


def hedge_after_s(usual_s: float, multiple: float | None) -> float:
    """When a second way is tried beside the first: never, before anything is known of the usual time."""
    return math.inf if multiple is None or usual_s <= 0 else multiple * usual_s


def model_problem(views: Sequence[StageView]) -> str | None:
    """Why these stages are not of one model."""
    for view in views:
        ours, theirs = views[0].models[0], view.models[0]
        if theirs.spec_digest != ours.spec_digest:
            return (
                f"{views[0].address} serves {ours.name} (spec {ours.spec_digest[:12]}) and {view.address} serves "
                f"{theirs.name} (spec {theirs.spec_digest[:12]}): give stages of one model"
            )
    return None


def version_problem(views: Sequence[StageView]) -> str | None:
    """Why they are not of one version."""
    common = set.intersection(*({model.version for model in view.models} for view in views))
    if common or newest_whole(views):
        return None
    held = ", ".join(f"{view.address} holds {' and '.join(model.version for model in view.models)}" for view in views)
    return f"the stages share no version ({held}): give all of them the same model directory"


def cover_problem(views: Sequence[StageView]) -> str | None:
    """Why their blocks do not make the model: a gap, or blocks that overlap so that no chain fits."""
    total = views[0].models[0].blocks
    held = ", ".join(f"{view.address} has {_span(view.blocks)}" for view in views)
    covered = {block for view in views for block in view.blocks}
    if gap := sorted(set(range(total)) - covered):
        return f"no stage has block {_span(gap)} of 0-{total - 1} ({held}): start one, or name it"
    used = [view for view in views if _on_a_chain(view, views, total)]
    if stray := [view for view in views if view not in used]:
        view = stray[0]
        return (
            f"{view.address} with blocks {_span(view.blocks)} overlaps the others and fits into no chain ({held}): "
            f"let each begin where another ends"
        )
    return None


def _on_a_chain(view: StageView, views: Sequence[StageView], total: int) -> bool:
    return view.blocks[0] in _reachable(views) and total in _reachable(views, view.end)


def _reachable(views: Sequence[StageView], start: int = 0) -> set[int]:
    """The blocks before which a chain from `start` can end."""
    reached = {start}
    for view in sorted(views, key=lambda view: view.blocks[0]):
        if view.blocks[0] in reached:
            reached.add(view.end)
    return reached


def _span(blocks: Sequence[int]) -> str:
    consecutive = list(blocks) == list(range(blocks[0], blocks[-1] + 1))
    if not consecutive:
        return ", ".join(map(str, blocks))
    return f"{blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else str(blocks[0])
