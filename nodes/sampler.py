"""The sampling node whose step loop runs in the backend."""

import inspect
import logging
from typing import Any

import comfy.sample
import comfy.samplers
import comfy.utils
from comfy_api.latest import io
from typing_extensions import override

from ..parallel_backend.errors import InvalidRequest
from ..parallel_backend.layout.parallel_layout import ParallelLayout
from .backend.connection import show_on_node
from .backend.noted_steps import executing_origin, note_approximation, time_left
from .bridges.given_numbers import as_float, as_int
from .bridges.refusals import check_model_options
from .picture_metadata import label_saved_images
from .remote.backend_sampler import BackendSampler
from .remote.loop_choice import SAMPLER_NAMES, check_layout, reason_for_comfyui
from .remote.patcher import RemotePatcher
from .remote.previews import Callback, prepare_callback

DESCRIPTION = (
    "KSampler with the step loop in the backend. Approximate if the loader's layout is. Samplers that run there: "
    f"{SAMPLER_NAMES}. All others run in ComfyUI's loop, with one request a step; the node then says so."
)


def check_model(model: Any) -> None:
    """Refuse a MODEL that is not parallel, or whose layers another node changes.

    Raises:
        InvalidRequest: the MODEL is refused.
    """
    if not isinstance(model, RemotePatcher):
        raise InvalidRequest(
            "Parallel Sampler needs the MODEL of Parallel Loader or Parallel Model; use KSampler for any other"
        )
    check_model_options(model.model_options)


def _checked_samples(model: Any, latent_image: dict[str, Any]) -> Any:
    """Return a latent's samples in the model's shape, after checking them. They may be nested."""
    resized = comfy.sample.fix_empty_latent_channels
    latent: Any = resized(model, latent_image["samples"], **_downscale_ratios(latent_image))
    model.target.bridge.check_latents(latent.unbind() if latent.is_nested else [latent])
    return latent


