"""BlockTrain trains one language model in blocks, on many machines. The names below are the public API.

    spec = preset("tiny")
    corpus = load_corpus(spec.corpus, spec.model.context)
    run = RunDirectory.create("run", spec, corpus.sha256)
    train_run(run, corpus)
    model = load_model(run)
    scores = evaluate(model, corpus.valid)
    print(generate(model, "The president"), score_text(model, "The president").nats_per_byte)

docs/api.md explains every name with an example that runs. A name is imported when it is first used, so that
`blocktrain --help` does not wait for torch."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    from blocktrain.data.corpus import load_corpus
    from blocktrain.errors import BlockTrainError
    from blocktrain.io.checkpoint import RunDirectory
    from blocktrain.model.stack import BlockModel
    from blocktrain.spec import RunSpec, load_spec, preset
    from blocktrain.swarm.local import local_swarm
    from blocktrain.text import generate, score_text
    from blocktrain.train.evaluate import evaluate
    from blocktrain.train.reference import equal_work_steps, reference_of
    from blocktrain.train.run import load_model, train_run
    from blocktrain.train.trainer import BlockTrainer

__all__ = [
    "BlockModel",
    "BlockTrainError",
    "BlockTrainer",
    "RunDirectory",
    "RunSpec",
    "equal_work_steps",
    "evaluate",
    "generate",
    "load_corpus",
    "load_model",
    "load_spec",
    "local_swarm",
    "preset",
    "reference_of",
    "score_text",
    "train_run",
]

_MODULES = {
    "io.checkpoint": ("RunDirectory",),
    "data.corpus": ("load_corpus",),
    "errors": ("BlockTrainError",),
    "model.stack": ("BlockModel",),
    "spec": ("RunSpec", "load_spec", "preset"),
    "swarm.local": ("local_swarm",),
    "text": ("generate", "score_text"),
    "train.evaluate": ("evaluate",),
    "train.reference": ("equal_work_steps", "reference_of"),
    "train.run": ("load_model", "train_run"),
    "train.trainer": ("BlockTrainer",),
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module("importlib.metadata").version("blocktrain")
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"blocktrain.{module}"), name)
    raise AttributeError(f"module blocktrain has no attribute {name}: the public names are {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
