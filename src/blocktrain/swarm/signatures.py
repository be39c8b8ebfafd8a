"""Signatures: sign a message, and check that it is from the worker whose key it names. Ed25519 over the message's JSON
without the signature. Next: ../wire/messages.py, what is signed."""

from __future__ import annotations

from typing import TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from blocktrain.errors import RequestRefused
from blocktrain.wire.messages import Signed

Kind = TypeVar("Kind", bound=Signed)


def sign(message: Kind, key: Ed25519PrivateKey) -> Kind:
    return message.model_copy(update={"signature": key.sign(message.signed_bytes()).hex()})


def require_signature(message: Signed) -> None:
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(message.worker))
        public.verify(bytes.fromhex(message.signature), message.signed_bytes())
    except (InvalidSignature, ValueError):
        raise RequestRefused(
            "the signature is not the worker's: sign with the key that asked", code="signature"
        ) from None
