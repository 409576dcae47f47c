"""What a client says first over TLS, and what it is answered: who it is, and why it is refused.

A greeting is ``MAGIC``, a version, whom the client wants to reach, and a token, which may be empty for a client with a
certificate. That is the supervisor, or the store of one set of ranks, for ranks of another host. The answer is one
byte, and after ``REFUSED`` an error's code and sentence. Nothing else has passed the gateway until then.
"""

import struct

from ..errors import BackendError, ProtocolError, from_code, shortened
from .tls import MAX_TOKEN

MAGIC = b"PDiT-TLS"
VERSION = 1
HEAD = struct.Struct("!8sHIH")
"""Magic, version, the generation whose store is wanted or ``SUPERVISOR``, and the length of the token."""
SUPERVISOR = 0
ACCEPTED, REFUSED = b"\x01", b"\x00"
LENGTH = struct.Struct("!H")
"""The length of a refusal's text: code, line break, sentence."""


def pack(token: str, *, store: int = SUPERVISOR) -> bytes:
    """Return a client's greeting. ``store`` is the generation whose store is wanted."""
    encoded = token.encode()
    return HEAD.pack(MAGIC, VERSION, store, len(encoded)) + encoded


def unpack_head(head: bytes) -> tuple[int, int]:
    """Check the head of a greeting, and return whose store is wanted and how many bytes of the token follow.

    Raises:
        ProtocolError: it is not one, or of another version.
    """
    magic, version, store, length = HEAD.unpack(head)
    if magic != MAGIC:
        raise ProtocolError("the peer does not speak Parallel DiT's protocol")
    if version != VERSION:
        raise ProtocolError(
            f"the peer greets in version {version} and this gateway in version {VERSION}: install the same version of "
            "the extension on both machines"
        )
    if length > MAX_TOKEN:
        raise ProtocolError(f"a token of {length} bytes exceeds the limit of {MAX_TOKEN}")
    return int(store), int(length)


def pack_refusal(error: BackendError) -> bytes:
    """Return the answer to a client that is refused."""
    text = f"{error.code}\n{shortened(str(error))}".encode()[: (1 << 16) - 1]
    return REFUSED + LENGTH.pack(len(text)) + text


def unpack_refusal(text: bytes) -> BackendError:
    """Return the error that a refusal's text stands for."""
    code, _, message = text.decode(errors="replace").partition("\n")
    return from_code(code, shortened(message))
