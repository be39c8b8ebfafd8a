"""Models in transformers: the same logits and text as ours, and the folder that it loads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from blocktrain.cli.main import app
from blocktrain.data.corpus import load_corpus, with_tokenizer
from blocktrain.data.prepare import Plan, prepare
from blocktrain.data.tokenizer import learn_tokenizer, tokenizer_of_run
from blocktrain.errors import ConfigError
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.model.stack import BlockModel
from blocktrain.spec import preset
from blocktrain.train.run import load_model, train_run

TEXT = "Grüße: 99 bottles of beer.\n"
IDS = torch.tensor([list(TEXT.encode())])


@pytest.fixture(scope="module", autouse=True)
def transformers():
    """Imported when the first test runs: it takes seconds, and every process of a test run imports this file."""
    found = pytest.importorskip("transformers", reason="needs the extra: pip install 'blocktrain[hf]'")
    found.utils.logging.disable_progress_bar()
    return found


@pytest.fixture(scope="module")
def hf(transformers):
    from blocktrain import hf

    return hf


@pytest.fixture(scope="module", params=["stacked", "denoise"])
def exported(request, tmp_path_factory, hf) -> tuple[BlockModel, Path]:
    """(the model, its folder)"""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "text.txt").write_text("".join(f"{n} bottles of beer on the wall, " for n in range(500)))
    settings = {"corpus.source": str(folder / "text.txt"), "train.steps": 3, "objective": {"kind": request.param}}
    spec = preset("tiny").with_(**settings)
    corpus = load_corpus(spec.corpus, spec.model.context)
    run = RunDirectory.create(folder / "run", spec, corpus.sha256)
    train_run(run, corpus)
    hf.write_folder(run, folder / "hf")
    return load_model(run), folder / "hf"


@pytest.fixture(scope="module")
def loaded(exported, transformers):
    return transformers.AutoModelForCausalLM.from_pretrained(exported[1])


@pytest.fixture(scope="module")
def tokenizer(exported, transformers):
    return transformers.AutoTokenizer.from_pretrained(exported[1])


def test_the_logits_are_the_model_s(exported, loaded):
    """Equal except for rounding: kernels sum in another order when tensors are at other addresses."""
    assert torch.allclose(loaded(IDS).logits, exported[0].logits(IDS), atol=1e-5)


def test_no_path_of_the_corpus_leaves_this_machine(exported):
    folder = exported[1]
    assert '"source": "text.txt"' in (folder / "config.json").read_text()
    assert not [path for path in folder.iterdir() if str(folder.parent).encode() in path.read_bytes()]


def test_greedy_text_is_the_model_s_beyond_its_context_too(exported, loaded):
    ours = list(exported[0].generate(TEXT.encode(), 60, torch.Generator(), temperature=0))
    theirs = loaded.generate(IDS, max_new_tokens=60, do_sample=False)
    assert theirs[0, IDS.size(1) :].tolist() == ours


@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"do_sample": True, "top_k": 5}], ids=["beams", "drawn"])
def test_text_with_kv_caches_is_the_text_without_them(loaded, settings):
    def text(**more):
        torch.manual_seed(3)
        return loaded.generate(IDS, max_new_tokens=40, **{"do_sample": False, **settings}, **more).tolist()

    assert text() == text(use_cache=False)


def test_assisted_decoding_is_refused_with_the_remedy(loaded):
    with pytest.raises(ConfigError, match="does not decode with prompt_lookup_num_tokens: leave it out"):
        loaded.generate(IDS, max_new_tokens=12, prompt_lookup_num_tokens=3)


def test_padding_changes_nothing_for_the_other_rows(loaded):
    short = IDS[:, :7]
    for left, right in ((3, 0), (0, 3)):
        padded = torch.nn.functional.pad(short, (left, right), value=99)
        mask = torch.nn.functional.pad(torch.ones_like(short), (left, right))
        logits = loaded(padded, attention_mask=mask).logits
        assert torch.allclose(logits[:, left : left + 7], loaded(short).logits, atol=1e-6)


def test_the_tokenizer_pads_and_the_model_does_not_read_the_padding(loaded, tokenizer):
    rows = ["7", "7 bottles Ā \x00"]
    padded = tokenizer(rows, padding=True, return_tensors="pt")
    assert padded["attention_mask"].sum(1).tolist() == [1, 14]  # Ā has two bytes, like any other text
    assert tokenizer.batch_decode(tokenizer(rows)["input_ids"]) == rows
    alone = loaded(**tokenizer(rows[0], return_tensors="pt")).logits[0, 0]
    assert torch.allclose(loaded(**padded).logits[0, 0], alone, atol=1e-6)


def test_rows_padded_on_the_left_are_continued_as_if_alone(loaded):
    short = IDS[:, :7]
    alone = loaded.generate(short, max_new_tokens=5, do_sample=False)[0, 7:]
    padded = torch.nn.functional.pad(short, (IDS.size(1) - 7, 0))
    mask = torch.stack([torch.ones_like(IDS[0]), torch.nn.functional.pad(torch.ones(7).long(), (IDS.size(1) - 7, 0))])
    both = loaded.generate(torch.cat([IDS, padded]), attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert torch.equal(both[1, -5:], alone)


def test_the_loss_is_of_each_byte_from_those_before_it(loaded):
    by_hand = torch.nn.functional.cross_entropy(loaded(IDS).logits[0, :-1], IDS[0, 1:])
    assert torch.allclose(loaded(IDS, labels=IDS).loss, by_hand)


def test_more_than_the_context_is_refused_with_the_remedy(loaded):
    with pytest.raises(ConfigError, match="shorten the text"):
        loaded(torch.zeros(1, 65, dtype=torch.long))


@pytest.mark.parametrize("text", [TEXT, "", "Ċ Ā \x00\t", "日本語 🙂", "  two  spaces "])
def test_a_token_is_a_byte_and_comes_back(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text


def test_every_byte_has_its_own_number(tokenizer):
    assert sorted(tokenizer.get_vocab().values()) == list(range(256))


@pytest.mark.parametrize("exported", ["stacked"], indirect=True)
def test_without_importing_blocktrain_the_folder_s_own_code_is_trusted(exported, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code = (
        "import sys; from transformers import AutoModelForCausalLM as A; "
        "m = A.from_pretrained(sys.argv[1], trust_remote_code=True); print(type(m).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(exported[1])], capture_output=True, text=True)
    assert done.stdout == "BlockTrainForCausalLM\n", done.stderr


def test_the_folder_says_what_the_model_is(exported):
    config = json.loads((exported[1] / "config.json").read_text())
    assert config["model_type"] == "blocktrain"
    assert config["vocab_size"] == 256
    assert config["spec"] == exported[0].spec.without_paths().model_dump(mode="json")


@pytest.mark.parametrize("exported", ["stacked"], indirect=True)
def test_the_example_of_the_page_runs(exported, monkeypatch, capsys):
    page = (Path(__file__).parents[1] / "docs" / "hf.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(exported[1].parent)
    exec(compile(example, "docs/hf.md", "exec"), {})
    assert "The president" in capsys.readouterr().out


@pytest.mark.parametrize("exported", ["stacked"], indirect=True)
def test_the_command_writes_the_folder_from_a_run(exported, tmp_path):
    run = exported[1].parent / "run"
    for _ in range(2):  # the second renews the first
        result = CliRunner().invoke(app, ["export", str(run), "--hf", str(tmp_path / "hf")])
        assert result.exit_code == 0, result.stderr
    written = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    assert written == {path.name: path.read_bytes() for path in exported[1].iterdir()}


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["RUN"], "no output was given"),
        (["RUN", "out"], "run is not the directory of a coordinator, it has no invite"),
        (["no-such-run", "--hf", "out"], "is not a run directory"),
        (["RUN", "--hf", "RUN/spec.toml"], "is a file"),
    ],
)
def test_what_cannot_be_exported_is_refused(exported, tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    run = str(exported[1].parent / "run")
    result = CliRunner().invoke(app, ["export", *(each.replace("RUN", run) for each in arguments)])
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("exported", ["stacked"], indirect=True)
def test_without_the_extra_the_remedy_is_to_install_it(exported, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.utils", None)
    result = CliRunner().invoke(app, ["export", str(exported[1].parent / "run"), "--hf", str(tmp_path / "hf")])
    assert result.exit_code == 2
    assert "pip install 'blocktrain[hf]'" in result.stderr


@pytest.fixture(scope="module")
def with_its_tokenizer(tmp_path_factory, hf) -> tuple[RunDirectory, Path]:
    """(a run whose tokenizer is a file, the folder that it is exported to)"""
    folder = tmp_path_factory.mktemp("tokens")
    rows = [f"{n} bottles of beer on wall {n * n}, {n**3} bottles. " * 9 for n in range(200)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    (folder / "mine.json").write_bytes(learn_tokenizer(iter(rows), 300).file)
    plan = Plan((str(folder / "rows.jsonl"),), str(folder / "mine.json"), 0.1, 0.1)
    spec = preset("tiny").with_(**{"corpus.source": str(prepare(plan, folder / "corpus").folder), "train.steps": 2})
    text = load_corpus(spec.corpus, spec.model.context)
    run = RunDirectory.create(folder / "run", with_tokenizer(spec, text), text.sha256)
    run.save_tokenizer(text.tokenizer.file)
    train_run(run, text)
    hf.write_folder(run, folder / "hf")
    return run, folder / "hf"


def test_a_run_with_a_tokenizer_exports_its_token_ids_and_logits(with_its_tokenizer, transformers):
    run, folder = with_its_tokenizer
    ours = tokenizer_of_run("mine.json", run.tokenizer_file())
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for prompt in ("7 bottles of beer", "Ünïcödé  <|end|>\n", "Ā \x00", ""):
        ids = ours.encode(prompt.encode()).tolist()
        assert theirs(prompt).input_ids == ids
        assert theirs.decode(ids) == prompt
    ids = torch.tensor([ours.encode(b"7 bottles of beer").tolist()])
    assert torch.allclose(loaded(ids).logits, load_model(run).logits(ids), atol=1e-5)


def test_a_tokenizer_of_a_run_pads_and_the_model_does_not_read_the_padding(with_its_tokenizer, transformers):
    theirs = transformers.AutoTokenizer.from_pretrained(with_its_tokenizer[1])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(with_its_tokenizer[1])
    rows = ["7", "7 bottles of beer"]
    padded = theirs(rows, padding=True, return_tensors="pt")
    assert len(theirs) == loaded.config.vocab_size == 300
    assert padded["attention_mask"].sum(1).tolist() == [len(theirs(row).input_ids) for row in rows]
    alone = loaded(**theirs(rows[0], return_tensors="pt")).logits[0, 0]
    assert torch.allclose(loaded(**padded).logits[0, 0], alone, atol=1e-6)


def test_no_path_of_the_tokenizer_leaves_this_machine(with_its_tokenizer):
    folder = with_its_tokenizer[1]
    assert '"tokenizer": "mine.json"' in (folder / "config.json").read_text()
    assert not [path for path in folder.iterdir() if str(folder.parent).encode() in path.read_bytes()]
