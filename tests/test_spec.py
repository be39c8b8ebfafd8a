"""RunSpec: which settings are refused with which message, and which phases a run has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from blocktrain.errors import ConfigError
from blocktrain.presets import PRESETS
from blocktrain.spec import (
    Denoise,
    EndToEnd,
    ModelSpec,
    Objective,
    RunSpec,
    Stacked,
    TrainSpec,
    first_difference,
    load_spec,
    parse_spec,
    preset,
    settings_of,
)

SIMULTANEOUS = Stacked(schedule="simultaneous", scaffold=0, lookahead=1)


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def layout(objective: Objective, blocks: int) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    spec = RunSpec(model=ModelSpec(blocks=blocks, layers=blocks), objective=objective)
    return [(phase.blocks, phase.below, phase.ahead) for phase in spec.phases]


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("sede = 1", r"unknown key sede: did you mean seed\?"),
        ("[model]\nwidht = 64", r"unknown key model.widht: did you mean model.width\?"),
        (
            "[objective]\nkind = 'denoise'\nsigma_mim = 1.0",
            r"unknown key objective.sigma_mim: did you mean objective.sigma_min\?",
        ),
        ("[model]\nzzz = 1", r"unknown key model.zzz: remove it"),
        ("steps = 10", r"unknown key steps: did you mean train.steps\?"),
        ("[train]\nwidth = 64", r"unknown key train.width: did you mean model.width\?"),
        ("[training]\nsteps = 10", r"unknown key training: did you mean train\?"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(tmp_path, text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        load_spec(toml(tmp_path, text))


@pytest.mark.parametrize(
    "text, complaint",
    [
        (
            "[model]\ntable_rank = 500",
            r"model.table_rank = 500 is larger than model.width = 128: give",
        ),
        (
            "[model]\ntable_rank = 16\n[objective]\nkind = 'stacked'\nstate_dropout = 0.2",
            r"objective.state_dropout = 0.2 needs blocks that read the tokens themselves.*: set model.table_rank = 128",
        ),
        ("[model]\nvocabulary = 1", r"model.vocabulary = 1: input should be greater than or equal to 2"),
        ("[model]\nwidth = 100\nheads = 8", r"model.width = 100 must be divisible by 2 \* model.heads = 16"),
        (
            "[model]\nlayers = 6\nblocks = 4",
            r"model.layers = 6 is not divisible by model.blocks = 4: change one, or list",
        ),
        ("[model]\nlayers = [1, 2]\nblocks = 3", r"model.layers lists 2 blocks, model.blocks = 3"),
        ("[model]\nphysical_layers = 3", r"gives block 0 3 real layers for its 2 layers: give 1 to 2, or leave it out"),
        ("[model]\nphysical_layers = [1, 1, 3, 1]", r"gives block 2 3 real layers for its 2 layers"),
        ("[model]\nphysical_layers = [1, 1]", r"model.physical_layers lists 2 blocks, model.blocks = 4"),
        ("[model]\nphysical_layers = 0", r"model.physical_layers = 0: input should be greater than or equal to 1"),
        ("[model]\nblocks = 0", r"model.blocks = 0: input should be greater than or equal to 1"),
        ("[model]\nblocks = 2147483648", r"model.blocks = 2147483648: input should be less than or equal to 1024"),
        ("[corpus]\nvalid_share = 1.0", r"corpus.valid_share = 1.0: input should be less than 1"),
        ("[objective]\nkind = 'denoise'\nsigma_min = 3.0\nsigma_max = 3.0", r"sigma_min = 3.0 must be below .*= 3.0"),
        ("[objective]\nkind = 'stacked'\nschedule = 'simultaneous'", r"set scaffold = 0"),
        ("[objective]\nkind = 'stacked'\nlookahead = 1", r"needs later blocks.*set lookahead = 0"),
        ("[train]\nsteps = [1, 2]", r"train.steps lists 2 numbers and this run has 3 phases: give one number, or 3"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_with_its_value(tmp_path, text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        load_spec(toml(tmp_path, text))


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("interval = 1", r"unknown key interval"),
        ("stacked = 1", r"unknown key stacked"),
        ("[model]\nlayers = 0", r"model.layers = 0: input should be greater than or equal to 1"),
        ("[model]\nlayers = [2, 0]\nblocks = 2", r"model.layers.1 = 0: input should be greater than or equal to 1"),
    ],
)
def test_a_key_that_looks_like_a_type_s_name_is_still_named(tmp_path, text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        load_spec(toml(tmp_path, text))


@pytest.mark.parametrize("text, complaint", [(None, "does not exist: give the path"), ("= 3", "not a readable TOML")])
def test_a_file_that_is_no_toml_is_named(tmp_path, text, complaint):
    path = tmp_path / "run.toml" if text is None else toml(tmp_path, text)
    with pytest.raises(ConfigError, match=rf"run.toml .*{complaint}"):
        load_spec(path)


@pytest.mark.parametrize(
    "source, name",
    [
        ("sotu", "sotu"),
        ("/home/ada/notes.txt", "notes.txt"),
        ("texts/novels/", "novels"),
        (".", "text"),
        ("hf:wikitext:wikitext-2-raw-v1", "hf:wikitext:wikitext-2-raw-v1"),
        ("hf:roneneldan/TinyStories", "hf:roneneldan/TinyStories"),
        ("hf:/home/ada/notes.jsonl::body", "hf:notes.jsonl::body"),
        ("hf:private/notes.csv", "hf:notes.csv"),
    ],
)
def test_others_get_a_corpus_by_its_name_and_no_path(source, name):
    spec = preset("tiny").with_(**{"corpus.source": source})
    assert spec.without_paths() == preset("tiny").with_(**{"corpus.source": name})


@pytest.mark.parametrize(
    "tokenizer, name",
    [
        ("bytes", "bytes"),
        ("bpe:4096", "bpe:4096"),
        ("/home/ada/mine.json", "mine.json"),
        ("../mine.json", "mine.json"),
        ("hf:Qwen/Qwen2.5-0.5B", "hf:Qwen/Qwen2.5-0.5B"),
        ("hf:/home/ada/mine", "hf:mine"),
    ],
)
def test_others_get_a_tokenizer_by_its_name_and_no_path(tokenizer, name):
    spec = preset("tiny").with_(**{"corpus.tokenizer": tokenizer})
    assert spec.without_paths().corpus.tokenizer == name


@pytest.mark.parametrize(
    "setting", ['partition = "adaptive"', "edges = [10.0, 7.0, 4.5, 2.0, 1.0]", 'evidence = "closed"']
)
def test_a_removed_setting_is_refused_with_its_value_and_the_remedy(tmp_path, setting):
    with pytest.raises(
        ConfigError, match=rf"objective.{re.escape(setting)} was removed, because .*: delete the key, or use"
    ):
        load_spec(toml(tmp_path, f"[objective]\nkind = 'denoise'\n{setting}"))


@pytest.mark.parametrize("setting", ["partition = 'lognormal'", "evidence = 'learned'"])
def test_a_removed_setting_at_its_default_is_read_with_a_warning(tmp_path, setting):
    with pytest.warns(FutureWarning, match=r"run.toml: objective.\w+ was removed and has no effect: delete the key"):
        spec = load_spec(toml(tmp_path, f"[objective]\nkind = 'denoise'\n{setting}"))
    assert spec.objective == Denoise()


AS_BEFORE = {"swarm.averaging": "mean", "swarm.max_norm_factor": 20.0, "swarm.audit_share": 0.0}  # older defaults
OLD_DENOISE = (
    '{"kind":"denoise","sigma_min":1.0,"sigma_max":10.0,"p_mean":-1.2,"p_std":1.2,"sigma_data":0.5,"overlap":0.05,'
    '"partition":"lognormal","edges":null,"evidence":"learned","span_share":0.0}'
)


def test_a_spec_that_an_older_version_stored_is_the_same_spec_with_the_same_digest():
    spec = RunSpec.model_validate_json(f'{{"objective":{OLD_DENOISE}}}')
    assert spec == RunSpec(objective=Denoise())
    assert spec.with_(**AS_BEFORE).digest() == "febc580e1bec4bbf89f1f82b7cba148d4d4f3333ac6d5cdc197f286f66ba4f6f"


def test_a_setting_cannot_be_changed_in_place():
    with pytest.raises(ValidationError, match="frozen"):
        preset("tiny").seed = 1


@pytest.mark.parametrize(
    "objective, blocks, phases",
    [
        (Stacked(scaffold=0), 3, [((0,), (), ()), ((1,), (0,), ()), ((2,), (0, 1), ())]),
        (Stacked(scaffold=1), 4, [((0, 1), (), ()), ((1, 2), (0,), ()), ((2, 3), (0, 1), ())]),
        (Stacked(scaffold=2), 4, [((0, 1, 2), (), ()), ((1, 2, 3), (0,), ())]),
        (Stacked(scaffold=9), 2, [((0, 1), (), ())]),
        (Stacked(), 1, [((0,), (), ())]),
        (SIMULTANEOUS, 3, [((0,), (), (1,)), ((1,), (0,), (2,)), ((2,), (0, 1), ())]),
        (Denoise(), 3, [((0,), (), ()), ((1,), (), ()), ((2,), (), ())]),
        (EndToEnd(), 3, [((0, 1, 2), (), ())]),
        (EndToEnd(), 1, [((0,), (), ())]),
    ],
)
def test_the_phases_train_every_block_on_what_is_below_it(objective, blocks, phases):
    assert layout(objective, blocks) == phases


@pytest.mark.parametrize(
    "objective, group_sizes", [(Stacked(), [1, 1, 1]), (SIMULTANEOUS, [4]), (Denoise(), [4]), (EndToEnd(), [1])]
)
def test_only_a_progressive_stack_waits_for_the_phase_before(objective, group_sizes):
    assert [len(group) for group in RunSpec(objective=objective).groups] == group_sizes


def test_a_phase_takes_its_own_number_of_steps():
    spec = RunSpec(train=TrainSpec(steps=(5, 6, 7)))
    assert [(phase.index, phase.block, phase.steps) for phase in spec.phases] == [(0, 0, 5), (1, 1, 6), (2, 2, 7)]


def test_a_weak_machine_can_take_a_small_block():
    model = ModelSpec(blocks=3, layers=(1, 2, 4))
    assert [model.layers_of(block) for block in range(3)] == [1, 2, 4]
    assert model.total_layers == 7


@pytest.mark.parametrize("physical, real", [(None, [2, 3, 4]), (1, [1, 1, 1]), ((2, 1, 3), [2, 1, 3])])
def test_a_block_may_have_fewer_real_layers_than_it_walks_over(physical, real):
    model = ModelSpec(blocks=3, layers=(2, 3, 4), physical_layers=physical)
    assert [model.physical_layers_of(block) for block in range(3)] == real
    assert [model.layers_of(block) for block in range(3)] == [2, 3, 4]


def test_layers_are_shared_equally_by_default():
    assert [ModelSpec(blocks=4, layers=8).layers_of(block) for block in range(4)] == [2, 2, 2, 2]


def test_a_toml_file_starts_from_its_preset(tmp_path):
    spec = load_spec(toml(tmp_path, 'preset = "small"\nseed = 7\n[train]\nsteps = 3'))
    assert spec == preset("small").with_(**{"seed": 7, "train.steps": 3})
    assert spec.train.windows == preset("small").train.windows


def test_an_objective_of_another_kind_replaces_the_preset_s(tmp_path):
    spec = load_spec(toml(tmp_path, 'preset = "small"\n[objective]\nkind = "denoise"\noverlap = 0.1'))
    assert spec.objective == Denoise(overlap=0.1)


def test_an_unknown_preset_lists_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match=r'no preset "smal": choose one of tiny, small, 1M, wikitext, '):
        load_spec(toml(tmp_path, 'preset = "smal"'))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_json(name):
    assert parse_spec(preset(name).model_dump(mode="json"), origin="test") == preset(name)


def test_a_shape_without_shared_layers_is_written_as_before_there_were_any():
    assert "physical_layers" not in preset("tiny").model_dump_json()


def test_shared_layers_survive_json_and_can_be_taken_back():
    shared = preset("tiny").with_(**{"model.layers": 8, "model.physical_layers": [1, 2, 1, 1]})
    assert parse_spec(shared.model_dump(mode="json"), origin="test") == shared
    assert shared.with_(**{"model.layers": 4, "model.physical_layers": None}) == preset("tiny")


def test_equal_specs_have_equal_digests():
    assert RunSpec().digest() == RunSpec(model=ModelSpec()).digest()


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"model.width": 64}, {"model.physical_layers": 1}, {"corpus.source": "x"}, {"objective": Denoise()}],
)
def test_any_setting_changes_the_digest(change):
    assert RunSpec().digest() != RunSpec().with_(**change).digest()


def test_a_change_is_checked_again():
    with pytest.raises(ConfigError, match=r"the changed settings: model.width = 100 must be divisible"):
        RunSpec().with_(**{"model.width": 100})


@pytest.mark.parametrize(
    "name, changes, digest",
    [
        ("tiny", {}, "e00a727dc31fcb2c"),
        ("small", {}, "9a489b4d77d9a1ba"),
        ("paper", {"objective": Stacked()}, "1a79559d5bbae6b9"),
    ],
)
def test_a_run_on_bytes_keeps_the_digest_it_had_before_there_were_tokenizers(name, changes, digest):
    spec = preset(name).with_(**AS_BEFORE, **changes)
    assert spec.digest().startswith(digest)
    assert spec.with_(**{"corpus.tokenizer": "bytes"}).digest().startswith(digest)


@pytest.mark.parametrize(
    "key, value", [("corpus.tokenizer", "bpe:512"), ("corpus.tokenizer_sha256", "a" * 64), ("model.vocabulary", 512)]
)
def test_a_tokenizer_changes_the_digest_and_survives_a_dump(key, value):
    spec = preset("tiny").with_(**{key: value})
    assert spec.digest() != preset("tiny").digest()
    assert RunSpec.model_validate(spec.model_dump(mode="json")) == spec


def test_memory_settings_are_no_part_of_what_a_run_is():
    spec = preset("tiny")
    own = spec.with_(**{"train.micro_windows": 2, "train.checkpoint_activations": False})
    assert own.digest() == spec.digest()
    assert own.without_paths() == spec.without_paths()
    assert first_difference(own, spec) is None
    assert parse_spec(settings_of(own), "a file") == own


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"train.micro_windows": 9}, "train.micro_windows = 9 is more than train.windows = 8"),
        ({"train.micro_windows": 2, "objective": Denoise()}, "denoise draws its noise for all windows of a step"),
        ({"train.freeze": [4]}, r"train.freeze = \[4\] must name blocks from 0 to 3, each once"),
        ({"train.freeze": [0, 0]}, "each once"),
        ({"train.freeze": [0, 1, 2, 3]}, "leaves no block to train: name fewer than 4"),
        ({"train.freeze": [0, 2]}, r"a block that is trained below a frozen one: .* for example \[0, 1\]"),
    ],
)
def test_memory_and_frozen_blocks_are_checked(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        preset("tiny").with_(**changes)
