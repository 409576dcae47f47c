"""What nodes add to the steps of a MODEL. ComfyUI's loop runs it in every step, and the backend's loop never."""

from collections.abc import Iterator
from typing import Any

from comfy.patcher_extension import CallbacksMP

from ..bridges.attention_choice import OVERRIDE
from .patcher import KEY, REFUSES_SAVING
from .step_cache import OPTION

SUPPORTED_OPTIONS = {"transformer_options", "to_load_options", "disable_cfg1_optimization"}
EACH_STEP = (CallbacksMP.ON_PREPARE_STATE, CallbacksMP.ON_APPLY_HOOKS)
"""Kinds of callbacks that ComfyUI calls in steps. It calls the others before or after the steps in both loops."""


def added_to_steps(patcher: Any) -> str:
    """Return the first kind of thing that nodes added to every step of a MODEL, with names, or an empty string."""
    for kind, names in _added(patcher):
        if names:
            return f"a node added the {kind} {', '.join(names)} to the model's steps"
    return ""


def _added(patcher: Any) -> Iterator[tuple[str, list[str]]]:
    model, transformer = patcher.model, patcher.model.diffusion_model
    callbacks = {key for kind in EACH_STEP for key, functions in patcher.callbacks.get(kind, {}).items() if functions}
    set_on_model = {name for name in vars(model) if callable(getattr(type(model), name, None))}
    yield "function", sorted(patcher.model_options.keys() - SUPPORTED_OPTIONS)
    yield "wrapper", sorted({str(key) for by_key in patcher.wrappers.values() for key in by_key} - {KEY})
    yield "callback", sorted(map(str, callbacks))
    yield "patch", sorted(patcher.object_patches.keys() - {"model_sampling"})
    yield "option", sorted(patcher.model_options.get("transformer_options", {}).keys() - {OVERRIDE, OPTION})
    yield "method", sorted(set_on_model - {REFUSES_SAVING})
    yield "method", ["diffusion_model.forward"] if "forward" in vars(transformer) else []
    for hooks in ("_forward_hooks", "_forward_pre_hooks"):
        yield "hooks", [f"diffusion_model.{hooks}"] if vars(transformer)[hooks] else []
