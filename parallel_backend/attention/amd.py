"""Attention with its log-sum-exp on AMD's GPUs.

torch's operators there return it to base 2 in some versions (https://github.com/pytorch/pytorch/issues/156012), with
its dims in another order in others (https://github.com/pytorch/pytorch/pull/179563), or have no kernel for the GPU or
the head size. So a small call tries them. If none is right, plain products compute the same, more slowly.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from ..error_texts import breaks_device

log = logging.getLogger(__name__)

Operator = Callable[[Tensor, Tensor, Tensor, float | None], tuple[Tensor, Tensor]]
"""Returns the attention output and the log-sum-exp, like ``Kernel.with_lse``."""

_SCORES = 1 << 26
"""Scores that the plain products hold at once."""
_HEADS, _QUERIES, _KEYS = 3, 20, 33
_TOLERANCE = 0.05
"""Largest error of the small call, in any dtype. Between the bases, the log-sum-exp differs by far more."""


def with_lse(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, operators: Sequence[Operator]
) -> tuple[Tensor, Tensor]:
    """Return the attention output and the log-sum-exp by the first operator that is right here, or by products."""
    operator = _right(query.device, query.dtype, query.shape[-1], tuple(operators))
    return (operator or by_products)(query, key, value, scale)


def by_products(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Compute attention and its log-sum-exp in float32, some queries at a time."""
    batch, heads, _, size = query.shape
    keys, values = key.float().mT * (size**-0.5 if scale is None else scale), value.float()
    outs, lses = [], []
    for part in query.split(max(1, _SCORES // max(1, batch * heads * key.shape[2])), dim=2):
        scores = part.float() @ keys
        lses.append(scores.logsumexp(-1))
        outs.append(((scores - lses[-1][..., None]).exp_() @ values).to(query.dtype))
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


@cache
def _right(device: torch.device, dtype: torch.dtype, size: int, operators: tuple[Operator, ...]) -> Operator | None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, _HEADS, tokens, size) for tokens in (_QUERIES, _KEYS, _KEYS))
    query, key, value = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    expected, reasons = by_products(query, key, value, None), []
    for operator in operators:
        try:
            out, lse = operator(query, key, value, None)
        except RuntimeError as error:
            if breaks_device(str(error)):
                raise  # no other operator would run either
            reasons.append(str(error))
            continue
        if all(_close(found, wanted) for found, wanted in zip((out, lse), expected, strict=True)):
            return operator
        reasons.append("the result of a small call is wrong")
    log.warning(
        "torch has no attention with a right log-sum-exp for head size %d in %s on %s (%s): computing it by products, "
        "which is slower", size, dtype, device, "; ".join(reasons),
    )  # fmt: skip
    return None


def _close(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and bool((found.float() - wanted.float()).abs().max() <= _TOLERANCE)
