from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.errors import ConfigError
from blocktrain.wire.invite import ADMIN_FILE, INVITE_FILE, Invite, parse_address, parse_invite, read_invite

TOKEN = "t0ken-of-sixteen_or-more"


@pytest.mark.parametrize(
    "invite",
    [
        Invite("127.0.0.1", 8000, TOKEN),
        Invite("swarm.example", 443, TOKEN, tls=True),
        Invite("::1", 8000, TOKEN, tls=True, fingerprint="ab" * 32),
        Invite("a", 1, TOKEN, others=(Invite("::1", 2, TOKEN), Invite("c", 3, TOKEN))),
        Invite("a", 1, TOKEN, True, "ab" * 32, others=(Invite("b", 2, TOKEN, True, "cd" * 32),)),
    ],
)
def test_an_invite_reads_back_as_it_was_written(invite):
    assert parse_invite(str(invite)) == invite


@pytest.mark.parametrize("tls", [False, True])
def test_the_url_of_the_dashboard_is_an_invite_too(tls):
    invite = Invite("host", 1, TOKEN, tls=tls)
    assert parse_invite(invite.page) == invite


def test_an_admins_command_takes_the_admins_invite_from_the_directory_of_a_coordinator(tmp_path):
    invites = {INVITE_FILE: Invite("host", 1, TOKEN), ADMIN_FILE: Invite("host", 1, TOKEN + "-admin")}
    for file, invite in invites.items():
        (tmp_path / file).write_text(f"{invite}\n")
    assert {file: read_invite(str(tmp_path), file) for file in invites} == invites


def test_an_invite_leads_to_its_coordinator():
    assert Invite("::1", 8000, TOKEN, tls=True).url == "https://[::1]:8000"


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("ftp://host:1/#" + TOKEN, 'starts with "ftp:"'),
        ("http://host:1/", "no access token"),
        ("bt://host/#" + TOKEN, "no host and port"),
        ("bt://host:99999/#" + TOKEN, "no host and port"),
        ("bt://host:1/", "in quotes"),
        ("bt://host:1/#short", "5 characters and is not a whole access token"),
        ("bts://host:1/abc#" + TOKEN, "fingerprint"),
        ("bt://host:1/" + "ab" * 32 + "#" + TOKEN, "fingerprint"),
        ("", "starts with"),
        ("bt://[::1:8000/#" + TOKEN, r"stands in brackets.*: copy the whole line"),
        ("bt://[nonsense]:8000/#" + TOKEN, "its host is not an address"),
        ("bt://a:1/,b/#" + TOKEN, "no host and port"),
        ("bt://a:1/" + ",b:2/" * 16 + "#" + TOKEN, "more than 16 coordinators"),
        ("bt://ho\u2100st:1/#" + TOKEN, "its host is not an address"),
    ],
)
def test_what_is_no_invite_is_refused_with_the_reason(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse_invite(text)


def test_a_refused_invite_does_not_show_its_token():
    with pytest.raises(ConfigError) as refused:
        parse_invite("bt://host/#" + TOKEN)
    assert TOKEN not in str(refused.value)


@pytest.mark.parametrize("text", ["", "b", "b:0", "b:1/short", "bt://b:1", "b:1,c:2"])
def test_what_is_no_address_of_another_coordinator_is_refused(text):
    with pytest.raises(ConfigError, match="not the address of a coordinator: give HOST:PORT"):
        parse_address(text, tls=False)


parts_of_invites = st.sampled_from(
    ["bt://", "bts://", ",", "[", "]", "::1", ":", "8000", "/", "#", "@", "%", TOKEN, "ab" * 32]
)


@given(st.lists(parts_of_invites | st.text(max_size=4), max_size=10).map("".join) | st.text())
def test_any_text_is_an_invite_or_refused_in_our_words(text):
    with suppress(ConfigError):
        invite = parse_invite(text)
        assert parse_invite(str(invite)) == invite


@given(st.binary())
def test_any_bytes_of_an_invite_file_are_an_invite_or_refused_in_our_words(data):
    with suppress(ConfigError):
        parse_invite("bt://" + data.decode(errors="replace"))
