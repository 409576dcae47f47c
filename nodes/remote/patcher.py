"""A ModelPatcher for weights that live elsewhere: it weighs nothing here, and refuses to change them."""

import math
from typing import Any, NoReturn

import comfy.model_management
import comfy.model_patcher
import comfy.sampler_helpers
import comfy.samplers
import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP
from torch import Tensor

from ...parallel_backend.errors import InvalidRequest
from ..backend.memory import make_room
from ..bridges.refusals import check_branches, check_conds, check_latent, check_model_options, taken_conds
from .transformer import RemoteModel

KEY = "parallel_dit"


class RemotePatcher(comfy.model_patcher.ModelPatcher):  # type: ignore[misc]
    """Sizes speak for ComfyUI's own device, where nothing lies, so that using the model evicts none of ComfyUI's."""

    def model_size(self) -> int:
        """Bytes on ComfyUI's device: none."""
        return 0

    def loaded_size(self) -> int:
        """Bytes on ComfyUI's device: none."""
        return 0

    def memory_required(self, input_shape: Any) -> int:
        """Bytes that a step needs on ComfyUI's device, beyond the latents: none."""
        return 0

    def add_patches(self, patches: dict[Any, Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Refuse a LoRA that fits this model; one that fits nothing is reported by the node itself.

        Raises:
            InvalidRequest: it would change weights.
        """
        self._refuse_known(patches)
        return list(super().add_patches(patches, *args, **kwargs))

    def add_hook_patches(self, hook: Any, patches: dict[Any, Any], *args: Any, **kwargs: Any) -> Any:
        """As ``add_patches``, for LoRA hooks.

        Raises:
            InvalidRequest: it would change weights.
        """
        self._refuse_known(patches)
        return super().add_hook_patches(hook, patches, *args, **kwargs)

    def _refuse_known(self, patches: dict[Any, Any]) -> None:
        names = {key if isinstance(key, str) else key[0] for key in patches}
        if names & self.model.state_dict().keys():
            raise InvalidRequest(
                "a LoRA (or another node that changes weights) cannot be applied to a parallel model yet: "
                "remove it, or load the model with ComfyUI's own loader"
            )

    def get_key_patches(self, filter_prefix: str | None = None) -> NoReturn:
        """Model merging reads weights, and they are not here.

        Raises:
            InvalidRequest: always.
        """
        raise InvalidRequest("a parallel model cannot be merged or saved: its weights live in the backend's processes")

    def deepclone_multigpu(self, *args: Any, **kwargs: Any) -> NoReturn:
        """ComfyUI's own multi-GPU cloning would only copy the stand-in.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("this model already runs on several GPUs; choose them in ParallelLoader's devices")


def remote_patcher(model: Any) -> RemotePatcher:
    """A patcher around ComfyUI's model class whose ``diffusion_model`` is a ``RemoteModel``."""
    model.memory_usage_factor = 0
    model.state_dict_for_saving = _refuse_saving
    device = comfy.model_management.get_torch_device()
    patcher = RemotePatcher(model, load_device=device, offload_device=torch.device("cpu"))
    patcher.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, _check_first)
    patcher.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, KEY, _prepare_without_loading)
    patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, _all_branches_at_once)
    patcher.add_callback_with_key(CallbacksMP.ON_DETACH, KEY, _unload_ranks)
    return patcher


def _refuse_saving(*args: Any, **kwargs: Any) -> NoReturn:
    raise InvalidRequest("a parallel model cannot be saved: its weights live in the backend's processes")


