"""Which denoiser calls are steps of one run: they differ in the latent and its time alone."""

from collections.abc import Hashable, Sequence
from dataclasses import replace

from .frames import TensorMeta
from .messages import CHANGING, POSITION, Forward


def run_key(message: Forward, metas: Sequence[TensorMeta]) -> Hashable | None:
    """Return what the steps of a run have in common; None if nothing says that their other tensors are the same."""
    if any(is_changing(meta) != (not meta.digest) for meta in metas if not meta.same):
        return None
    return replace(message, request_id="-", origin=None), tuple(metas)


def is_changing(meta: TensorMeta) -> bool:
    """Whether each step has another tensor of this name."""
    return meta.name == POSITION or meta.name.partition(".")[2] in CHANGING
