"""RunSpec: everything that defines a training run. Equal specs train equal weights on every machine.
Reads TOML files; uses no torch. Next: settings.py, every setting; train/run.py, which trains the phases."""

from __future__ import annotations

import hashlib
import json
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from blocktrain.errors import ConfigError
from blocktrain.settings import (
    BYTES,
    LATER_SWARM_SETTINGS,
    MACHINE_SETTINGS,
    NUM_SYMBOLS,
    OBJECTIVE_KINDS,
    REMOVED_SETTINGS,
    CorpusSpec,
    Denoise,
    EndToEnd,
    ModelSpec,
    Objective,
    OptimSpec,
    Settings,
    Stacked,
    SwarmSpec,
    TrainSpec,
    public_name,
)
from blocktrain.unknown_keys import advice

__all__ = [
    "BYTES",
    "LATER_SWARM_SETTINGS",
    "NUM_SYMBOLS",
    "REMOVED_SETTINGS",
    "CorpusSpec",
    "Denoise",
    "EndToEnd",
    "ModelSpec",
    "Objective",
    "OptimSpec",
    "Phase",
    "RunSpec",
    "Stacked",
    "SwarmSpec",
    "TrainSpec",
    "first_difference",
    "known_keys",
    "load_spec",
    "parse_spec",
    "preset",
    "settings_of",
    "usable_weights",
]

MAX_COMPOSITION_WEIGHT = 100.0  # larger weights of a block's logits are no fit


TABLES: dict[str, tuple[type[Settings], ...]] = {
    "corpus": (CorpusSpec,),
    "model": (ModelSpec,),
    "objective": (Stacked, Denoise, EndToEnd),
    "optim": (OptimSpec,),
    "train": (TrainSpec,),
    "swarm": (SwarmSpec,),
}


@dataclass(frozen=True)
class Phase:
    """A part of the training that one worker can do alone: which blocks it trains, which it only runs, how long."""

    index: int
    blocks: tuple[int, ...]  # trained together: the block and its scaffold
    below: tuple[int, ...]  # snapshots that compute the state
    ahead: tuple[int, ...]  # frozen snapshots that the gradient passes through
    steps: int

    @property
    def block(self) -> int:
        """The block that the phase is for. It also selects the phase's random windows of text."""
        return self.blocks[0]


