"""How a file of the first host goes to another one: in pieces, each with a digest, from an offset between two pieces.

So what has arrived of a file is known to be right, and a transfer that was broken off goes on from there.
"""

import hashlib

PIECE = 4 << 20
"""Bytes of each piece but the last."""
DIGEST = 32
"""Bytes of the digest that follows each piece."""


def digest_of(piece: bytes | bytearray | memoryview) -> bytes:
    """Return the digest of a piece."""
    return hashlib.blake2b(piece, digest_size=DIGEST).digest()