def _downscale_ratios(latent_image: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of LATENT by which this version of ComfyUI resizes an empty latent of another family.

    They describe the empty latent, so the sampled one does not have them. Absent entries are None.
    """
    parameters = inspect.signature(comfy.sample.fix_empty_latent_channels).parameters
    names = ("downscale_ratio_spacial", "downscale_ratio_temporal")
    return {name: latent_image.get(name) for name in names if name in parameters}


def _label_if_approximate(hidden: Any, layout: ParallelLayout | None, steps: int) -> None:
    """Label saved images as approximate if this node's result is."""
    if layout and layout.approximate and layout.warmup < steps:
        note_approximation(layout.approximation)
        label_saved_images(hidden, {"layout": str(layout), "approximate": layout.approximation})


def _show_loop(hidden: Any, reason: str) -> str:
    """Show on the node which loop runs the steps, log it if it is ComfyUI's, and return the text.

    Args:
        hidden: the node's ``hidden``. None if no workflow runs.
    """
    text = "steps run in the backend's loop"
    if reason:
        text = f"steps run in ComfyUI's loop, with one request a step: {reason}"
        logging.info("Parallel Sampler: %s", text)
    if hidden is not None:
        show_on_node(hidden.dynprompt.get_display_node_id(hidden.unique_id), text)
    return text


def _telling(hidden: Any, text: str, callback: Callback) -> Callback:
    """Return a sampling callback that also shows on the node how many steps are done, and the time left.

    Args:
        hidden: the node's ``hidden``. None if no workflow runs.
        text: what the node shows before the first step.
        callback: see ``prepare_callback``.
    """
    if hidden is None:
        return callback
    node, origin = hidden.dynprompt.get_display_node_id(hidden.unique_id), executing_origin()

    def told(step: int, x0: Any, x: Any, total: int) -> None:
        callback(step, x0, x, total)
        show_on_node(node, f"{step + 1} of {total} steps{time_left(origin, step + 1, total)}; {text}")

    return told


def _step_inputs() -> list[Any]:
    """Return the inputs that say how many steps are taken, from which noise, and how."""
    return [
        io.Int.Input(
            "seed",
            default=0,
            min=0,
            max=0xFFFFFFFFFFFFFFFF,
            control_after_generate=True,
            tooltip="The noise seed. The same seed gives the same noise as in KSampler.",
        ),
        io.Int.Input("steps", default=20, min=1, max=10000, tooltip="The number of denoising steps."),
        io.Float.Input(
            "cfg",
            default=8.0,
            min=0.0,
            max=100.0,
            step=0.1,
            round=0.01,
            tooltip="How strongly the prompt guides the image. At 1.0 the negative prompt is not computed.",
        ),
        io.Combo.Input(
            "sampler_name",
            options=comfy.samplers.KSampler.SAMPLERS,
            tooltip=f"The sampling algorithm. In the backend run: {SAMPLER_NAMES}. All others run in ComfyUI's loop.",
        ),
        io.Combo.Input(
            "scheduler",
            options=comfy.samplers.KSampler.SCHEDULERS,
            tooltip="The noise schedule. All of ComfyUI's schedules work.",
        ),
    ]


class ParallelSampler(io.ComfyNode):  # type: ignore[misc]
    """KSampler's inputs and output, with one request to the backend for all steps."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ParallelSampler",
            display_name="Parallel Sampler",
            category="Parallel DiT",
            description=DESCRIPTION,
            inputs=[
                io.Model.Input("model", tooltip="The MODEL of Parallel Loader or Parallel Model."),
                *_step_inputs(),
                io.Conditioning.Input("positive", tooltip="What the image should show."),
                io.Conditioning.Input("negative", tooltip="What the image should not show."),
                io.Latent.Input("latent_image", tooltip="The latent to denoise."),
                io.Float.Input(
                    "denoise",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="The fraction of the schedule to run, counted from its end. Below 1.0, the result keeps "
                    "more of the input latent's structure.",
                ),
            ],
            outputs=[io.Latent.Output(tooltip="The denoised latent.")],
            hidden=[io.Hidden.extra_pnginfo, io.Hidden.unique_id, io.Hidden.dynprompt],
        )

    @classmethod
    @override
    def execute(
        cls, model: Any, seed: int, steps: int, cfg: float, sampler_name: str, scheduler: str, positive: list[Any],
        negative: list[Any], latent_image: dict[str, Any], denoise: float,
    ) -> io.NodeOutput:  # fmt: skip
        """Run all steps on the ranks, in the backend's loop if it can run them."""
        check_model(model)
        seed, steps = as_int(seed, "seed"), as_int(steps, "steps")
        cfg, denoise = as_float(cfg, "cfg"), as_float(denoise, "denoise")
        latent = _checked_samples(model, latent_image)
        layout = model.target.handle.spec.layout
        masked = latent_image.get("noise_mask") is not None
        reason = reason_for_comfyui(model, sampler_name, masked=masked, positive=positive, negative=negative)
        check_layout(layout, reason)
        shown = _show_loop(cls.hidden, reason)
        schedule = comfy.samplers.KSampler(model, steps, model.load_device, sampler_name, scheduler, denoise)
        callback, previews = prepare_callback(model, steps, latent)
        backend_sampler = BackendSampler(sampler_name, cfg=cfg, previews=previews)
        samples = comfy.sample.sample_custom(
            model,
            comfy.sample.prepare_noise(latent, seed, latent_image.get("batch_index")),
            cfg,
            comfy.samplers.sampler_object(sampler_name) if reason else backend_sampler,
            schedule.sigmas,
            positive,
            negative,
            latent,
            noise_mask=latent_image.get("noise_mask"),
            callback=_telling(cls.hidden, shown, callback),
            disable_pbar=not comfy.utils.PROGRESS_BAR_ENABLED,
            seed=seed,
        )
        used = model.model.diffusion_model.handle.current.layout  # another one if memory or a device was lacking
        _label_if_approximate(cls.hidden, used, len(schedule.sigmas) - 1)
        ratios = _downscale_ratios(latent_image)
        other_entries = {key: value for key, value in latent_image.items() if key not in ratios}
        return io.NodeOutput({**other_entries, "samples": samples}, ui={"text": (shown,)})
