"""A step loop in this process, as ComfyUI's samplers have it: each step is a ``Forward`` of one run."""

from collections.abc import Callable

import torch
from torch import Tensor

from parallel_backend.client.client import Client
from parallel_backend.client.exchange import Interrupted, OnProgress
from parallel_backend.client.retry import Recovery, RetriedRequest
from parallel_backend.protocol.messages import Forward, Progress
from parallel_backend.protocol.model_spec import ModelSpec

from ..verify.loops.run import Loop


def sample(
    client: Client,
    model: ModelSpec,
    loop: Loop,
    *,
    interrupted: Interrupted,
    on_progress: OnProgress,
    notify: Callable[[str], None],
) -> Tensor:
    """Return the samples of a loop of ``euler`` with guidance.

    Args:
        on_progress: called after each step.
        notify: see ``Recovery``.

    Raises:
        BackendError: see ``RetriedRequest``.
    """
    named = loop.tensors()
    x, texts = named["x"], {name: tensor for name, tensor in named.items() if "." in name}
    for i, (sigma, following) in enumerate(zip(loop.sigmas, loop.sigmas[1:], strict=False)):
        changing = {"hidden_states": x, "timestep": torch.full((len(x),), sigma)}
        tensors = texts | {f"{branch}.{name}": tensor for branch in (0, 1) for name, tensor in changing.items()}
        predicted = RetriedRequest(
            client, Forward(model=model, branches=2), tensors, interrupted=interrupted, recovery=Recovery(notify=notify)
        ).run()
        guided = predicted["1"] + loop.cfg * (predicted["0"] - predicted["1"])
        x = x + (following - sigma) * guided
        on_progress(Progress(phase="sampling", value=i + 1, total=len(loop.sigmas) - 1), {})
    client.end_run()
    return x
