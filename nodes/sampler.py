"""The sampling node whose step loop runs in the backend."""

import inspect
from typing import Any, Literal

import comfy.model_sampling
import comfy.sample
import comfy.samplers
import comfy.utils
import torch
from comfy_api.latest import io
from torch import Tensor

from ..parallel_backend.errors import InvalidRequest
from ..parallel_backend.layout.parallel_layout import ParallelLayout
from ..parallel_backend.protocol.messages import Progress, Sample
from ..parallel_backend.samplers.samplers import SAMPLERS
from .bridges.refusals import USE_KSAMPLER, accepted_conds, check_constant_conds, check_latent, check_model_options
from .picture_metadata import label_saved_images
from .remote.patcher import KEY, RemotePatcher
from .remote.previews import prepare_callback
from .remote.record_replay import BranchCall
from .remote.transformer import RemoteTransformer

SAMPLER_NAMES = ", ".join(SAMPLERS)
DESCRIPTION = (
    f"KSampler with the step loop in the backend. Approximate if the loader's layout is. Samplers: {SAMPLER_NAMES}."
)
SUPPORTED_OPTIONS = {"transformer_options", "to_load_options", "disable_cfg1_optimization"}

Prediction = Literal["flow", "eps", "v"]


class BackendSampler(comfy.samplers.Sampler):  # type: ignore[misc]
    """A sampler whose step loop runs in the backend. Noise, masks and latent scaling stay ComfyUI's own."""

    def __init__(self, name: str, *, cfg: float, previews: bool) -> None:
        self.name, self.cfg, self.previews = name, cfg, previews

    def sample(
        self,
        model_wrap: Any,
        sigmas: Tensor,
        extra_args: dict[str, Any],
        callback: Any,
        noise: Tensor,
        latent_image: Tensor,
        denoise_mask: Tensor | None = None,
        disable_pbar: bool = False,
    ) -> Tensor:
        """Return samples ``[B, C, T, H, W]`` in the model's latent space, like ``comfy.samplers.KSAMPLER.sample``."""
        model = model_wrap.inner_model
        remote: RemoteTransformer = model.diffusion_model
        x = model.model_sampling.noise_scaling(sigmas[0], noise, latent_image, self.max_denoise(model_wrap, sigmas))
        with remote.recording() as calls:
            model_wrap(x, sigmas[:1].expand(len(x)), model_options=extra_args["model_options"], seed=extra_args["seed"])
        tensors = {"x": x, "sigmas": sigmas, **_constant_inputs(calls)}
        if denoise_mask is not None:
            tensors |= {"mask": denoise_mask, "latent": latent_image}
            known = model.scale_latent_inpaint(x=x, sigma=sigmas[:1], noise=noise, latent_image=latent_image)
            tensors |= {} if known is latent_image else {"noise": noise}
        samples = self._request(model, len(calls), tensors, callback)
        scaled: Tensor = model.model_sampling.inverse_noise_scaling(sigmas[-1], samples.to(x.device))
        return scaled

    def _request(self, model: Any, branches: int, tensors: dict[str, Tensor], callback: Any) -> Tensor:
        """Return the backend's samples after its last step."""
        sampling, remote = model.model_sampling, model.diffusion_model
        prediction = prediction_of(sampling)
        if prediction != "flow":
            tensors = {**tensors, "log_sigmas": sampling.log_sigmas.float()}
        message = Sample(
            model=remote.handle.spec,
            branches=branches,
            sampler=self.name,
            cfg=self.cfg if branches > 1 else 1.0,
            prediction=prediction,
            timestep_scale=float(sampling.timestep(torch.tensor(1.0))) if prediction == "flow" else 1.0,
            previews=self.previews,
            adapters=remote.changes.adapters,
            overlay=remote.changes.overlay,
        )

        def progressed(progress: Progress, extra: dict[str, Tensor]) -> None:
            callback(progress.value - 1, extra.get("preview"), None, progress.total)

        samples: Tensor = remote.handle.call(message, tensors, on_progress=progressed)["samples"]
        return samples


def _constant_inputs(calls: list[BranchCall]) -> dict[str, Tensor]:
    """Return the inputs that do not change from step to step, by their names in the request. Branch 0 is cond."""
    ordered = sorted(calls, key=lambda call: call.index)
    return {
        f"{i}.{name}": tensor
        for i, call in enumerate(ordered)
        for name, tensor in call.inputs.items()
        if name not in (call.latent, "timestep")
    }


def check_sampler(name: str) -> None:
    """Refuse a sampler that the backend lacks.

    Raises:
        InvalidRequest: the backend lacks it. The message lists the samplers and advises KSampler.
    """
    if name not in SAMPLERS:
        raise InvalidRequest(f"Parallel Sampler has no sampler {name!r}, only {SAMPLER_NAMES}; {USE_KSAMPLER}")


