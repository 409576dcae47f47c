"""The patcher of a parallel MODEL, and what it does before and during sampling."""

import math
from typing import Any, NoReturn

import comfy.model_management
import comfy.sampler_helpers
import comfy.samplers
import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP
from torch import Tensor

from ...parallel_backend.errors import InvalidRequest
from ..backend.memory import make_room
from ..bridges.announcements import announce_callbacks, announce_text_only
from ..bridges.refusals import (
    NESTED_LATENT,
    accepted_conds,
    check_branches,
    check_compute_dtype,
    check_conds,
    check_latent,
    check_layer_changes,
    check_model_options,
)
from .changing_patcher import ChangingPatcher
from .transformer import RemoteTransformer

KEY = "parallel_dit"


class RemotePatcher(ChangingPatcher):
    """The patcher of a ComfyUI model whose ``diffusion_model`` is a ``RemoteTransformer``."""

    @property
    def target(self) -> RemoteTransformer:
        """See ``ChangingPatcher``."""
        remote: RemoteTransformer = self.model.diffusion_model
        return remote

    def _load_list(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Return the layers that ComfyUI loads: none. What ``modules()`` lists has no weights."""
        return []

    def check_patches(self, patches: dict[Any, Any], lora: str, hook: Any = None) -> None:
        """Refuse a LoRA that fits nothing.

        A loader's comes with its changes of the text encoder, and a hook's without.

        Raises:
            InvalidRequest: there are no changes.
        """
        if patches or (hook is not None and not hook._strength_model):
            return
        if hook is None or not any(_of_text(name) for name in hook.weights or ()):
            name = self.target.handle.checkpoint.name
            raise InvalidRequest(f"{lora} fits no weight of {name}: it is for another model")
        announce_text_only(lora)


def _of_text(name: str) -> bool:
    """Whether a name in a LoRA's file is that of a text encoder's layer."""
    return name.startswith(("lora_te", "text_encoder", "clip_", "te.", "te1.", "te2.", "te_"))


def remote_patcher(model: Any) -> RemotePatcher:
    """Return a patcher around a ComfyUI model whose ``diffusion_model`` is a ``RemoteTransformer``."""
    model.memory_usage_factor = 0
    model.state_dict_for_saving = _refuse_saving
    device = comfy.model_management.get_torch_device()
    patcher = RemotePatcher(model, load_device=device, offload_device=torch.device("cpu"))
    patcher.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, _check_before_sampling)
    patcher.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, KEY, _prepare_without_loading)
    patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, _one_request_per_step)
    patcher.add_callback_with_key(CallbacksMP.ON_DETACH, KEY, _unload_ranks)
    return patcher


def _refuse_saving(*args: Any, **kwargs: Any) -> NoReturn:
    raise InvalidRequest("a parallel model cannot be saved: its weights live in the backend's processes")


def _check_before_sampling(
    executor: Any,
    noise: Tensor,
    latent_image: Tensor,
    sampler: Any,
    sigmas: Any,
    denoise_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Refuse unsupported inputs before sampling begins."""
    guider = executor.class_obj
    remote: RemoteTransformer = guider.model_patcher.model.diffusion_model
    if len(kwargs.get("latent_shapes") or ()) > 1:
        raise InvalidRequest(NESTED_LATENT)
    check_latent(latent_image, remote.channels)
    check_branches(remote.handle.spec.layout, _branches(guider))
    check_model_options(guider.model_options)
    check_compute_dtype(guider.model_patcher.object_patches)
    check_layer_changes(guider.model_patcher, remote.changed_layer())
    remote.skipped_blocks(guider.model_options.get("transformer_options", {}))
    announce_callbacks(guider.model_patcher.callbacks, own=KEY)
    accepted = accepted_conds(remote.bridge.supported_conds, masked=denoise_mask is not None)
    check_conds((cond for conds in guider.conds.values() for cond in conds), accepted)
    with guider.model_patcher.prepared_changes():
        samples: Tensor = executor(noise, latent_image, sampler, sigmas, denoise_mask, *args, **kwargs)
    remote.handle.show("ready")
    return samples


def _branches(guider: Any) -> int:
    """Return how many prompts ComfyUI runs in a step. Its own guider skips the negative one at a cfg of 1."""
    guided = not math.isclose(getattr(guider, "cfg", 0.0), 1.0)
    guided = guided or guider.model_options.get("disable_cfg1_optimization", False)
    guided = guided or type(guider).predict_noise is not comfy.samplers.CFGGuider.predict_noise
    return len(guider.conds) if guided else 1


def _prepare_without_loading(executor: Any, model: Any, noise_shape: Any, conds: Any, **kwargs: Any) -> Any:
    """Do what ComfyUI does before sampling, except for freeing memory on its device.

    ComfyUI's ``load_models_gpu`` frees a gigabyte for inference even for a model without weights, which would evict
    other models of ComfyUI. Here they are evicted only before the ranks load weights. The rest is the same: object
    patches (such as ModelSamplingSD3's) are applied, and the model is added to the loaded models, so that unloading
    reaches it.
    """
    handle = model.model.diffusion_model.handle
    transformers = [name for name in handle.checkpoint.components if name.startswith("transformer")]
    make_room(handle, transformers, ranks=handle.ranks)
    additional = model.get_nested_additional_models()
    for values in conds.values():
        additional += comfy.sampler_helpers.get_models_from_cond(values, "additional_models")
    if additional:
        comfy.model_management.load_models_gpu(additional)
    loaded = comfy.model_management.current_loaded_models
    for entry in [entry for entry in loaded if model.is_clone(entry.model)]:
        loaded.remove(entry)
        entry.model.detach(unpatch_all=False)
        entry.model_finalizer.detach()
    _add_to_loaded(model)
    return model.model, conds, additional


def prepare_component(patcher: RemotePatcher, component: str, *, ranks: int) -> None:
    """Make room for a text encoder or VAE on the first ``ranks`` ranks, and let unloading reach its weights.

    The component is unloaded with the model. ``patcher`` is added to ComfyUI's loaded models unless it or a clone of
    it already is one.
    """
    make_room(patcher.model.diffusion_model.handle, [component], ranks=ranks)
    if not any(patcher.is_clone(entry.model) for entry in comfy.model_management.current_loaded_models):
        _add_to_loaded(patcher)


def _add_to_loaded(patcher: Any) -> None:
    entry = comfy.model_management.LoadedModel(patcher)
    entry.model_load()
    comfy.model_management.current_loaded_models.insert(0, entry)


def _unload_ranks(patcher: Any, unpatch_all: bool) -> None:
    """Free the ranks' weights when ComfyUI unloads the model (*Unload models*, ``/free``, or its own eviction)."""
    if unpatch_all:
        patcher.model.diffusion_model.handle.unload()


def _one_request_per_step(executor: Any, model: Any, conds: Any, x_in: Tensor, timestep: Tensor, options: Any) -> Any:
    """Run ``calc_cond_batch`` twice, recording and replaying (see ``record_replay``).

    The recording run calls ComfyUI's bare function without other nodes' wrappers, so that those see real predictions
    only.
    """
    remote: RemoteTransformer = model.diffusion_model
    if remote.intercepting:
        return executor(model, conds, x_in, timestep, options)
    with remote.recording() as calls:
        executor.original(model, conds, x_in, timestep, _without_wrappers(options))
    with remote.replaying(calls):
        return executor(model, conds, x_in, timestep, options)


def _without_wrappers(model_options: dict[str, Any]) -> dict[str, Any]:
    bare = {name: value for name, value in model_options.items() if name != "model_function_wrapper"}
    bare["transformer_options"] = {
        name: value for name, value in model_options.get("transformer_options", {}).items() if name != "wrappers"
    }
    return bare
