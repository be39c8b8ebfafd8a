"""Signatures: sign a message for a run, and check that it is from the key that it names and for this run. Ed25519 over
the run's id and the message's JSON without the signature. Next: ../wire/messages.py, what is signed."""

from __future__ import annotations

from typing import TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from blocktrain.errors import RequestRefused
from blocktrain.wire.messages import Signed

Kind = TypeVar("Kind", bound=Signed)


def sign(message: Kind, key: Ed25519PrivateKey, run: str) -> Kind:
    return message.model_copy(update={"signature": key.sign(message.signed_bytes(run)).hex()})


def is_signed(message: Signed, run: str) -> bool:
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(message.signer))
        public.verify(bytes.fromhex(message.signature), message.signed_bytes(run))
    except (InvalidSignature, ValueError):
        return False
    return True


def require_signature(message: Signed, run: str) -> None:
    if not is_signed(message, run):
        raise RequestRefused(
            "the signature is not the worker's for this run: sign with the key that asked, and with the run's id",
            code="signature",
        )


def public_half(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()
