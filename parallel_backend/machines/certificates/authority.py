"""A private certificate authority."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_DAYS = 3650
_SKEW = timedelta(days=1)
"""By how much clocks may differ."""
_SERVER, _CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


@dataclass(frozen=True, kw_only=True)
class Signed:
    """A certificate and its key, as PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """Signs certificates for servers and for clients. Each is valid for one role, so a client cannot pose as a
    server."""

    def __init__(self, signed: Signed) -> None:
        self.signed = signed
        self._certificate = x509.load_pem_x509_certificate(signed.certificate)
        key = serialization.load_pem_private_key(signed.key, password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key = key
        if key.public_key() != self._certificate.public_key():
            raise ValueError("the key is not the certificate's")

    @classmethod
    def make(cls, *, days: int = CA_DAYS) -> "Authority":
        """Make a new authority, which nobody trusts yet."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("Parallel DiT authority")
        usage = _usage(key_cert_sign=True, crl_sign=True, digital_signature=True)
        builder = _builder(name, name, key.public_key(), _valid_for(days))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(usage, critical=True)
        return cls(_signed(builder.sign(key, hashes.SHA256()), key))

    def sign_server(self, hosts: Sequence[str], *, days: int) -> Signed:
        """Make the certificate of the machine that others reach by these names and IP addresses."""
        names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
        return self._sign("Parallel DiT backend", _SERVER, days, names)

    def sign_client(self, *, days: int) -> Signed:
        """Make the certificate of a machine that connects."""
        return self._sign("Parallel DiT client", _CLIENT, days)

    def _sign(
        self, name: str, purpose: x509.ObjectIdentifier, days: int, names: x509.SubjectAlternativeName | None = None
    ) -> Signed:
        key = ec.generate_private_key(ec.SECP256R1())
        begin, end = _valid_for(days)
        end = min(end, self._certificate.not_valid_after_utc)
        builder = _builder(_name(name), self._certificate.subject, key.public_key(), (begin, end))
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(digital_signature=True), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        builder = builder.add_extension(identifier, critical=False)
        if names is not None:
            builder = builder.add_extension(names, critical=False)
        return _signed(builder.sign(self._key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, valid: tuple[datetime, datetime]
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(valid[0]).not_valid_after(valid[1])
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _valid_for(days: int) -> tuple[datetime, datetime]:
    now = datetime.now(timezone.utc)
    end = now + timedelta(days=days)
    return min(now - _SKEW, end - _SKEW), end


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(**allowed: bool) -> x509.KeyUsage:
    uses = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
        "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    chosen: dict[str, Any] = {use: allowed.get(use, False) for use in uses}
    return x509.KeyUsage(**chosen)


def _signed(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Signed:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return Signed(
        certificate=certificate.public_bytes(encoding),
        key=key.private_bytes(encoding, form, serialization.NoEncryption()),
    )
