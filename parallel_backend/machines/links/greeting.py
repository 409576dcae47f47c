"""A client's first bytes over TLS, which say who it is, and the answer, which may be a refusal.

A greeting is ``MAGIC``, a version, a ``Goal``, and a token, which may be empty for a client with a certificate. The
answer is one byte, and after ``REFUSED`` an error's code and sentence. Nothing passes the gateway before that.
"""

import struct
from dataclasses import dataclass

from ...errors import BackendError, ProtocolError, from_code, shortened
from ..certificates.tls import MAX_TOKEN

MAGIC = b"PDiT-TLS"
VERSION = 3
HEAD = struct.Struct("!8sHIH")
"""Magic, version, the goal, and the length of the token."""
ACCEPTED, REFUSED = b"\x01", b"\x00"
LENGTH = struct.Struct("!H")
"""The length of a refusal's text: code, line break, sentence."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The target of a connection: the supervisor, or the store of a set of ranks on several hosts.

    Attributes:
        generation: the set of ranks; 0 for the supervisor.
    """

    generation: int = 0


SUPERVISOR = Goal()


def pack(token: str, goal: Goal = SUPERVISOR) -> bytes:
    """Return a client's greeting."""
    encoded = token.encode()
    return HEAD.pack(MAGIC, VERSION, goal.generation, len(encoded)) + encoded


def unpack_head(head: bytes) -> tuple[Goal, int]:
    """Check the head of a greeting, and return its goal and the length of the token that follows.

    Raises:
        ProtocolError: it is not a greeting, or of another version.
    """
    magic, version, generation, length = HEAD.unpack(head)
    if magic != MAGIC:
        raise ProtocolError("the peer does not speak Parallel DiT's protocol")
    if version != VERSION:
        raise ProtocolError(
            f"the peer greets in version {version} and this gateway in version {VERSION}: install the same version of "
            "the extension on both machines"
        )
    if length > MAX_TOKEN:
        raise ProtocolError(f"a token of {length} bytes exceeds the limit of {MAX_TOKEN}")
    return Goal(generation=generation), int(length)


def pack_refusal(error: BackendError) -> bytes:
    """Return the answer to a refused client."""
    text = f"{error.code}\n{shortened(str(error))}".encode()[: (1 << 16) - 1]
    return REFUSED + LENGTH.pack(len(text)) + text


def unpack_refusal(text: bytes) -> BackendError:
    """Return the error in a refusal."""
    code, _, message = text.decode(errors="replace").partition("\n")
    return from_code(code, shortened(message))
