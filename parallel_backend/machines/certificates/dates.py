"""Until when a certificate is valid. The standard library says so only of those that a peer has sent."""

import ssl
from datetime import datetime, timezone

_VERSION, _UTC_TIME = 0xA0, 0x17
"""Tags of ASN.1: of the field that a certificate may begin with, and of a time with two digits for the year."""


def valid_until(pem: str) -> datetime:
    """Return until when the first certificate of a PEM file is valid.

    Raises:
        ValueError: it is no certificate.
    """
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    if begin not in pem or end not in pem:
        raise ValueError("there is no certificate")
    der = ssl.PEM_cert_to_DER_cert(pem[pem.index(begin) : pem.index(end) + len(end)])
    try:
        return _not_after(der)
    except IndexError as error:
        raise ValueError("a certificate is cut short") from error


def _not_after(der: bytes) -> datetime:
    """Read the second time of the field ``validity`` (RFC 5280, 4.1)."""
    _, certificate, _ = _element(der, 0)
    _, at, _ = _element(der, certificate)
    tag, _, end = _element(der, at)
    at = end if tag == _VERSION else at
    for _ in range(3):  # serial number, algorithm and issuer
        _, _, at = _element(der, at)
    _, validity, _ = _element(der, at)
    _, _, at = _element(der, validity)
    tag, start, end = _element(der, at)
    text = der[start:end].decode("ascii")
    year = "%y" if tag == _UTC_TIME else "%Y"
    return datetime.strptime(text, f"{year}%m%d%H%M%SZ").replace(tzinfo=timezone.utc)


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Return tag, beginning and end of the contents of the element that begins at ``at``."""
    length, start = der[at + 1], at + 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(der[at + 2 : start], "big")
    return der[at], start, start + length
