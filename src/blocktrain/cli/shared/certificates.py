"""The certificate of a service: the user's own files, or a self-signed one that clients know by its fingerprint; and
which services need one.
Next: http/server.py, which serves with it; swarm/worker/client.py, which pins it."""

from __future__ import annotations

import datetime
import hashlib
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from blocktrain.errors import ConfigError
from blocktrain.http.limits import is_loopback
from blocktrain.http.server import Tls
from blocktrain.io.private import write_private

CERT_FILE, KEY_FILE = "tls-cert.pem", "tls-key.pem"
CERTIFICATE_DAYS = 3650


def require_tls(host: str, has_tls: bool, insecure: bool, remedy: str = "give --tls-cert and --tls-key") -> None:
    """Other machines are reached over networks where everybody on the way can read and change plain HTTP."""
    if not (has_tls or insecure or is_loopback(host)):
        raise ConfigError(
            f"--host {host} without TLS shows secrets and texts to the whole network: {remedy}, or listen on 127.0.0.1 "
            f"behind a TLS proxy (or --insecure on a network you trust)"
        )


def check_tls_files(cert: Path | None, key: Path | None) -> None:
    if (cert is None) != (key is None):
        raise ConfigError("a certificate needs its key: give both --tls-cert and --tls-key, or neither")
    for path in (cert, key):
        if path is not None and not path.is_file():
            raise ConfigError(f"{path} is not a file: give the path of a PEM file")


def tls_files(folder: Path, name: str, cert: Path | None, key: Path | None) -> Tls:
    """The files given, which systems trust; or a self-signed certificate, made once, which clients pin."""
    if cert and key:
        return Tls(cert, key, None)
    cert, key = folder / CERT_FILE, folder / KEY_FILE
    if not (cert.exists() and key.exists()):
        _make_certificate(cert, key, name)
    try:
        der = x509.load_pem_x509_certificate(cert.read_bytes()).public_bytes(Encoding.DER)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{cert} cannot be used ({error}): delete it and {key} to get new ones") from None
    return Tls(cert, key, hashlib.sha256(der).hexdigest())


def _make_certificate(cert: Path, key: Path, name: str) -> None:
    """Self-signed. Clients compare the fingerprint, not the name, so one certificate serves for all addresses."""
    private = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "blocktrain coordinator")])
    now = datetime.datetime.now(datetime.UTC)
    identifier = x509.SubjectKeyIdentifier.from_public_key(private.public_key())
    usage = x509.KeyUsage(True, False, False, False, False, True, False, False, False)  # it signs itself and handshakes
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=CERTIFICATE_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(_dns_name(name))]), critical=False)
        .sign(private, hashes.SHA256())
    )
    write_private(key, private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    write_private(cert, certificate.public_bytes(Encoding.PEM))


def _dns_name(name: str) -> str:
    return name if name.isascii() and ":" not in name else "blocktrain"
