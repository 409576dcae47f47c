"""Changes to headers: to the tree of one in JSON, or to numbers of others, so that most are still read to their end."""

import json
import random
from collections.abc import Callable
from typing import Any

from .targets import Target

NUMBERS = (
    -1, 0, 1, 2, 8, 9, 255, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 38, (1 << 38) + 1, (1 << 53) + 1, (1 << 63) - 1,
    1 << 63, 1 << 64, 10**30, 10**4299, 0.5, -1e300, 1e300,
)  # fmt: skip
TEXTS = ("", "x", "0", "\0", "\n", "\x7f", "\u202e", "\ud7ff\uffff", "x" * 65, "x" * 5000, "../../x", "/etc/passwd",
         "a\0b", "float32", "F32", "auto", "cpu", "cuda", "nvfp4", "__metadata__")  # fmt: skip
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], {"": {}})
DEPTH = 1200
"""Levels of nesting that Python's own limit does not allow."""
_NEST = "\x01nest\x01"
Place = tuple[Any, Any]
"""A container and the key or index of one of its values."""


def mutate_json(text: bytes, rng: random.Random) -> bytes:
    """Return the text of another tree.

    Raises:
        ValueError, RecursionError: the text is not JSON, or is nested too deeply.
    """
    root = [json.loads(text)]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        container, key = rng.choice(_places(root))
        rng.choice(_CHANGES)(container, key, root, rng)
    changed = json.dumps(root[0] if root else None).encode(errors="replace")
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    nested = opening * DEPTH + b"1" + closing * rng.choice((DEPTH, DEPTH, 0))
    return changed.replace(json.dumps(_NEST).encode(), nested)


def _places(value: Any) -> list[Place]:
    """Return every place in a tree that holds a value."""
    keys = range(len(value)) if isinstance(value, list) else list(value) if isinstance(value, dict) else ()
    return [place for key in keys for place in [(value, key), *_places(value[key])]]


def _replace(container: Any, key: Any, _root: Any, rng: random.Random) -> None:
    container[key] = rng.choice(rng.choice((NUMBERS, TEXTS, OTHERS)))


def _inside(container: Any, key: Any, root: Any, rng: random.Random) -> None:
    """Change a text anywhere that holds JSON itself."""
    texts = [(each, name) for each, name in _places(root) if str(each[name])[:2] in ("[{", '{"')]
    texts = [(each, name) for each, name in texts if isinstance(each[name], str)]
    if texts:
        container, key = rng.choice(texts)
        container[key] = mutate_json(container[key].encode(), rng).decode()
    else:
        _replace(container, key, root, rng)


def _nest(container: Any, key: Any, _root: Any, _rng: random.Random) -> None:
    container[key] = _NEST


def _remove(container: Any, key: Any, root: Any, _rng: random.Random) -> None:
    if container is not root:
        del container[key]


def _rename(container: Any, key: Any, _root: Any, rng: random.Random) -> None:
    if isinstance(container, dict):
        container[rng.choice((*TEXTS, *container))] = container.pop(key)


def _repeat(container: Any, key: Any, root: Any, rng: random.Random) -> None:
    if isinstance(container, list) and container is not root:
        container[key:key] = [container[key]] * rng.choice((1, 1, 2, 9, 300))


def _copy(container: Any, key: Any, root: Any, rng: random.Random) -> None:
    other, name = rng.choice(_places(root))
    container[key] = json.loads(json.dumps(other[name]))


_CHANGES: tuple[Callable[[Any, Any, Any, random.Random], None], ...] = (
    _replace, _replace, _inside, _nest, _remove, _rename, _repeat, _copy,
)  # fmt: skip


def mutate_number(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with another number of 4 or 8 bytes in them, which may be one from elsewhere in them."""
    width, at = rng.choice((4, 8, 8)), rng.randrange(min(512, len(data) + 1))
    source = rng.randrange(len(data) + 1)
    number = rng.choice((*(each for each in NUMBERS if isinstance(each, int)), 32, 64, rng.randrange(100)))
    value = (number % (1 << 8 * width)).to_bytes(width, "little")
    value = rng.choice((value, value, data[source : source + width]))
    return data[:at] + value + data[at + len(value) :]


def mutator(target: Target, noise: Callable[[bytes, int], bytes]) -> Callable[[bytes, int, int], bytes]:
    """Return a mutator for libFuzzer, which changes a target's tree, or else bytes by ``noise``."""

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.3:
            return noise(data, max_size)
        if target.json_at is None:
            return mutate_number(data, rng)[:max_size]
        start = target.json_at
        width, order = target.length or (0, "big")
        length = int.from_bytes(data[start - width : start], order) if width else len(data)  # type: ignore[arg-type]
        try:
            header = mutate_json(data[start : start + length], rng)
        except (ValueError, RecursionError, IndexError):
            return noise(data, max_size)
        said = len(header).to_bytes(width, order) if width else b""  # type: ignore[arg-type]
        return (data[: start - width] + said + header + data[start + length :])[:max_size]

    return mutate
