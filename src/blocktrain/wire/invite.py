"""The invite: one string that lets a machine join a run. It holds the address, a token and, where the coordinator
speaks TLS with a certificate of its own, that certificate's fingerprint.

    bt://HOST:PORT/#TOKEN          plain HTTP
    bts://HOST:PORT/#TOKEN         HTTPS with a certificate the system trusts
    bts://HOST:PORT/SHA256#TOKEN   HTTPS with exactly this certificate"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from blocktrain.errors import ConfigError

TOKEN = re.compile(r"[A-Za-z0-9_-]{16,128}")
FINGERPRINT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Invite:
    host: str
    port: int
    token: str
    tls: bool = False
    fingerprint: str | None = None  # sha256 of the certificate, hex

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{_bracketed(self.host)}:{self.port}"

    @property
    def page(self) -> str:
        """The dashboard, for a browser: what follows the # is never sent, so no log has the token."""
        return f"{self.url}/#{self.token}"

    def __str__(self) -> str:
        scheme = "bts" if self.tls else "bt"
        return f"{scheme}://{_bracketed(self.host)}:{self.port}/{self.fingerprint or ''}#{self.token}"


def parse_invite(text: str) -> Invite:
    """Refused with what is wrong with it; the token is never repeated in a message."""
    parts = urlsplit(text.strip())
    if parts.scheme not in ("bt", "bts"):
        raise _refused(f'it starts with "{parts.scheme}:"')
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise _refused("it names no host and port")
    if not TOKEN.fullmatch(parts.fragment):
        raise _refused("what follows # is no token (did the shell cut it off? put the invite in quotes)")
    fingerprint = parts.path.strip("/")
    if fingerprint and (parts.scheme == "bt" or not FINGERPRINT.fullmatch(fingerprint)):
        raise _refused("what stands before # is no certificate's fingerprint")
    return Invite(host, port, parts.fragment, parts.scheme == "bts", fingerprint or None)


def _refused(detail: str) -> ConfigError:
    return ConfigError(
        f"this is not an invite, {detail}: copy the whole line bt://HOST:PORT/…#… that blocktrain coordinator prints"
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
