"""Send the branches of a step to the backend together, however ComfyUI batches them.

ComfyUI decides from its own device's memory and from equal shapes whether cond and uncond share a call. So its
``calc_cond_batch`` runs twice. In the first run a ``CallRecorder`` records the calls and answers zeros. In the second
run a ``CallReplayer`` sends all recorded calls when the first answer is needed: as one request, unless there are very
many.

Other nodes' code runs once a step, as it does without us, and sees real predictions only: the first run calls
ComfyUI's own functions past wrappers, callbacks and what is set on the model.

Once the first step of a sampling has shown that ComfyUI puts all branches into one call, the calls of later steps are
only counted (``CallCounter``), until one has several.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import comfy.utils
import torch
from torch import Tensor

from ...parallel_backend.protocol.frames import MAX_TENSORS
from ...parallel_backend.protocol.packing import pack
from ...parallel_backend.protocol.tensors import same_bits
from .weight_changes import WeightChanges

if TYPE_CHECKING:
    from .transformer import RemoteTransformer

MOST_BRANCHES = 8
"""Branches of one request. The ranks compute branches of equal shapes as one batch, which has to fit into memory."""


@dataclass(frozen=True, kw_only=True)
class BranchCall:
    """One call of the transformer for one branch.

    Attributes:
        index: the branch as ComfyUI counts: 0 for cond, 1 for uncond.
        inputs: the family's inputs by name, batch first.
        latents: names of the inputs that are predicted.
        changes: what is changed in the weights.
        skipped: numbers of the blocks that are left out.
    """

    index: int
    inputs: dict[str, Tensor]
    latents: tuple[str, ...]
    changes: WeightChanges
    skipped: tuple[int, ...] = ()

    def equals(self, other: "BranchCall") -> bool:
        """Whether both calls have the same inputs, the same weights, and leave out the same blocks."""
        alike = (self.changes, self.skipped) == (other.changes, other.skipped)
        return (
            alike
            and self.inputs.keys() == other.inputs.keys()
            and all(same_bits(tensor, other.inputs[name]) for name, tensor in self.inputs.items())
        )


def requests_of(calls: Sequence[BranchCall]) -> Iterator[range]:
    """Yield the places of the calls that make up one request, as few requests and as equal as possible.

    A prompt of many regions has as many branches, with more tensors than a message may have.
    """
    most = max(1, min(MOST_BRANCHES, MAX_TENSORS // max(len(call.inputs) for call in calls)))
    count = -(-len(calls) // most)
    for i in range(count):
        yield range(i * len(calls) // count, (i + 1) * len(calls) // count)


Predict = Callable[[list[BranchCall]], list[Tensor]]


def chunks(inputs: Mapping[str, Tensor], batch: int, count: int) -> list[dict[str, Tensor]]:
    """Repeat each input to the size of the batch, and cut all into ``count`` parts."""
    whole = {name: comfy.utils.repeat_to_batch_size(tensor, batch) for name, tensor in inputs.items()}
    parts = {name: tensor.chunk(count) for name, tensor in whole.items()}
    return [{name: each[i] for name, each in parts.items()} for i in range(count)]


class CallRecorder:
    """Records calls and answers zeros."""

    def __init__(self) -> None:
        self.calls: list[BranchCall] = []

    def answer(self, calls: list[BranchCall], predict: Predict) -> list[Tensor]:
        """Record the calls and return zeros of the predictions' shapes, without calling ``predict``."""
        self.calls += calls
        return [pack([torch.zeros_like(call.inputs[name]) for name in call.latents]) for call in calls]


class CallReplayer:
    """Answers recorded calls from one request for all of them. Any other call is a request of its own.

    The request waits for the first call, so a step that a cache skips costs nothing.

    Attributes:
        together: whether one call had all branches.
    """

    def __init__(self, recorded: list[BranchCall]) -> None:
        self._recorded, self._next, self.together = recorded, 0, False
        self._predictions: list[Tensor] | None = None

    def answer(self, calls: list[BranchCall], predict: Predict) -> list[Tensor]:
        """Return the predictions for ``calls``."""
        positions = [self._position(call) for call in calls]
        recorded = [position for position in positions if position is not None]
        if len(recorded) < len(calls):
            return predict(calls)
        if self._predictions is None:
            self._predictions = predict(self._recorded)
            self.together = len(recorded) == len(self._recorded)
        return [self._predictions[position] for position in recorded]

    def _position(self, call: BranchCall) -> int | None:
        """Return a recorded call's place. ComfyUI repeats the calls in their order, so the next one comes first."""
        count = len(self._recorded)
        places = ((self._next + i) % count for i in range(count))
        found = next((place for place in places if self._recorded[place].equals(call)), None)
        self._next = self._next if found is None else found + 1
        return found


class CallCounter:
    """Lets calls pass, each a request of its own, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def answer(self, calls: list[BranchCall], predict: Predict) -> list[Tensor]:
        """Return the predictions for ``calls``."""
        self.count += 1
        return predict(calls)


def one_request_per_step(executor: Any, model: Any, conds: Any, x_in: Tensor, timestep: Tensor, options: Any) -> Any:
    """Run ``calc_cond_batch`` twice, recording and replaying, or once where it makes one call anyway."""
    remote: RemoteTransformer = model.diffusion_model
    if remote.recording_now:
        return executor.original(_bare(model), conds, x_in, timestep, _without_wrapper(options))
    if remote.intercepting or sum(len(prompts or ()) for prompts in conds) < 2:
        return executor(model, conds, x_in, timestep, options)
    if remote.one_call:
        with remote.intercepted(CallCounter()) as counter:
            out = executor(model, conds, x_in, timestep, options)
        remote.one_call = counter.count < 2
        return out
    hooks = model.current_patcher.current_hooks
    with remote.intercepted(CallRecorder()) as recorder:
        executor.original(_bare(model), conds, x_in, timestep, _without_wrapper(options))
    # So that the hooks of the first prompt count as applied anew, for callbacks that ask for it.
    model.current_patcher.patch_hooks(hooks)
    with remote.intercepted(CallReplayer(recorder.calls)) as replayer:
        out = executor(model, conds, x_in, timestep, options)
    if remote.one_call is None:
        remote.one_call = replayer.together
    return out


def _without_wrapper(model_options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in model_options.items() if name != "model_function_wrapper"}


def _bare(model: Any) -> Any:
    """Return a second object for a model, whose calls reach its transformer past other nodes' code."""
    kind: Any = type(model)
    bare = object.__new__(_bare_class(kind))
    object.__setattr__(bare, "__dict__", vars(model))
    return bare


@cache
def _bare_class(kind: Any) -> Any:
    """Return a model's class past APPLY_MODEL wrappers. A property comes before what a node sets on the object."""
    return type(kind.__name__, (kind,), {"apply_model": property(lambda self: partial(kind._apply_model, self))})
