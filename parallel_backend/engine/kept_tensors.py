"""Tensors of earlier requests that this rank keeps, by their digests, so that no later request has to send them."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

from ..protocol.frames import TensorMeta
from ..protocol.tensors import DTYPES

MAX_BYTES = 1 << 30
"""Bytes that are kept: several prompts of any model."""


class KeptTensors:
    """The most recently used tensors on this rank's device.

    Ranks may keep different ones: each frees them by itself where its device is full.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Tensor] = OrderedDict()  # the least recently used first

    def names(self, metas: Sequence[TensorMeta]) -> tuple[str, ...]:
        """Return the names of the tensors that are kept."""
        return tuple(meta.name for meta in metas if self.get(meta) is not None)

    def get(self, meta: TensorMeta) -> Tensor | None:
        """Return a tensor that is kept."""
        kept = self._kept.get(meta.digest)
        if kept is None or (tuple(kept.shape), kept.dtype) != (meta.shape, DTYPES[meta.dtype]):
            return None
        self._kept.move_to_end(meta.digest)
        return kept

    def add(self, digest: str, tensor: Tensor) -> None:
        """Keep a tensor. The least recently used make room."""
        self._kept[digest] = tensor
        self._kept.move_to_end(digest)
        while len(self._kept) > 1 and self.nbytes > self._max_bytes:
            self._kept.popitem(last=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all kept tensors."""
        return sum(tensor.nbytes for tensor in self._kept.values())

    def clear(self) -> bool:
        """Keep none. Return whether there were any."""
        had = bool(self._kept)
        self._kept.clear()
        return had