def check_model(model: Any) -> None:
    """Refuse a MODEL that is not Parallel Loader's, or that other nodes hook into at every step.

    Raises:
        InvalidRequest: the MODEL is refused. The message names the hook.
    """
    if not isinstance(model, RemotePatcher):
        raise InvalidRequest("Parallel Sampler needs the MODEL of Parallel Loader; use KSampler for any other")
    check_model_options(model.model_options)
    functions = sorted(model.model_options.keys() - SUPPORTED_OPTIONS)
    wrappers = sorted({str(key) for by_key in model.wrappers.values() for key in by_key} - {KEY})
    patches = sorted(model.object_patches.keys() - {"model_sampling"})
    options = sorted(model.model_options.get("transformer_options", {}))
    for kind, names in (("function", functions), ("wrapper", wrappers), ("patch", patches), ("option", options)):
        if names:
            raise InvalidRequest(f"a node added the {kind} {', '.join(names)} to the model's steps; {USE_KSAMPLER}")
    prediction_of(model.get_model_object("model_sampling"))


def prediction_of(sampling: Any) -> Prediction:
    """Return the prediction type of ComfyUI's ``model_sampling``, as the backend names it.

    Raises:
        InvalidRequest: the backend does not support it.
    """
    core, kind = comfy.model_sampling, type(sampling)
    if issubclass(kind, getattr(core, "V_PREDICTION_DDPM", ())):  # not in every version of ComfyUI
        raise InvalidRequest(
            "this model's sampling is made for VOIDSampler: put ModelSamplingDiscrete, with v_prediction and zsnr, "
            "between Parallel Loader and Parallel Sampler"
        )
    flow_timesteps = (core.ModelSamplingDiscreteFlow.timestep, core.ModelSamplingFlux.timestep)
    supported: tuple[tuple[Prediction, Any, tuple[Any, ...]], ...] = (
        ("flow", core.CONST, flow_timesteps),
        ("v", core.V_PREDICTION, (core.ModelSamplingDiscrete.timestep,)),
        ("eps", core.EPS, (core.ModelSamplingDiscrete.timestep,)),
    )
    for name, prediction, timesteps in supported:
        same = all(
            getattr(kind, method) is getattr(prediction, method) for method in ("calculate_input", "calculate_denoised")
        )
        if same and kind.timestep in timesteps and float(getattr(sampling, "sigma_data", 1.0)) == 1.0:
            return name
    raise InvalidRequest("a node changed the model's sampling to a type that the backend lacks; " + USE_KSAMPLER)


def _checked_samples(model: Any, latent_image: dict[str, Any], **prompts: list[Any]) -> Tensor:
    """Return a latent's samples in the model's shape, after checking the prompts and the latent."""
    supported = model.model.diffusion_model.bridge.supported_conds
    accepted = accepted_conds(supported, masked="noise_mask" in latent_image)
    for name, conditioning in prompts.items():
        check_constant_conds(name, conditioning, accepted)
    resized = comfy.sample.fix_empty_latent_channels
    latent: Tensor = resized(model, latent_image["samples"], **_downscale_ratios(latent_image))
    check_latent(latent, model.model.latent_format.latent_channels)
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
        label_saved_images(hidden, {"layout": str(layout), "approximate": layout.approximation})


class ParallelSampler(io.ComfyNode):  # type: ignore[misc]
    """KSampler's inputs and output, with one request to the backend for all steps."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's name, inputs and outputs."""
        return io.Schema(
            node_id="ParallelSampler",
            display_name="Parallel Sampler",
            category="Parallel DiT",
            description=DESCRIPTION,
            inputs=[
                io.Model.Input("model", tooltip="The MODEL of Parallel Loader."),
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
                    tooltip=f"The sampling algorithm: {SAMPLER_NAMES}. Use KSampler for any other.",
                ),
                io.Combo.Input(
                    "scheduler",
                    options=comfy.samplers.KSampler.SCHEDULERS,
                    tooltip="The noise schedule. All of ComfyUI's schedules work.",
                ),
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
            hidden=[io.Hidden.extra_pnginfo, io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, sampler_name: Any = None) -> bool | str:
        """Return why the sampler cannot work, or True. ComfyUI calls this when the prompt is queued."""
        try:
            if sampler_name is not None:
                check_sampler(sampler_name)
        except InvalidRequest as error:
            return str(error)
        return True

    @classmethod
    def execute(
        cls, model: Any, seed: int, steps: int, cfg: float, sampler_name: str, scheduler: str, positive: list[Any],
        negative: list[Any], latent_image: dict[str, Any], denoise: float,
    ) -> io.NodeOutput:  # fmt: skip
        """Run all steps on the ranks."""
        check_sampler(sampler_name)
        check_model(model)
        latent = _checked_samples(model, latent_image, positive=positive, negative=negative)
        schedule = comfy.samplers.KSampler(model, steps, model.load_device, sampler_name, scheduler, denoise)
        callback, previews = prepare_callback(model, steps)
        samples = comfy.sample.sample_custom(
            model,
            comfy.sample.prepare_noise(latent, seed, latent_image.get("batch_index")),
            cfg,
            BackendSampler(sampler_name, cfg=cfg, previews=previews),
            schedule.sigmas,
            positive,
            negative,
            latent,
            noise_mask=latent_image.get("noise_mask"),
            callback=callback,
            disable_pbar=not comfy.utils.PROGRESS_BAR_ENABLED,
            seed=seed,
        )
        _label_if_approximate(cls.hidden, model.model.diffusion_model.handle.spec.layout, len(schedule.sigmas) - 1)
        ratios = _downscale_ratios(latent_image)
        other_entries = {key: value for key, value in latent_image.items() if key not in ratios}
        return io.NodeOutput({**other_entries, "samples": samples})
