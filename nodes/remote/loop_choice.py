"""Which step loop runs a sampler call of Parallel Sampler: the backend's, or ComfyUI's with one request a step."""

from typing import Any

import comfy.model_sampling
import torch

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.layout.parallel_layout import ParallelLayout
from ...parallel_backend.samplers.samplers import SAMPLERS
from ..backend.session import current
from ..bridges.refusals import VARYING_CONDS
from .added_to_steps import added_to_steps
from .backend_sampler import prediction_of

SAMPLER_NAMES = ", ".join(SAMPLERS)


def reason_for_comfyui(model: Any, sampler_name: str, *, masked: bool, **prompts: list[Any]) -> str:
    """Return why ComfyUI's loop has to run the steps, or an empty string if the backend's can.

    Args:
        masked: whether the latent has a noise mask.

    Raises:
        InvalidRequest: neither loop samples this model correctly as it is.
    """
    sampling = model.get_model_object("model_sampling")
    _check_sampling(sampling)
    if sampler_name not in SAMPLERS:
        return _lacks(sampler_name)
    if prediction_of(sampling) is None:
        return "a node changed the model's sampling to a type that the backend's loop lacks"
    reasons = (
        "this model keeps what a noise mask says in a way that the backend's loop lacks"
        if masked and not model.target.bridge.masks_in_loop
        else "",
        added_to_steps(model),
        *(_varying(name, prompt) for name, prompt in prompts.items()),
        _noise(model, sampler_name),
    )
    return next(filter(None, reasons), "")


def check_layout(layout: ParallelLayout | None, reason: str) -> None:
    """Refuse ComfyUI's loop for a layout whose algorithm exists in the backend's loop alone.

    Raises:
        InvalidRequest: the layout is approximate and there is a reason. The message says what would work.
    """
    if not reason or layout is None or not layout.approximate:
        return
    remedy = "set patches to 1" if layout.approximation == "PipeFusion" else "set stale to off"
    raise InvalidRequest(
        f"layout {layout} ({layout.approximation}) needs the backend's step loop, but {reason}: change that, {remedy} "
        "in Parallel Layout, or use KSampler, which runs this layout exactly"
    )


def check_sampler_for_layout(sampler_name: Any, layout: ParallelLayout | None) -> None:
    """``check_layout`` for a sampler's name from a queued prompt.

    Raises:
        InvalidRequest: the layout needs the backend's loop, which lacks the sampler.
    """
    if isinstance(sampler_name, str) and sampler_name not in SAMPLERS:
        check_layout(layout, _lacks(sampler_name))


def _lacks(sampler_name: str) -> str:
    return f"the backend's loop lacks the sampler {sampler_name}, it has {SAMPLER_NAMES}"


def _check_sampling(sampling: Any) -> None:
    if isinstance(sampling, getattr(comfy.model_sampling, "V_PREDICTION_DDPM", ())):  # not in every version of ComfyUI
        raise InvalidRequest(
            "this model's sampling is made for VOIDSampler: put ModelSamplingDiscrete, with v_prediction and zsnr, "
            "between Parallel Loader and Parallel Sampler"
        )


def _varying(name: str, conditioning: list[Any]) -> str:
    """Return what changes in a prompt from step to step or over the image, or weakens it."""
    if len(conditioning) != 1:
        return f"the {name} prompt has {len(conditioning)} conditionings"
    (_, extra), *_ = conditioning
    present = [key for key in VARYING_CONDS if extra.get(key) is not None]
    present += ["strength"] if extra.get("strength", 1.0) != 1.0 else []
    return f"the {name} prompt has {', '.join(present)}" if present else ""


def _noise(model: Any, sampler_name: str) -> str:
    """Return why the ranks would draw other noise than ComfyUI does from the same seed."""
    device, devices = model.load_device, model.model.diffusion_model.handle.spec.devices
    elsewhere = bool(devices.hosts) or current().client.remote
    if device.type == "cpu" or SAMPLERS[sampler_name].noise not in ("gaussian", "brownian on device"):
        return ""
    if (
        not elsewhere
        and device.type == devices.kind
        and len({_gpu(index) for index in (device, *devices.indices)}) == 1
    ):
        return ""
    return f"the ranks' devices would draw other noise for {sampler_name} than ComfyUI's {device} does"


def _gpu(device: Any) -> tuple[str, int]:
    """Return on what a GPU's random numbers depend, beside the seed: the number of threads that draw them."""
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.multi_processor_count
