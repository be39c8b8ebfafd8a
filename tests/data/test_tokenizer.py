"""Tokenizers: no byte is lost, equal texts give equal files, and which files are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from blocktrain.data.tokenizer import BpeTokenizer, ByteTokenizer, learn_tokenizer, learned_size, load_tokenizer
from blocktrain.errors import ConfigError

TEXTS = ["the people of the house", "the green river walked, the green river", "houses and people, Ünïcödé people"] * 9
LEARNED = learn_tokenizer(iter(TEXTS), 300)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(vocabulary: list[str], **parts: object) -> str:
    """A tokenizer.json without merges."""
    inner = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel()
    inner.decoder = decoders.ByteLevel()
    for name, part in parts.items():
        setattr(inner, name, part)
    return inner.to_str()


@given(st.binary(max_size=200))
def test_every_text_comes_back(data):
    for tokenizer in (LEARNED, ByteTokenizer()):
        tokens = tokenizer.encode(data)
        assert tokenizer.decode(tokens.tolist()) == data
        assert tokenizer.token_lengths.take(tokens).sum() == len(data)


@given(st.lists(st.text(max_size=50), max_size=5))
def test_many_texts_at_once_give_the_tokens_of_each(texts):
    for tokens, text in zip(LEARNED.encode_texts(texts), texts, strict=True):
        assert np.array_equal(tokens, LEARNED.encode(text.encode()))


def test_a_learned_tokenizer_writes_frequent_words_with_one_token():
    assert LEARNED.vocabulary == 300
    assert LEARNED.decode([LEARNED.encode(b" people").tolist()[0]]) == b" people"


def test_a_learned_tokenizer_is_the_same_on_every_machine():
    assert LEARNED.sha256 == "e98803c0ae1a63e02dad9a569cc1a6cf7f56427a623c3a0e924e7410eafdd17c"


@pytest.mark.parametrize("threads, hash_seed", [("1", "0"), ("2", "1")])
def test_equal_texts_give_an_equal_file_in_every_process(threads, hash_seed):
    code = (
        "import sys; from blocktrain.data.tokenizer import learn_tokenizer;"
        "print(learn_tokenizer(iter(eval(sys.argv[1])), 300).sha256)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, repr(TEXTS)],
        env={"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == LEARNED.sha256


def test_a_small_text_gives_fewer_tokens_than_asked_for():
    assert learn_tokenizer(iter(["ab ab"]), 5000).vocabulary == 258  # "ab" and " ab"


def test_a_file_is_loaded_as_it_was_written(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(LEARNED.file)
    again = load_tokenizer(str(path))
    assert (again.sha256, again.vocabulary, again.name) == (LEARNED.sha256, 300, str(path))
    assert load_tokenizer(f"hf:{tmp_path}").sha256 == LEARNED.sha256


def test_what_would_change_the_text_or_add_tokens_is_left_out():
    start = processors.TemplateProcessing(single="! $A", special_tokens=[("!", 0)])
    file = byte_level(ALPHABET, normalizer=normalizers.Lowercase(), post_processor=start)
    tokenizer = BpeTokenizer("file", file.encode(), "file")
    assert tokenizer.decode(tokenizer.encode(b"Hello  World").tolist()) == b"Hello  World"


def test_text_that_looks_like_a_special_token_is_text():
    inner = Tokenizer.from_str(byte_level(ALPHABET))
    inner.add_special_tokens(["<|end|>"])
    tokenizer = BpeTokenizer("file", inner.to_str().encode(), "file")
    assert tokenizer.vocabulary == 257
    assert 256 not in tokenizer.encode(b"one <|end|> two")
    assert tokenizer.decode([256]) == b"<|end|>"


@pytest.mark.parametrize(
    "file, complaint",
    [
        (byte_level(ALPHABET[3:]), r"not byte-complete: it has no token for 3 of 256 bytes, the first is 0x.*: give"),
        (byte_level([*ALPHABET, "你"]), r"not byte-level: its token '你' has the character '你'.*: give"),
        (byte_level(ALPHABET, pre_tokenizer=pre_tokenizers.Whitespace()), r"kind BPE and not a byte-level BPE.*: give"),
        (Tokenizer(models.WordPiece()).to_str(), r"of the kind WordPiece and not a byte-level BPE.*: give"),
        (json.dumps({"model": 3}), r"is not a tokenizer.json: give a file"),
        ("{", r"is not a tokenizer.json: give a file"),
        (json.dumps({"model": {"type": "BPE"}, "pre_tokenizer": {"type": "ByteLevel"}}), r"is not a tokenizer.json \("),
    ],
)
def test_a_file_that_cannot_write_every_text_is_refused(tmp_path, file, complaint):
    path = tmp_path / "tokenizer.json"
    path.write_text(file)
    with pytest.raises(ConfigError, match=complaint):
        load_tokenizer(str(path))


@pytest.mark.parametrize("choice", ["bpe:", "bpe:256", "bpe:-4", "bpe:9999999", "bpe:1e4"])
def test_a_size_that_is_none_is_refused(choice):
    with pytest.raises(ConfigError, match="has no usable size: write bpe:N with N from 257 to 1048576"):
        learned_size(choice)


def test_a_tokenizer_that_is_not_there_names_the_choices():
    with pytest.raises(ConfigError, match=r"not a readable file \(No such file.*: choose \"bytes\", \"bpe:N\""):
        load_tokenizer(str(Path("no") / "such.json"))


def test_a_name_that_the_hub_does_not_have_is_refused_with_a_way_to_go_on():
    code = "from blocktrain.data.tokenizer import load_tokenizer; load_tokenizer('hf:nobody/there-is-none')"
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    found = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True, check=False)
    assert 'ConfigError: tokenizer "hf:nobody/there-is-none" cannot be fetched' in found.stderr
    assert "or give the path of a tokenizer.json" in found.stderr


def test_bytes_load_no_library():
    code = "import sys; from blocktrain.data.corpus import load_corpus; print('tokenizers' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
