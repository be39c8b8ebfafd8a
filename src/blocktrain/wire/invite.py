"""The invite: one string that lets a machine join a run. It holds the coordinator's address, an access token and, if
the coordinator uses TLS with a self-signed certificate, the fingerprint of that certificate. Sends nothing itself.
Next: swarm/worker/client.py, which connects with it.

    bt://HOST:PORT/#TOKEN          plain HTTP
    bts://HOST:PORT/#TOKEN         HTTPS with a certificate that the system trusts
    bts://HOST:PORT/SHA256#TOKEN   HTTPS with exactly this certificate
    bt://HOST:PORT/,HOST:PORT/#TOKEN   several coordinators of one run: whoever loses one goes on with the next"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from blocktrain.errors import ConfigError

ACCESS_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,128}")
INVITE_FILE, ADMIN_FILE = "invite", "invite-admin"  # in a coordinator's directory
PAGES = {"http": "bt", "https": "bts"}  # the dashboard's URL holds an access token too
MOST_CHARACTERS = 2000  # of a file: an invite is much shorter
MOST_COORDINATORS = 16
FINGERPRINT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Invite:
    host: str
    port: int
    access_token: str
    tls: bool = False
    fingerprint: str | None = None  # SHA-256 of the certificate, in hex
    others: tuple[Invite, ...] = ()  # the same run at its other coordinators; these have no others themselves

    @property
    def places(self) -> tuple[Invite, ...]:
        """One invite per coordinator."""
        return (replace(self, others=()), *self.others)

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self._address}"

    @property
    def page(self) -> str:
        """The dashboard's URL. A browser never sends what follows the #, so the access token appears in no log."""
        return f"{self.url}/#{self.access_token}"

    @property
    def _address(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"

    def __str__(self) -> str:
        addresses = ",".join(f"{place._address}/{place.fingerprint or ''}" for place in self.places)
        return f"{'bts' if self.tls else 'bt'}://{addresses}#{self.access_token}"


def bracketed(host: str) -> str:
    """As it is written before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def parse_invite(text: str) -> Invite:
    """ConfigError names what is wrong. No message repeats the access token."""
    start, hash_sign, token = text.strip().partition("#")
    first, *more = start.split(",")
    if len(more) >= MOST_COORDINATORS:
        raise _refused(f"it names more than {MOST_COORDINATORS} coordinators")
    scheme, separator, place = first.partition("://")
    scheme = PAGES.get(scheme, scheme)
    invite = _parse_one(scheme + separator + place + hash_sign + token)
    return replace(invite, others=tuple(_parse_one(f"{scheme}://{each}{hash_sign}{token}") for each in more))


def parse_address(text: str, tls: bool) -> tuple[str, int, str | None]:
    """HOST:PORT of another coordinator, or HOST:PORT/SHA256 if its certificate is self-signed."""
    try:
        place = _parse_one(f"{'bts' if tls else 'bt'}://{text.strip()}#{'x' * 16}")
    except ConfigError:
        raise ConfigError(
            f'"{text}" is not the address of a coordinator: give HOST:PORT as in its invite, with TLS and a '
            f"certificate of its own HOST:PORT/SHA256"
        ) from None
    return place.host, place.port, place.fingerprint


def _parse_one(text: str) -> Invite:
    try:
        parts = urlsplit(text)
    except ValueError:  # a bracket of an IPv6 address is missing, or what it holds is no address
        raise _refused("its host is not an address (an IPv6 address stands in brackets, bt://[::1]:PORT/)") from None
    if parts.scheme not in ("bt", "bts"):
        raise _refused(f'it starts with "{parts.scheme}:"')
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise _refused("it names no host and port")
    if not parts.fragment:
        raise _refused("no access token follows the # (did the shell cut it off? put the invite in quotes)")
    if not ACCESS_TOKEN.fullmatch(parts.fragment):
        raise _refused(f"what follows the # has {len(parts.fragment)} characters and is not a whole access token")
    fingerprint = parts.path.strip("/")
    if fingerprint and (parts.scheme == "bt" or not FINGERPRINT.fullmatch(fingerprint)):
        raise _refused("the part before the # is not the fingerprint of a certificate")
    return Invite(host, port, parts.fragment, parts.scheme == "bts", fingerprint or None)


def read_invite(text: str, file: str = INVITE_FILE) -> Invite:
    """An invite, a file that holds one, or the directory of a coordinator, which has this file."""
    path = Path(text)
    if not text.strip():
        raise _refused("it is empty")
    if "://" not in text and not path.exists():
        raise _refused("and no file or directory of this name is here")
    if "://" in text:
        return parse_invite(text)
    if path.is_dir():
        path = path / file
        if not path.exists():
            raise ConfigError(
                f"{text} is not the directory of a coordinator, it has no {file}: give the invite bt://…#…, "
                f"or the --dir of blocktrain coordinator"
            )
    try:
        found = path.read_text(encoding="utf-8", errors="replace")[:MOST_CHARACTERS]
        if "://" not in found:
            raise ConfigError(
                f"{path} holds no invite: give the file that blocktrain coordinator wrote it to, or its --dir"
            )
        return parse_invite(found)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): give the invite bt://…#…, or the file that blocktrain "
            f"coordinator wrote it to"
        ) from None


def _refused(detail: str) -> ConfigError:
    return ConfigError(
        f"this is not an invite, {detail}: copy the whole line bt://HOST:PORT/…#… that blocktrain coordinator prints"
    )
