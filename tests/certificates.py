"""Certificates of one's own, made for a test."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Pair(NamedTuple):
    """The files of a certificate and its key, as the settings name them."""

    tls_cert: str
    tls_key: str

    def trusted(self) -> ssl.SSLContext:
        """What a client needs that trusts this certificate."""
        return ssl.create_default_context(cafile=self.tls_cert)


def make_pair(folder: Path, name: str = "node", days: int = 30, password: bytes = b"") -> Pair:
    """A certificate for localhost and 127.0.0.1 that its own key signed.

    days: until its end, which is in the past if they are negative.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    names = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
    end = datetime.now(UTC) + timedelta(days=days)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(end - timedelta(days=60))
        .not_valid_after(end)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password:
        encryption = serialization.BestAvailableEncryption(password)
    pair = Pair(str(folder / f"{name}.pem"), str(folder / f"{name}.key"))
    Path(pair.tls_cert).write_bytes(certificate.public_bytes(pem))
    Path(pair.tls_key).write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, encryption)
    )
    return pair
