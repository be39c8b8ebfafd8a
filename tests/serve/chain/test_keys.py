"""The key of a chain, and which addresses need it."""

from __future__ import annotations

import pytest

from blocktrain.errors import ConfigError
from blocktrain.serve.chain.sockets import new_key_text, parse_address, read_key, require_key


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "chain.key"
    path.write_text(new_key_text())
    return path


def test_a_key_is_read_back_and_never_shown(key_file):
    key = read_key(key_file)
    assert key.secret.decode() in key_file.read_text()
    assert key.secret.decode() not in repr(key)


@pytest.mark.parametrize("change", [lambda text: text[: len(text) // 2], lambda text: text.replace("public", "p", 1)])
def test_a_damaged_key_is_refused(key_file, change):
    lines = key_file.read_text().splitlines(keepends=True)
    key_file.write_text(change("".join(lines[1:])))
    with pytest.raises(ConfigError, match="not a key that blocktrain keys wrote"):
        read_key(key_file)


def test_halves_of_two_keys_are_refused(tmp_path):
    first, second = (new_key_text().splitlines() for _ in range(2))
    path = tmp_path / "chain.key"
    path.write_text("\n".join([first[1], second[2]]))
    with pytest.raises(ConfigError, match="not a key"):
        read_key(path)


def test_a_missing_key_names_the_command_that_makes_one(tmp_path):
    with pytest.raises(ConfigError, match="blocktrain keys"):
        read_key(tmp_path / "none")


@pytest.mark.parametrize(
    "address", ["7001", "http://a:1", "tcp://a", "tcp://a:b", "tcp://a:70000", "tcp://:1", "tcp://a:0"]
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ConfigError, match="write for example tcp://"):
        parse_address(address)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:7001", "tcp://localhost:1", "tcp://127.9.9.9:1", "tcp://[::1]:1"])
def test_this_machine_needs_no_key(address):
    require_key(address, None, insecure=False)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:7001", "tcp://10.0.0.1:1", "tcp://example.org:1", "tcp://[::]:1"])
def test_other_machines_need_a_key_or_the_word_that_they_do_not(address, key_file):
    with pytest.raises(ConfigError, match=r"blocktrain keys chain\.key"):
        require_key(address, None, insecure=False)
    require_key(address, None, insecure=True)
    require_key(address, read_key(key_file), insecure=False)
