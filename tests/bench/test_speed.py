"""The speed of a worker at its quick size, and the parts of its measurement."""

import json
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from blocktrain.data.prepare import Plan, prepare
from blocktrain.spec import preset


@pytest.fixture(scope="module")
def speed(bench):
    return bench("training.speed")


@pytest.fixture(scope="module")
def memory(bench):
    return bench("training.memory")


@pytest.fixture(scope="module")
def written(bench, tmp_path_factory, small_text):
    """One quick run of the whole script."""
    out = tmp_path_factory.mktemp("speed")
    bench("speed").main(["--quick", "--corpus", str(small_text), "--out", str(out)])
    assert (out / "speed.html").is_file()
    return out


@pytest.fixture(scope="module")
def document(written):
    return json.loads((written / "speed.json").read_text())


@pytest.mark.parametrize("name", ["tiny", "novels"])
def test_a_prepared_corpus_brings_its_tokenizer_to_every_experiment(bench, tmp_path, name):
    (tmp_path / "rows.txt").write_text("".join(f"{n} bottles of beer on wall {n * n}.\n\n" for n in range(3000)))
    folder = prepare(Plan((str(tmp_path / "rows.txt"),), "bpe:300"), tmp_path / "corpus").folder
    spec, corpus = bench("shared.experiment").with_text(preset(name).with_(**{"model.context": 64}), str(folder))
    assert (spec.corpus.tokenizer, spec.model.vocabulary) == ("bpe:300", 300)
    assert spec.corpus.tokenizer_sha256 == corpus.tokenizer.sha256


def test_prompts_are_taken_from_a_prepared_corpus_as_from_its_text(bench, tmp_path):
    text = "".join(f"{n} bottles of beer on wall {n * n}.\n\n" for n in range(3000))
    (tmp_path / "rows.txt").write_text(text)
    folder = prepare(Plan((str(tmp_path / "rows.txt"),), "bpe:300"), tmp_path / "corpus").folder
    _, corpus = bench("shared.experiment").with_text(preset("tiny"), str(folder))
    found = bench("serving.models").held_out_texts(corpus, 3, 16, 16)
    assert all((prompt + following).decode() in text for prompt, following in found)


def test_every_phase_and_the_reference_are_timed(document):
    speed = document["speed"]
    assert [row["name"] for row in speed["steps"]] == ["phase 0", "phase 1", "phase 2", "end to end"]
    assert all(row["seconds"] > 0 and row["of_matmul"] > 0 for row in speed["steps"])
    assert speed["steps"][-1]["of_reference"] == 1
    assert all(loop["ratio"] > 0 for loop in speed["loop"])


def test_the_shares_of_a_step_are_all_of_it(document):
    shares = {kind: share for kind, share in document["speed"]["shares"].items() if kind != "of"}
    assert shares.keys() == {"matmul", "attention", "optimiser", "data", "other"}
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) > 0


def test_the_section_says_whether_the_loop_is_fast_enough(bench, document):
    loop = document["speed"]["loop"][0]
    loop |= {"ratio": 0.899}
    verdict = bench("speed").verdicts(document)[0]
    assert (verdict.ours, verdict.goal, verdict.reached) == ("0.899", "≥ 0.9", False)
    assert f"- goal: {verdict.what} ≥ 0.9: not reached (0.899)" in bench("speed").section(document)


def test_turns_alternate_in_order_and_compare_within_a_turn(speed):
    order, ticks = [], count()
    contestants = {name: lambda name=name: order.append(name) for name in "ab"}
    times = speed.take_turns(contestants, turns=2, clock=lambda: next(ticks))
    assert order == ["a", "b", "b", "a"]
    assert times.seconds == {"a": [1, 1], "b": [1, 1]}
    slowed = speed.Times({"a": [1.0, 10.0, 1.0], "b": [2.0, 20.0, 2.0]})
    assert slowed.ratio("b", to="a") == 2


@pytest.mark.parametrize(
    "names, kind",
    [
        (["aten::mm", "step"], "matmul"),
        (["aten::bmm", "optimiser", "step"], "optimiser"),
        (["aten::copy_", "aten::to", "data", "step"], "data"),
        (["aten::_scaled_dot_product_flash_attention_for_cpu", "step"], "attention"),
        (["step"], "other"),
        (["aten::mm"], None),
    ],
)
def test_an_operation_belongs_to_the_span_around_it(speed, names, kind):
    event = None
    for name in reversed(names):
        event = SimpleNamespace(name=name, cpu_parent=event)
    assert speed.kind_of(event) == kind


def test_the_bare_loop_trains_what_the_trainer_trains(memory, speed, small_text):
    """Same layers, same first batch, same update: the comparison is of equal work."""
    spec = preset("tiny").with_(**{"corpus.source": str(small_text)})
    corpus = memory.load_corpus(spec.corpus, spec.model.context)
    case = memory.Case("", spec, 2)
    ours = memory.BlockTrainer(spec, case.phase, corpus.train, memory.snapshots_of(case), compile=False)
    bare = speed.BareLoop(spec, case.phase, corpus.train, compiled=False)
    for block in ours.trained:
        block.load_state_dict(bare._trained[block.index - case.phase.block].state_dict())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blocktrain.train.trainer.lr_factor", lambda *_: 1.0)
        ours.step()
    bare.step()
    for mine, theirs in zip(ours.trained, bare._trained, strict=True):
        for name, tensor in mine.state_dict().items():
            torch.testing.assert_close(tensor, theirs.state_dict()[name], msg=name)
