"""The index of a run directory: what it contains. Next: checkpoint.py, which writes it last."""

from __future__ import annotations

from pydantic import AliasChoices, BaseModel, ConfigDict, Field


class BlockEntry(BaseModel):
    """The current version of one block."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    steps: int = Field(ge=0)


class Manifest(BaseModel):
    """What a run directory contains."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Of the file spec.toml as it was written: settings that are added later leave old runs readable. Older versions
    # called it spec_sha256.
    spec_toml_sha256: str = Field(validation_alias=AliasChoices("spec_toml_sha256", "spec_sha256"))
    corpus_sha256: str
    blocks: dict[int, BlockEntry] = {}
    finished: tuple[int, ...] = ()  # phases
    combine: dict[str, tuple[float, ...]] = {}  # weights of the composition, fitted to exactly these blocks
    drafters: dict[int, BlockEntry] = {}  # by the block that each stands behind, distilled from exactly these blocks
