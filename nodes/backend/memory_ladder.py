"""What is tried, in order, where a rank runs out of memory: each rung needs less of it than the one before."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...parallel_backend.client.recovery import RecoveringCall
from ...parallel_backend.errors import NoRoom, OutOfMemory
from ...parallel_backend.layout.parallel_layout import ParallelLayout, less_memory
from ...parallel_backend.protocol.messages import Forward, RankRequest, Sample
from ...parallel_backend.protocol.model_spec import ModelSpec
from . import comfyui_models

_settled: dict[ModelSpec, ParallelLayout] = {}
"""Layouts in which models have room, by the spec that has too little."""


def settled(spec: ModelSpec) -> ModelSpec:
    """Return a model's spec in the layout in which it has had room."""
    layout = _settled.get(spec)
    return replace(spec, layout=layout) if layout else spec


def forget(spec: ModelSpec) -> None:
    """Start on the first rung again, for every layout of the model."""
    for each in list(_settled):
        if (each.path, each.stamp, each.dtype) == (spec.path, spec.stamp, spec.dtype):
            del _settled[each]


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One thing to try.

    Attributes:
        action: what is done, for the user.
        options: what changes in the request.
    """

    action: str
    options: Mapping[str, Any]


def first_try(message: RankRequest, shared: set[torch.device]) -> RankRequest:
    """Return the request as it is tried first. On GPUs that ComfyUI uses, too, its models leave before ours adapt."""
    message = replace(message, model=settled(message.model))
    return replace(message, adapt=False) if shared and isinstance(message, Forward | Sample) else message


def climb(
    call: RecoveringCall, message: RankRequest, shared: set[torch.device], tell: Callable[[str], None]
) -> dict[str, Tensor]:
    """Run a request. While a rank runs out of memory, take the next rung and go on from the last finished step.

    Args:
        call: the request as ``first_try`` returns it.
        message: the request.
        shared: the GPUs of its ranks that ComfyUI uses, too.
        tell: takes a sentence about each rung.

    Raises:
        OutOfMemory: no rung helps. It is the first one's, with its numbers, and names the layouts that were tried.
    """
    try:
        return call.run()
    except OutOfMemory as error:
        first = last = error.with_traceback(None)  # which would keep the request's tensors
    tried: list[ParallelLayout] = []
    for rung in _rungs(replace(message, model=settled(message.model)), shared, first):
        tell(f"{rung.action}, since {last}")
        call.change(**rung.options)
        try:
            results = call.run()
        except OutOfMemory as error:
            last = error.with_traceback(None)
        else:
            if "model" in rung.options:
                _settled[message.model] = rung.options["model"].layout
            return results
        tried += [rung.options["model"].layout] if "model" in rung.options else []
    if tried:
        first = type(first)(f"{first}; the layouts {' and '.join(map(str, tried))} have no room for it, either")
    raise first


def _rungs(message: RankRequest, shared: set[torch.device], first: OutOfMemory) -> Iterator[Rung]:
    if shared and comfyui_models.unload(shared):
        yield Rung(action="trying again without ComfyUI's own models on these GPUs", options=_adapting(message))
    elif shared and isinstance(first, NoRoom) and isinstance(message, Forward | Sample):
        yield Rung(action="fitting the weights into less memory", options=_adapting(message))
    if isinstance(message, Forward | Sample):
        for layout in less_memory(message.model.layout, len(message.model.devices.indices)):
            model = replace(message.model, layout=layout)
            yield Rung(action=f"trying again with layout {layout}", options={**_adapting(message), "model": model})


def _adapting(message: RankRequest) -> dict[str, Any]:
    return {"adapt": message.adapt} if isinstance(message, Forward | Sample) else {}
