import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import blocktrain


@pytest.mark.parametrize("name", blocktrain.__all__)
def test_every_public_name_is_there(name):
    assert getattr(blocktrain, name).__module__.startswith("blocktrain.")


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(AttributeError, match="BlockModel"):
        blocktrain.Trainer  # noqa: B018


def test_the_version_is_that_of_the_installed_package():
    assert blocktrain.__version__ == version("blocktrain")


def test_the_public_names_are_listed_by_dir():
    assert dir(blocktrain) == sorted([*blocktrain.__all__, "__version__"])


def test_importing_the_package_does_not_import_torch():
    code = "import sys, blocktrain, blocktrain.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_training_and_evaluating_blocks_does_not_import_torchs_compiler():
    code = """
import sys
import numpy as np
from blocktrain.model.block import block_shapes
from blocktrain.model.stack import BlockModel
from blocktrain.spec import Denoise, Stacked, preset
from blocktrain.train.evaluate import evaluate, fit_combination
from blocktrain.train.trainer import BlockTrainer

text = np.frombuffer(b"so it goes, and so it went. " * 200, dtype=np.uint8)
for objective in (Stacked(), Denoise()):
    spec = preset("tiny").with_(objective=objective)
    block_shapes(spec, 0)
    BlockTrainer(spec, spec.phases[0], text, {}, compile=False).step()
    fit_combination(BlockModel(spec), text)
    evaluate(BlockModel(spec), text)
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_model_is_trained_and_scored_in_five_lines(tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"so it goes, and so it went. " * 200)
    spec = blocktrain.preset("tiny").with_(**{"corpus.source": str(text), "train.steps": 2})
    corpus = blocktrain.load_corpus(spec.corpus, spec.model.context)
    run = blocktrain.RunDirectory.create(str(tmp_path / "run"), spec, corpus.sha256)
    blocktrain.train_run(run, corpus)
    assert blocktrain.evaluate(blocktrain.load_model(run), corpus.valid)[-1].nats_per_byte < 5.6


def test_paths_may_be_strings(tmp_path: Path):
    path = str(tmp_path / "run")
    created = blocktrain.RunDirectory.create(path, blocktrain.preset("tiny"), "c0")
    assert blocktrain.RunDirectory.open(path).spec == created.spec == blocktrain.load_spec(f"{path}/spec.toml")
    assert blocktrain.load_model(path).spec == blocktrain.load_model(Path(path)).spec == created.spec
    assert blocktrain.preset("tiny").with_(**{"corpus.source": tmp_path}).corpus.source == str(tmp_path)
