"""Routing: which stages a traversal goes through, and why no route exists. Pure: no socket, no clock, no global random
state. Next: dispatch.py attempts a route; links.py keeps the views of the stages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random

from blocktrain.serve.chain.messages import ServedModel

HALF_LIFE_S = 30.0  # of a measured time, so that a slow stage is tried again
DEFAULT_WORK_S = 0.01
AVOID_COST_S = 1e4  # used only if there is no other stage
SKIP_COST_S = 1e7  # of leaving out a block
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0


@dataclass(frozen=True)
class StageView:
    """One stage as the gateway sees it now."""

    address: str
    blocks: tuple[int, ...]
    models: tuple[ServedModel, ...]  # the newest first
    healthy: bool = True  # connected, and it answers
    out: bool = False  # it failed recently: used only if there is no other stage
    waiting: int = 0  # in its own queue
    under_way: int = 0  # sent by this gateway and not answered yet
    work_s: float = 0.0  # smoothed time of a traversal there, with its transport
    measured_s: float = 0.0  # when work_s was measured

    @property
    def end(self) -> int:
        return self.blocks[-1] + 1

    def rank(self, version: str) -> int | None:
        """0 for its newest version, None if it does not hold the version."""
        held = [model.version for model in self.models]
        return held.index(version) if version in held else None


@dataclass(frozen=True)
class Route:
    addresses: tuple[str, ...]
    missing: tuple[int, ...] = ()  # blocks that no stage of the route has


def expected_wait_s(view: StageView, now_s: float) -> float:
    """The expected time until it has advanced one more traversal."""
    faded = 0.5 ** (max(0.0, now_s - view.measured_s) / HALF_LIFE_S)
    return float(DEFAULT_WORK_S + view.work_s * faded) * (1 + view.waiting + view.under_way)


def choose_route(
    views: Collection[StageView],
    version: str,
    num_blocks: int,
    now_s: float,
    *,
    prefer: Collection[str] = (),
    avoid: Collection[str] = (),
    may_skip: Collection[int] = (),
    rng: Random | None = None,
) -> Route | None:
    """The cheapest exact cover of all blocks by healthy stages that hold the version. Stages in `prefer` cost nothing:
    they hold the session's KV caches. Stages in `avoid` are a last resort. Blocks in `may_skip` are left out if no
    stage holds them."""
    usable = [view for view in views if view.healthy and view.rank(version) is not None]
    if rng is not None:
        usable = rng.sample(usable, len(usable))  # breaks ties at random

    def cost_s(view: StageView) -> float:
        own = 0.0 if view.address in prefer else expected_wait_s(view, now_s)
        return own + AVOID_COST_S * (view.out or view.address in avoid)

    best: dict[int, tuple[float, Route]] = {num_blocks: (0.0, Route(()))}
    for block in reversed(range(num_blocks)):
        options = [
            (cost_s(view) + cost, Route((view.address, *rest.addresses), rest.missing))
            for view in usable
            if view.blocks[0] == block and view.end in best
            for cost, rest in (best[view.end],)
        ]
        if block in may_skip and block + 1 in best:
            cost, rest = best[block + 1]
            options.append((cost + SKIP_COST_S, Route(rest.addresses, (block, *rest.missing))))
        if options:
            best[block] = min(options, key=lambda option: option[0])
    _, route = best.get(0, (0.0, None))
    return route if route and route.addresses else None


def newest_whole(views: Collection[StageView], *, may_skip: bool = False) -> ServedModel | None:
    """The newest version of which healthy stages hold all blocks; with `may_skip`, as many blocks as possible. New
    sessions begin with it."""
    models = {model.version: model for view in views if view.healthy for model in view.models}
    whole = []
    for model in models.values():
        route = choose_route(views, model.version, model.blocks, 0.0, may_skip=range(model.blocks if may_skip else 0))
        if route is not None:
            whole.append((len(route.missing), _age(views, model.version), model))
    return min(whole, key=lambda each: each[:2])[2] if whole else None


def _age(views: Collection[StageView], version: str) -> int:
    return sum(rank for view in views if view.healthy and (rank := view.rank(version)) is not None)


def pause_s(failures: int) -> float:
    """How long a stage is avoided after this many failures in a row."""
    return min(FIRST_PAUSE_S * 2.0 ** max(0, failures - 1), LONGEST_PAUSE_S) if failures else 0.0


def model_problem(views: Sequence[StageView]) -> str | None:
    """Why these stages do not serve one model, or None."""
    for view in views:
        ours, theirs = views[0].models[0], view.models[0]
        if theirs.spec_digest != ours.spec_digest:
            return (
                f"{views[0].address} serves {ours.name} (spec {ours.spec_digest[:12]}) and {view.address} serves "
                f"{theirs.name} (spec {theirs.spec_digest[:12]}): give stages of one model"
            )
    return None


def version_problem(views: Sequence[StageView]) -> str | None:
    """Why these stages do not serve one version, or None."""
    common = set.intersection(*({model.version for model in view.models} for view in views))
    if common or newest_whole(views):
        return None
    held = ", ".join(f"{view.address} holds {' and '.join(model.version for model in view.models)}" for view in views)
    return f"the stages share no version ({held}): give all of them the same model directory"


def cover_problem(views: Sequence[StageView]) -> str | None:
    """Why their blocks do not make up the model, or None: a gap, or an overlap that fits into no chain."""
    total = views[0].models[0].blocks
    held = ", ".join(f"{view.address} has {_span(view.blocks)}" for view in views)
    covered = {block for view in views for block in view.blocks}
    if gap := sorted(set(range(total)) - covered):
        return f"no stage has block {_span(gap)} of 0-{total - 1} ({held}): start one, or add its address"
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
    """The blocks at which a chain from block `start` can end."""
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
