"""The patcher of a parallel MODEL, and what it does before and during sampling."""

import math
from functools import partial
from typing import Any, NoReturn

import comfy.model_management
import comfy.sampler_helpers
import comfy.samplers
import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP
from torch import Tensor
from typing_extensions import override

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.protocol.packing import unpack
from ..backend.connection import Handle
from ..bridges.announcements import announce_attention, announce_callbacks, announce_text_only
from ..bridges.refusals import (
    TRANSFORMER,
    accepted_conds,
    check_branches,
    check_compute_dtype,
    check_conds,
    check_layer_changes,
    check_model_options,
    failed_for_layers,
    transformer_replaced,
)
from .cached_sampling import step_cache
from .changing_patcher import ChangingPatcher
from .record_replay import one_request_per_step
from .transformer import RemoteTransformer
from .unknown_lora import unknown_lora

KEY = "parallel_dit"
REFUSES_SAVING = "state_dict_for_saving"
"""The method of ComfyUI's model that we replace on each model."""


class RemotePatcher(ChangingPatcher):
    """The patcher of a ComfyUI model whose ``diffusion_model`` is a ``RemoteTransformer``."""

    @property
    def target(self) -> RemoteTransformer:
        """The model's transformer.

        Raises:
            InvalidRequest: a node has put another transformer into the model.
        """
        found = self.model.diffusion_model
        if not isinstance(found, RemoteTransformer):
            raise transformer_replaced(TRANSFORMER, found)
        return found

    @override
    def _load_list(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Return the layers that ComfyUI loads: none. What ``modules()`` lists has no weights."""
        return []

    @override
    def get_all_callbacks(self, call_type: str) -> list[Any]:
        """Return the callbacks of a kind. While calls are recorded there are none: they run with real predictions.

        Memory management asks for them, too, whatever a node has put into the transformer's place.
        """
        recording = getattr(self.model.diffusion_model, "recording_now", False)
        return [] if recording else list(super().get_all_callbacks(call_type))

    def check_patches(self, patches: dict[Any, Any], lora: str, hook: Any = None) -> None:
        """Refuse a LoRA that fits nothing.

        A loader's comes with its changes of the text encoder, and a hook's without.

        Raises:
            InvalidRequest: there are no changes.
        """
        if patches or (hook is not None and not hook._strength_model):
            return
        if hook is None or not any(_of_text(name) for name in hook.weights or ()):
            raise unknown_lora(lora, self.target.handle.checkpoint.name, (hook and hook.weights) or ())
        announce_text_only(lora)


def _of_text(name: str) -> bool:
    """Whether a name in a LoRA's file belongs to a text encoder."""
    return name.startswith(("lora_te", "text_encoder", "clip_", "te.", "te1.", "te2.", "te_"))


def remote_patcher(model: Any) -> RemotePatcher:
    """Return a patcher around a ComfyUI model whose ``diffusion_model`` is a ``RemoteTransformer``."""
    model.memory_usage_factor = 0
    setattr(model, REFUSES_SAVING, _refuse_saving)
    device = comfy.model_management.get_torch_device()
    patcher = RemotePatcher(model, load_device=device, offload_device=torch.device("cpu"))
    patcher.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, _check_before_sampling)
    patcher.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, KEY, _prepare_without_loading)
    patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, one_request_per_step)
    patcher.add_callback_with_key(CallbacksMP.ON_DETACH, KEY, partial(_unload_ranks, model.diffusion_model.handle))
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
    remote: RemoteTransformer = guider.model_patcher.target
    shapes = kwargs.get("latent_shapes") or (latent_image.shape,)
    remote.bridge.check_latents(unpack(latent_image, [shape[1:] for shape in shapes]))
    check_branches(remote.handle.spec.layout, _branches(guider, sampler))
    _check_model(guider.model_patcher, guider.model_options)
    accepted = accepted_conds(remote.bridge.supported_conds, masked=denoise_mask is not None)
    check_conds((cond for conds in guider.conds.values() for cond in conds), accepted)
    try:
        with guider.model_patcher.prepared_changes(), step_cache(remote, guider.model_options, sigmas):
            samples: Tensor = executor(noise, latent_image, sampler, sigmas, denoise_mask, *args, **kwargs)
    except Exception as error:
        if refusal := failed_for_layers(error, remote.asked):
            raise refusal from error
        raise
    finally:
        remote.handle.end_run()
        remote.handle.give_back_cache()
    remote.asked.clear()  # the nodes did without
    remote.handle.show("ready")
    return samples


