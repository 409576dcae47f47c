"""A small call that shows whether a kernel runs on a GPU: it may be built for another torch, or lack the GPU."""

import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..error_texts import breaks_device

log = logging.getLogger(__name__)

Attend = Callable[[Tensor, Tensor, Tensor, float | None], tuple[Tensor, Tensor]]
"""Returns the attention output and the log-sum-exp, like ``Kernel.with_lse``."""


def runs(name: str, attend: Attend, device: torch.device) -> bool:
    """Whether a kernel runs on a device and returns the right log-sum-exp. It is logged if not.

    Raises:
        RuntimeError: the call has broken the GPU, so that no other kernel would run either.
    """
    try:
        tokens = torch.zeros(1, 1, 16, 64, dtype=torch.float16, device=device)
        lse = attend(tokens, tokens, tokens, None)[1]
        torch.cuda.synchronize(device)
        if not torch.allclose(lse, torch.full_like(lse, math.log(16)), atol=1e-2):
            raise ValueError("its log-sum-exp is another one")
    except (OSError, RuntimeError, AttributeError, TypeError, ValueError) as error:
        if breaks_device(str(error)):
            raise
        log.warning("%s does not run on %s and is not used: %s", name, device, error)
        return False
    return True
