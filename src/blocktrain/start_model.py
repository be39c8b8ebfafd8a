"""The model that a run starts from (--from): what its settings must have in common with the run's. No torch, no files.
Next: train/start.py, which opens such a model and copies its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blocktrain.errors import ConfigError
from blocktrain.settings import BYTES, TOKENIZER_FILE, CorpusSpec, Denoise, ModelSpec
from blocktrain.spec import RunSpec

ANY_CONTEXT = "context"  # the one part of the shape that no weight depends on


@dataclass(frozen=True)
class StartModel:
    path: Path
    spec: RunSpec
    sha256: str  # of its blocks; a run records this and not the path

    def require_elsewhere(self, out: Path) -> None:
        if out.resolve() == self.path.resolve():
            raise ConfigError(f"--from and --out are both {out}: name another --out, a model stays as it is")

    def begin(self, spec: RunSpec) -> RunSpec:
        """The settings of a run that starts from this model. Its text is read with the model's tokenizer."""
        spec = spec.with_(**{"train.start_sha256": self.sha256})
        own = self.spec.corpus
        if own.tokenizer_sha256 is not None and spec.corpus.tokenizer == BYTES:
            raise self._other_tokenizer(spec.corpus)
        if own.tokenizer_sha256 is None or spec.corpus.tokenizer not in (None, own.tokenizer):
            return spec
        tokenizer = {"tokenizer": str(self.path / TOKENIZER_FILE), "tokenizer_sha256": own.tokenizer_sha256}
        return spec.with_(**{f"corpus.{key}": value for key, value in tokenizer.items()})

    def fitted(self, spec: RunSpec) -> RunSpec:
        """The same settings when the text is known, if the model's blocks fit them. The tokenizer has the model's name
        for it then, not a path of this machine."""
        self._require_tokenizer(spec)
        self._require_shape(spec.model)
        self._require_objective(spec)
        own = self.spec.corpus
        return spec if own.tokenizer_sha256 is None else spec.with_(**{"corpus.tokenizer": own.tokenizer})

    def _require_tokenizer(self, spec: RunSpec) -> None:
        if self.spec.corpus.tokenizer_sha256 != spec.corpus.tokenizer_sha256:
            raise self._other_tokenizer(spec.corpus)

    def _other_tokenizer(self, new: CorpusSpec) -> ConfigError:
        own, remedy = self.spec.corpus, "leave corpus.tokenizer out, and give the text itself"
        if own.tokenizer_sha256 is not None and new.tokenizer != BYTES:
            remedy = f"prepare the text with --tokenizer {self.path / TOKENIZER_FILE}"
        return ConfigError(
            f"the model in {self.path} reads {own.tokenizer or BYTES} and this text is read as "
            f"{new.tokenizer or BYTES}{_hashes(own.tokenizer_sha256, new.tokenizer_sha256)}: {remedy}"
        )

    def _require_shape(self, model: ModelSpec) -> None:
        own = self.spec.model
        for key in ModelSpec.model_fields:
            there, here = _layout(own, key), _layout(model, key)
            if key != ANY_CONTEXT and there != here:
                raise ConfigError(
                    f"the model in {self.path} has model.{key} = {there} and this run has {here}: give the model's "
                    f"value, or leave the settings out to take all of the model's"
                )

    def _require_objective(self, spec: RunSpec) -> None:
        """Blocks of `stacked` and `end_to_end` are the same; those of `denoise` belong to codes drawn from the seed."""
        own, new = self.spec.objective, spec.objective
        if isinstance(own, Denoise) != isinstance(new, Denoise):
            raise ConfigError(
                f"the model in {self.path} was trained as {own.kind} and this run trains {new.kind}, whose blocks "
                f"differ: give objective.kind={own.kind}"
            )
        if isinstance(own, Denoise) and self.spec.seed != spec.seed:
            raise ConfigError(
                f"the codes of denoise follow from the seed, and the model in {self.path} has seed {self.spec.seed}: "
                f"give --seed {self.spec.seed}; the run still reads different windows of text"
            )


def require_start(spec: RunSpec, start: object | None) -> None:
    """Refuses settings that need a model to start from, if there is none."""
    if start is not None:
        return
    if spec.train.freeze:
        raise ConfigError(
            f"train.freeze = {list(spec.train.freeze)} keeps blocks as a trained model has them, and this run starts "
            f"from none: give that model with --from, or leave train.freeze out"
        )
    if spec.train.start_sha256 is not None:
        raise ConfigError(
            f"this run starts from a model (sha256 {spec.train.start_sha256[:12]}…) that is not here: give its "
            f"directory with --from"
        )


def _layout(model: ModelSpec, key: str) -> object:
    """A value of the shape. 8 layers in 4 blocks are the same as [2, 2, 2, 2]."""
    of_block = {"layers": model.layers_of, "physical_layers": model.physical_layers_of}.get(key)
    return [of_block(block) for block in range(model.blocks)] if of_block else getattr(model, key)


def _hashes(there: str | None, here: str | None) -> str:
    """Two tokenizers may have one name."""
    return f" ({there[:12]}… and {here[:12]}…)" if there and here else ""
