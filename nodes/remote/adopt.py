"""A MODEL that ComfyUI has loaded, turned into one that runs on the ranks with everything that nodes have set on it."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import comfy.sd

from ...parallel_backend.errors import InvalidRequest
from .memory_file import PREFIX, MemoryFile
from .patcher import RemotePatcher

CONFIG_ENTRIES = ("causal_temporal_positioning",)
"""Entries of ``unet_config`` that a file holds as metadata."""

_PLAIN = {
    comfy.sd.load_diffusion_model: ("unet_path", "model_options"),
    comfy.sd.load_checkpoint_guess_config: ("ckpt_path", "model_options"),
}
"""ComfyUI's functions that load a MODEL from a file: the arguments with the file and the options."""


def source_file(patcher: Any) -> Path | None:
    """Return the file that a MODEL was loaded from as it is, if ComfyUI has noted it; versions before 0.27 do not."""
    noted = getattr(patcher, "cached_patcher_init", None)
    if noted is None or noted[0] not in _PLAIN or patcher.patches:
        return None
    load, arguments, *_ = noted
    path, options = _PLAIN[load]
    given = inspect.signature(load).bind(*arguments).arguments
    return None if given.get(options) else Path(given[path])


def copy_weights(patcher: Any) -> MemoryFile:
    """Return a file in memory with a MODEL's weights, merged and patched as its nodes say.

    Raises:
        InvalidRequest: it does not fit into memory, or a weight is quantised.
    """
    unet_config: Mapping[str, Any] = patcher.model.model_config.unet_config
    return MemoryFile(patcher, {name: unet_config[name] for name in CONFIG_ENTRIES if name in unet_config})


def adopt(remote: RemotePatcher, source: Any) -> None:
    """Set on a parallel MODEL what nodes have set on another MODEL of the same weights, except for weight patches.

    Raises:
        InvalidRequest: ComfyUI takes the two for different models, or a node has set something that needs the layers.
    """
    ours, theirs = remote.model, source.model
    if type(ours) is not type(theirs):
        raise InvalidRequest(
            f"ComfyUI loaded this model as {type(theirs).__name__}, and Parallel Model takes its weights for "
            f"{type(ours).__name__}: load it with Load Diffusion Model or Parallel Loader"
        )
    needing_layers = [name for name in source.object_patches if name.startswith(PREFIX)]
    if needing_layers or source.injections or source.hook_patches or source.weight_wrapper_patches:
        what = needing_layers[0] if needing_layers else "layers or weights"
        raise InvalidRequest(f"a node before Parallel Model changes {what}, which is not supported: bypass that node")
    ours.model_sampling, ours.latent_format = theirs.model_sampling, theirs.latent_format
    copied = source.clone()  # with ComfyUI's own copies of everything that is set on it
    remote.object_patches, remote.model_options = copied.object_patches, copied.model_options
    remote.attachments, remote.additional_models = copied.attachments, copied.additional_models
    for own, others in ((remote.callbacks, copied.callbacks), (remote.wrappers, copied.wrappers)):
        for kind, by_key in others.items():
            for key, functions in by_key.items():
                own.setdefault(kind, {}).setdefault(key, []).extend(functions)