def _check_first(
    executor: Any,
    noise: Tensor,
    latent_image: Tensor,
    sampler: Any,
    sigmas: Any,
    denoise_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Refuse what can be seen before sampling begins."""
    guider = executor.class_obj
    remote: RemoteModel = guider.model_patcher.model.diffusion_model
    if len(kwargs.get("latent_shapes") or ()) > 1:
        raise InvalidRequest("a latent of several tensors (video with audio) does not fit this model; pass the video's")
    check_latent(latent_image, remote.channels)
    check_branches(remote.handle.spec.layout, _branches(guider))
    check_model_options(guider.model_options)
    taken = taken_conds(remote.bridge.conds, masked=denoise_mask is not None)
    check_conds((cond for conds in guider.conds.values() for cond in conds), taken)
    samples: Tensor = executor(noise, latent_image, sampler, sigmas, denoise_mask, *args, **kwargs)
    remote.handle.show("ready")
    return samples


def _branches(guider: Any) -> int:
    """How many prompts core runs in a step: its own guider leaves the negative one out at a guidance of 1."""
    guided = not math.isclose(getattr(guider, "cfg", 0.0), 1.0)
    guided = guided or guider.model_options.get("disable_cfg1_optimization", False)
    guided = guided or type(guider).predict_noise is not comfy.samplers.CFGGuider.predict_noise
    return len(guider.conds) if guided else 1


def _prepare_without_loading(executor: Any, model: Any, noise_shape: Any, conds: Any, **kwargs: Any) -> Any:
    """What ComfyUI does before sampling, without asking its device for room.

    Its ``load_models_gpu`` frees a gigabyte for inference even for a model without weights, and that would
    evict models of ComfyUI's. Here those leave only before the ranks load weights. The rest of it is done: object
    patches (such as ModelSamplingSD3's) are put in place, and the model is entered among those loaded, so that
    unloading reaches it.
    """
    handle = model.model.diffusion_model.handle
    transformers = [name for name in handle.checkpoint.components if name.startswith("transformer")]
    make_room(handle, transformers, ranks=handle.ranks)
    extra = model.get_nested_additional_models()
    for values in conds.values():
        extra += comfy.sampler_helpers.get_models_from_cond(values, "additional_models")
    if extra:
        comfy.model_management.load_models_gpu(extra)
    loaded = comfy.model_management.current_loaded_models
    for entry in [entry for entry in loaded if model.is_clone(entry.model)]:
        loaded.remove(entry)
        entry.model.detach(unpatch_all=False)
        entry.model_finalizer.detach()
    _enter(model)
    return model.model, conds, extra


def enter(patcher: RemotePatcher, component: str, *, ranks: int) -> None:
    """Enter a model among those loaded, unless it or a clone is, so that unloading reaches its ranks.

    For the uses of the text encoder and the VAE, whose weights go with the model's. There is room for them first, on
    the first so many ranks.
    """
    make_room(patcher.model.diffusion_model.handle, [component], ranks=ranks)
    if not any(patcher.is_clone(entry.model) for entry in comfy.model_management.current_loaded_models):
        _enter(patcher)


def _enter(patcher: Any) -> None:
    entry = comfy.model_management.LoadedModel(patcher)
    entry.model_load()
    comfy.model_management.current_loaded_models.insert(0, entry)


def _unload_ranks(patcher: Any, unpatch_all: bool) -> None:
    """ComfyUI unloads the model (*Unload models*, ``/free``, or room for another): the ranks free their weights."""
    if unpatch_all:
        patcher.model.diffusion_model.handle.unload()


def _all_branches_at_once(executor: Any, model: Any, conds: Any, x_in: Tensor, timestep: Tensor, options: Any) -> Any:
    """Run ``calc_cond_batch`` twice, recording and replaying; see ``tape``.

    Recording goes to ComfyUI's bare function without other nodes' wrappers, so that those see real predictions only.
    """
    remote: RemoteModel = model.diffusion_model
    if remote.taped:
        return executor(model, conds, x_in, timestep, options)
    with remote.recording() as branches:
        executor.original(model, conds, x_in, timestep, _without_wrappers(options))
    with remote.replaying(branches):
        return executor(model, conds, x_in, timestep, options)


def _without_wrappers(model_options: dict[str, Any]) -> dict[str, Any]:
    bare = {name: value for name, value in model_options.items() if name != "model_function_wrapper"}
    bare["transformer_options"] = {
        name: value for name, value in model_options.get("transformer_options", {}).items() if name != "wrappers"
    }
    return bare
