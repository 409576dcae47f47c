"""The sampler that hands a whole step loop to the backend."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import comfy.model_sampling
import comfy.samplers
import torch
from torch import Tensor
from typing_extensions import override

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.protocol.messages import Progress, Sample
from ...parallel_backend.protocol.packing import Shape, pack
from ...parallel_backend.samplers.samplers import SAMPLERS
from .added_to_steps import added_to_steps
from .record_replay import BranchCall, CallRecorder
from .transformer import RemoteTransformer

Prediction = Literal["flow", "eps", "v"]
SNR_OFFSET = 1e-4
"""The default of ComfyUI's ``offset_first_sigma_for_snr``."""
_PREDICTION_METHODS = ("calculate_input", "calculate_denoised", "noise_scaling")
"""What the backend's loop computes in their place."""


class BackendSampler(comfy.samplers.Sampler):  # type: ignore[misc]
    """A sampler whose step loop runs in the backend. Noise, masks and latent scaling stay ComfyUI's own."""

    def __init__(self, name: str, *, cfg: float, previews: bool) -> None:
        self.name, self.cfg, self.previews = name, cfg, previews

    @override
    def sample(  # type: ignore[override, unused-ignore]
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
        """Return samples ``[B, C, T, H, W]`` in the model's latent space, like ``comfy.samplers.KSAMPLER.sample``.

        Those of a model of several latents are packed, as the arguments are.

        They are in float32, in which newer versions of ComfyUI sample a latent of any dtype.

        Raises:
            InvalidRequest: a node has added something to the steps since the loop was chosen.
        """
        model, seed = model_wrap.inner_model, extra_args["seed"]
        if added := added_to_steps(model.current_patcher):
            raise InvalidRequest(f"{added} after sampling began, where Parallel Sampler cannot run it: use KSampler")
        remote: RemoteTransformer = model.diffusion_model
        sigmas, noise, latent_image = sigmas.float(), noise.float(), latent_image.float()
        denoise_mask = None if denoise_mask is None else denoise_mask.float()
        x = model.model_sampling.noise_scaling(sigmas[0], noise, latent_image, self.max_denoise(model_wrap, sigmas))
        with remote.intercepted(CallRecorder()) as recorder:
            model_wrap(x, sigmas[:1].expand(len(x)), model_options=extra_args["model_options"], seed=seed)
        sigmas = SAMPLERS[self.name].schedule(sigmas)
        tensors = {"x": x, "sigmas": sigmas, **_constant_inputs(recorder.calls, remote.bridge.loop_inputs(model))}
        if denoise_mask is not None:
            known = model.scale_latent_inpaint(x=x, sigma=sigmas[:1], noise=noise, latent_image=latent_image)
            kept_noise = {} if known is latent_image else {"noise": noise * _noise_scale(model.model_sampling)}
            tensors |= {"mask": denoise_mask, "latent": latent_image, **kept_noise}
        samples = self._request(model, recorder.calls, tensors, callback, seed)
        scaled: Tensor = model.model_sampling.inverse_noise_scaling(sigmas[-1], samples.to(x.device))
        return scaled

    def _request(
        self, model: Any, calls: list[BranchCall], tensors: dict[str, Tensor], callback: Any, seed: int
    ) -> Tensor:
        """Return the backend's samples after its last step."""
        remote, branches = model.diffusion_model, len(calls)
        shapes = tuple(tuple(calls[0].inputs[name].shape[1:]) for name in calls[0].latents)
        message = Sample(
            model=remote.handle.spec,
            branches=branches,
            sampler=self.name,
            cfg=self.cfg if branches > 1 else 1.0,
            seed=seed,
            noise_device="cpu" if tensors["x"].device.type == "cpu" else "cuda",
            previews=self.previews,
            cache=remote.cached.settings if remote.cached else None,
            latent_shapes=shapes if len(shapes) > 1 else (),
            adapters=remote.changes.adapters,
            overlay=remote.changes.overlay,
            **_of_sampling(model.model_sampling),
        )
        if message.prediction != "flow":
            tensors = {**tensors, "log_sigmas": model.model_sampling.log_sigmas.float()}

        def progressed(progress: Progress, extra: dict[str, Tensor]) -> None:
            shown = extra.get("preview")
            if len(shapes) > 1:  # ComfyUI unpacks what its callback gets
                shown = _packed_preview(shown, shapes)
            callback(progress.value - 1, shown, shown if len(shapes) > 1 else None, progress.total)

        results: dict[str, Tensor] = remote.handle.call(message, tensors, on_progress=progressed)
        if remote.cached:
            remote.cached.count(results)
        return results["samples"]


def _of_sampling(sampling: Any) -> dict[str, Any]:
    """Return the entries of a ``Sample`` that ComfyUI's ``model_sampling`` determines."""
    prediction = prediction_of(sampling)
    assert prediction is not None, "the caller checks it"
    entries = {"prediction": prediction, "noise_scale": _noise_scale(sampling)}
    if prediction != "flow":
        return entries | {"timestep_scale": 1.0}
    timestep_scale, first_sigma = sampling.timestep(torch.tensor(1.0)), sampling.percent_to_sigma(SNR_OFFSET)
    return entries | {"timestep_scale": float(timestep_scale), "first_sigma": float(first_sigma)}


def _packed_preview(preview: Tensor | None, shapes: Sequence[Shape]) -> Tensor:
    """Return a packed latent of one sample whose picture's first frame is a preview, and that has zeros elsewhere."""
    picture, *others = (torch.zeros(1, *shape) for shape in shapes)
    if preview is not None:
        picture[:, :, : preview.shape[2]] = preview
    return pack([picture, *others])


def _constant_inputs(calls: list[BranchCall], more: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs that do not change from step to step, by their names in the request. Branch 0 is cond.

    Args:
        more: inputs of every branch that are not among those of the calls.
    """
    ordered = sorted(calls, key=lambda call: call.index)
    return {
        f"{i}.{name}": tensor
        for i, call in enumerate(ordered)
        for name, tensor in (call.inputs | dict(more)).items()
        if name not in (*call.latents, "timestep")
    }


def _noise_scale(sampling: Any) -> float:
    """Return what ModelNoiseScale sets, in versions of ComfyUI that have it."""
    return float(getattr(sampling, "noise_scale", 1.0))


def prediction_of(sampling: Any) -> Prediction | None:
    """Return the prediction type of ComfyUI's ``model_sampling`` as the backend names it, None if it has no such."""
    core = comfy.model_sampling
    flow_timesteps = (core.ModelSamplingDiscreteFlow.timestep, core.ModelSamplingFlux.timestep)
    supported: tuple[tuple[Prediction, Any, tuple[Any, ...]], ...] = (
        ("flow", core.CONST, flow_timesteps),
        ("v", core.V_PREDICTION, (core.ModelSamplingDiscrete.timestep,)),
        ("eps", core.EPS, (core.ModelSamplingDiscrete.timestep,)),
    )
    for name, prediction, timesteps in supported:
        same = all(_method(sampling, method) is getattr(prediction, method) for method in _PREDICTION_METHODS)
        plain = float(getattr(sampling, "sigma_data", 1.0)) == 1.0
        if same and plain and _method(sampling, "timestep") in timesteps:
            return name
    return None


def _method(sampling: Any, name: str) -> Any:
    """Return a method as its class has it, or what a node set on the object in its place."""
    return vars(sampling).get(name, getattr(type(sampling), name))
