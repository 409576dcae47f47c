"""Wraps ComfyUI's ``calc_cond_batch``, so that all branches of a step are one request (see ``record_replay``).

Other nodes' code runs once a step, as it does without us, and sees real predictions only: the recording run calls
ComfyUI's own functions past wrappers, callbacks and what is set on the model.
"""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from torch import Tensor

from .record_replay import CallCounter, CallRecorder, CallReplayer
from .transformer import RemoteTransformer


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