class RunSpec(Settings):
    """All settings of a run, checked and frozen."""

    name: str = "run"  # of the run, for people
    seed: Annotated[int, Field(ge=0)] = 0  # of all random numbers: equal settings with equal seeds train equal weights
    corpus: CorpusSpec = CorpusSpec()
    model: ModelSpec = ModelSpec()
    objective: Objective = Stacked()
    optim: OptimSpec = OptimSpec()
    train: TrainSpec = TrainSpec()
    swarm: SwarmSpec = SwarmSpec()

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_frozen()
        if self.train.micro_windows is not None and isinstance(self.objective, Denoise):
            raise ValueError(
                f"train.micro_windows = {self.train.micro_windows}: denoise draws its noise for all windows of a step "
                f"together, so leave it out; train.checkpoint_activations saves memory too"
            )
        narrow = self.model.table_rank not in (None, self.model.width)
        if narrow and isinstance(self.objective, Stacked) and self.objective.state_dropout:
            raise ValueError(
                f"objective.state_dropout = {self.objective.state_dropout:g} needs blocks that read the tokens "
                f"themselves, which only the first one does with narrow tables: set model.table_rank = "
                f"{self.model.width}, the model's width, or leave state_dropout out"
            )
        phases = len(self._layout())
        if isinstance(self.train.steps, tuple) and len(self.train.steps) != phases:
            raise ValueError(
                f"train.steps lists {len(self.train.steps)} numbers and this run has {phases} phases: "
                f"give one number, or {phases}"
            )
        return self

    def _check_frozen(self) -> None:
        frozen, num_blocks = self.train.freeze, self.model.blocks
        if not frozen:
            return
        said = f"train.freeze = {list(frozen)}"
        if max(frozen) >= num_blocks or len(set(frozen)) < len(frozen):
            raise ValueError(f"{said} must name blocks from 0 to {num_blocks - 1}, each once")
        if len(frozen) == num_blocks:
            raise ValueError(f"{said} leaves no block to train: name fewer than {num_blocks}")
        if not isinstance(self.objective, Denoise) and set(frozen) != set(range(len(frozen))):
            raise ValueError(
                f"{said} has a block that is trained below a frozen one: freeze the first blocks, for example "
                f"{list(range(len(frozen)))}"
            )

    @property
    def draw_seed(self) -> int:
        """The seed of a run's windows of text and of its noise. A run that starts from a model has that model's seed
        and should still see other windows than the model has seen."""
        start = self.train.start_sha256
        return self.seed if start is None else self.seed ^ int(start[:15], 16)

    @property
    def step_tokens(self) -> int:
        """Tokens of text per training step: bytes, unless the run has another tokenizer."""
        return self.train.windows * self.model.context

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        return tuple(Phase(index, *layout, self._steps(index)) for index, layout in enumerate(self._layout()))

    def _steps(self, phase: int) -> int:
        steps, objective = self.train.steps, self.objective
        if isinstance(steps, tuple):
            return steps[phase]
        if phase > 0 and isinstance(objective, Stacked) and objective.schedule == "progressive":
            return max(1, round(steps * objective.later_share))
        return steps

    @property
    def groups(self) -> tuple[tuple[Phase, ...], ...]:
        """The phases in the order of training. Phases of one group may be trained at the same time."""
        one_by_one = isinstance(self.objective, Stacked) and self.objective.schedule == "progressive"
        return tuple((phase,) for phase in self.phases) if one_by_one else (self.phases,)

    def _layout(self) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        """(trained, below, ahead) of each phase."""
        objective, every, frozen = self.objective, tuple(range(self.model.blocks)), self.train.freeze
        if isinstance(objective, Denoise):
            return [((block,), (), ()) for block in every if block not in frozen]
        first = len(frozen)  # the frozen blocks lie below it
        if isinstance(objective, EndToEnd) or objective.schedule == "whole":
            return [(every[first:], every[:first], ())]
        reach = objective.scaffold + 1
        starts = every[first : max(first + 1, len(every) - objective.scaffold)]
        return [(every[k : k + reach], every[:k], every[k + reach : k + reach + objective.lookahead]) for k in starts]

    def digest(self) -> str:
        """A hash of all settings but those for one machine. Runs with equal digests train equal weights."""
        settings = self.for_any_machine().model_dump(mode="json")
        if isinstance(self.objective, Denoise):
            settings["objective"] |= REMOVED_SETTINGS
        for name, before in LATER_SWARM_SETTINGS.items():
            if settings["swarm"][name] == before:
                del settings["swarm"][name]
        if self.corpus.tokenizer == BYTES:
            del settings["corpus"]["tokenizer"]  # the default, which older versions did not name
        canonical = json.dumps(settings, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def without_paths(self) -> RunSpec:
        """The settings for others: the corpus and the tokenizer by their names, since their folders are nobody else's
        business. Each machine chooses by its own memory."""
        tokenizer = self.corpus.tokenizer
        names = {"source": self.corpus.name, "tokenizer": tokenizer and public_name(tokenizer)}
        corpus = self.corpus.model_copy(update=names)
        return self.for_any_machine().model_copy(update={"corpus": corpus})

    def for_any_machine(self) -> RunSpec:
        """Without what concerns the memory of one machine only."""
        train = self.train.model_copy(update=dict.fromkeys(MACHINE_SETTINGS))
        return self.model_copy(update={"train": train})

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        copied = super().model_copy(update=update, deep=deep)
        vars(copied).pop("phases", None)  # they follow from the settings, which may be others now
        return copied

    def with_(self, **changes: Any) -> RunSpec:
        """A copy with some settings replaced, checked again: spec.with_(**{"train.steps": 10})."""
        changed: dict[str, Any] = {}
        for dotted, value in changes.items():
            *path, last = dotted.split(".")
            nested = {last: value.model_dump(mode="json") if isinstance(value, BaseModel) else value}
            for key in reversed(path):
                nested = {key: nested}
            changed = _merge(changed, nested)
        return parse_spec(_merge(self.model_dump(mode="json"), changed), origin="the changed settings")


def preset(name: str) -> RunSpec:
    """The settings of a named preset (presets.py)."""
    from blocktrain.presets import PRESETS  # which imports this module

    if name not in PRESETS:
        raise ConfigError(f'there is no preset "{name}": choose one of {", ".join(PRESETS)}')
    return PRESETS[name]


def usable_weights(combine: Mapping[str, Sequence[float]], num_blocks: int) -> dict[str, tuple[float, ...]]:
    """The weights of a composition that a model with so many blocks can use. Others, which somebody may have sent or
    which belong to another model, are left out: the model then answers with its last block, or with equal weights."""
    return {
        path: tuple(weights)
        for path, weights in combine.items()
        if len(weights) == num_blocks and all(abs(weight) <= MAX_COMPOSITION_WEIGHT for weight in weights)
    }


def load_spec(path: str | Path, *, warn: bool = True) -> RunSpec:
    """Read a TOML file. A top-level `preset = "small"` starts from that preset; the other keys replace its settings.
    `warn`: about removed settings. Not for files that the program itself wrote."""
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: give the path of a run's TOML file") from None
    except IsADirectoryError:
        remedy = "give the path of a run's TOML file, or --from to start from the model in this folder"
        raise ConfigError(f"{path} is a folder: {remedy}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        text = "" if str(path).endswith(".toml") else f", or, to train on its text, give it with --corpus {path}"
        raise ConfigError(f"{path} is not a readable TOML file ({error}): correct it{text}") from None
    base = data.pop("preset", None)
    if base is not None:
        data = _merge(preset(str(base)).model_dump(mode="json"), data)
    return parse_spec(data, origin=str(path), warn=warn)


def parse_spec(data: dict[str, Any], origin: str, *, warn: bool = True) -> RunSpec:
    try:
        spec = RunSpec.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{origin}: {_explain(error)}") from None
    if warn and isinstance(spec.objective, Denoise):
        for key in REMOVED_SETTINGS.keys() & data["objective"].keys():
            warnings.warn(
                f"{origin}: objective.{key} was removed and has no effect: delete the key, the next version refuses it",
                FutureWarning,
                stacklevel=2,
            )
    return spec


def settings_of(spec: RunSpec) -> dict[str, Any]:
    """All settings, for TOML, which has no null."""
    return spec.model_dump(mode="json", exclude_none=True)


def first_difference(there: RunSpec, wanted: RunSpec) -> str | None:
    """The first setting that differs, as the middle of a sentence about what holds `there`."""
    old, new = (_flat(settings_of(spec.for_any_machine())) for spec in (there, wanted))
    for key in dict.fromkeys((*new, *old)):
        if old.get(key) != new.get(key):
            was, now = (json.dumps(flat[key]) if key in flat else "nothing" for flat in (old, new))
            return f"holds a run with {key} = {was} and this run has {key} = {now}"
    return None


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"model": {"width": 64}} -> {"model.width": 64}"""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes`, table by table. An objective of another kind replaces the whole table."""
    merged = dict(base)
    for key, value in changes.items():
        inner = merged.get(key)
        if isinstance(inner, dict) and isinstance(value, dict) and _same_kind(inner, value):
            merged[key] = _merge(inner, value)
        else:
            merged[key] = value
    return merged


def _same_kind(old: dict[str, Any], new: dict[str, Any]) -> bool:
    kinds = (old.get("kind"), new.get("kind"))
    return None in kinds or kinds[0] == kinds[1]


def _explain(error: ValidationError) -> str:
    """Pydantic's error as one sentence that names the key, the value and what is allowed."""
    first = max(error.errors(), key=lambda complaint: len(complaint["loc"]))  # the most specific branch of a union
    path = _key_path(first["loc"])
    key = ".".join(path)
    if first["type"] == "value_error":
        return first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return f"unknown key {key}: {advice(path, known_keys())}"
    if first["type"].startswith("union_tag"):
        return f'{key}.kind must be "stacked", "denoise" or "end_to_end": add or correct it'
    return f"{key} = {first.get('input')!r}: {first['msg'][0].lower()}{first['msg'][1:]}"


def _key_path(location: tuple[int | str, ...]) -> list[str]:
    """The keys of the file: pydantic puts the branch of a union after its key ("objective", "denoise", "sigma_min")."""
    return [
        str(part)
        for before, part in zip((None, *location), location, strict=False)
        if not (before == "objective" and part in OBJECTIVE_KINDS)
        and not (before in ("layers", "physical_layers", "steps") and str(part).startswith(("constrained-", "tuple[")))
    ]


def known_keys() -> set[str]:
    """Every setting as `table.key`, those of all objectives included."""
    alone = {key for key in RunSpec.model_fields if key not in TABLES}
    pairs = ((name, table) for name, tables in TABLES.items() for table in tables)
    return alone | {f"{name}.{key}" for name, table in pairs for key in table.model_fields}