def _check_model(patcher: RemotePatcher, model_options: dict[str, Any]) -> None:
    """Refuse what nodes set on a MODEL and the ranks cannot do."""
    check_model_options(model_options)
    check_compute_dtype(patcher.object_patches)
    patcher.target.begin_sampling()
    check_layer_changes(patcher, patcher.target.changed_layer())
    announce_callbacks(patcher.callbacks, own=KEY)
    announce_attention(model_options.get("transformer_options", {}))


def _branches(guider: Any, sampler: Any) -> int:
    """Return how many prompts ComfyUI runs in a step.

    Its own guider skips the negative one at a cfg of 1, except for CFG++ samplers, which ask for it in each step.
    """
    function = getattr(getattr(sampler, "sampler_function", None), "__name__", "")
    guided = not math.isclose(getattr(guider, "cfg", 0.0), 1.0) or is_cfg_pp(function)
    guided = guided or guider.model_options.get("disable_cfg1_optimization", False)
    guided = guided or type(guider).predict_noise is not comfy.samplers.CFGGuider.predict_noise
    return len(guider.conds) if guided else 1


def is_cfg_pp(name: str) -> bool:
    """Whether a sampler of this name, or its node, is one of ComfyUI's CFG++ samplers."""
    return any(part in name.lower() for part in ("cfg_pp", "cfgpp", "euler_pp"))


def _prepare_without_loading(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``_prepare`` in place of ComfyUI's function, inside other nodes' wrappers."""
    executor.original = _prepare
    return executor(*args, **kwargs)


def _prepare(model: Any, noise_shape: Any, conds: Any, model_options: Any = None, **kwargs: Any) -> Any:
    """Do what ComfyUI does before sampling, except for freeing memory on its device.

    ComfyUI's ``load_models_gpu`` frees a gigabyte for inference even for a model without weights, which would evict
    other models of ComfyUI. Here they are evicted only before the ranks load weights. The rest is the same: object
    patches (such as ModelSamplingSD3's) are applied, and the model is added to the loaded models, so that unloading
    reaches it.
    """
    handle = model.model.diffusion_model.handle
    transformers = [name for name in handle.checkpoint.components if name.startswith("transformer")]
    handle.make_room(transformers, ranks=handle.ranks)
    additional = comfy.sampler_helpers.get_additional_models_from_model_options(model_options)
    additional += model.get_nested_additional_models()
    for values in conds.values():
        additional += comfy.sampler_helpers.get_models_from_cond(values, "additional_models")
    if additional:
        comfy.model_management.load_models_gpu(additional)
    loaded = comfy.model_management.current_loaded_models
    for entry in [entry for entry in loaded if model.is_clone(entry.model)]:
        loaded.remove(entry)
        entry.model.detach(unpatch_all=False)
        finalizer: Any = entry.model_finalizer
        finalizer.detach()
    _add_to_loaded(model)
    return model.model, conds, additional


def prepare_component(patcher: RemotePatcher, component: str, *, ranks: int) -> None:
    """Make room for a text encoder or VAE on the first ``ranks`` ranks, and let unloading reach its weights.

    The component is unloaded with the model. ``patcher`` is added to ComfyUI's loaded models unless it or a clone of
    it already is one.
    """
    patcher.model.diffusion_model.handle.make_room([component], ranks=ranks)
    if not any(patcher.is_clone(entry.model) for entry in comfy.model_management.current_loaded_models):
        _add_to_loaded(patcher)


def _add_to_loaded(patcher: Any) -> None:
    entry = comfy.model_management.LoadedModel(patcher)
    entry.model_load()
    comfy.model_management.current_loaded_models.insert(0, entry)


def _unload_ranks(handle: Handle, patcher: Any, unpatch_all: bool) -> None:
    """Free the ranks' weights when ComfyUI unloads the model (*Unload models*, ``/free``, or its own eviction)."""
    if unpatch_all:
        handle.unload()
