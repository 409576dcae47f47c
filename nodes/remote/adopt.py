"""A MODEL or VAE that ComfyUI has loaded: its file, or a copy of its weights, and what nodes have set on it."""

import inspect
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

from ...parallel_backend.checkpoint.single_file import SUFFIXES
from ...parallel_backend.errors import InvalidRequest
from ..backend.executing import executing_lora
from ..backend.session import current
from ..bridges.announcements import announce_unpatched
from ..bridges.bridge import patched_weights
from ..bridges.refusals import check_compute_dtype, check_model_options
from .digests import described
from .memory_file import MemoryFile
from .patcher import RemotePatcher
from .weight_changes import fit_all
from .weight_patches import Patch, sort_patches

PREFIX = "diffusion_model."
"""The beginning of the transformer's names in a MODEL."""

COPY_TEXT = "a copy of the weights that ComfyUI has loaded"
"""What a node shows instead of a file's name."""

_LTX_DECODING = ("decode_noise_scale", "decode_timestep")
"""Attributes of an LTX VAE that set how it decodes."""

_PLAIN = {
    "load_diffusion_model": ("unet_path", "model_options"),
    "load_checkpoint_guess_config": ("ckpt_path", "model_options"),
    "load_checkpoint_vae_patcher": ("ckpt_path", "model_options"),
    "load_vae_patcher": ("vae_path", ""),
}
"""ComfyUI's functions that load a MODEL or VAE from a file: the arguments with the file and the options."""


def source_file(patcher: Any) -> Path | None:
    """Return the safetensors file that a MODEL or VAE was loaded from as it is, if ComfyUI has noted it.

    Versions before 0.27 do not note it.
    """
    noted = getattr(patcher, "cached_patcher_init", None)
    if noted is None or merged_weights(patcher):
        return None
    load, arguments, *_ = noted
    if load.__module__ != "comfy.sd" or load.__name__ not in _PLAIN:
        return None
    path, options = _PLAIN[load.__name__]
    given = inspect.signature(load).bind(*arguments).arguments
    file = Path(given[path])
    return file if file.suffix.lower() in SUFFIXES and not given.get(options) else None


def merged_weights(patcher: Any) -> frozenset[str]:
    """Return the names of a MODEL's weights that nodes change in other ways than by a LoRA's factors.

    Raises:
        InvalidRequest: see ``sort_patches``.
    """
    if not patcher.patches:
        return frozenset()
    # A compressed layer of ComfyUI's is no ``nn.Linear``.
    modules = [(name, each) for name, each in patcher.model.named_modules() if hasattr(each, "in_features")]
    linear = {f"{name}.weight" for name, each in modules if hasattr(each, "out_features")}
    return frozenset(sort_patches(_changes(patcher), _shapes(patcher), linear).merged)


def _changes(patcher: Any) -> dict[str, list[Patch]]:
    """Return the changes of a MODEL's weights that ComfyUI would make when it loads the MODEL.

    Raises:
        InvalidRequest: see ``fit_all``.
    """
    fitting = _fitting(patcher, patcher.patches)
    patched = patched_weights(patcher)
    announce_unpatched(executing_lora(), sorted(fitting.keys() - patched))
    return {name: changes for name, changes in fitting.items() if name in patched}


def _fitting(patcher: Any, patches: Mapping[str, Sequence[Patch]]) -> dict[str, list[Patch]]:
    shapes = _shapes(patcher)
    known = {name: changes for name, changes in patches.items() if name in shapes}
    return fit_all(shapes, type(patcher.model).__name__, known, executing_lora())


def _shapes(patcher: Any) -> dict[str, torch.Size]:
    """Return the shape of each weight. ``state_dict`` has the bytes of some compressed ones."""
    tensors = (*patcher.model.named_parameters(), *patcher.model.named_buffers())
    return {name: tensor.shape for name, tensor in tensors}


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """The copy that was made last.

    Attributes:
        source: ComfyUI's model.
        merged: a text about the changes that are merged into the copy.
        file: the copy.
    """

    source: weakref.ref[Any]
    merged: str
    file: MemoryFile


class _LastCopy(list[_Copy]):
    """The copy that was made last, if its model lives."""

    def forget(self, source: Any) -> None:
        """Forget the copy of a model that is gone."""
        self[:] = [copied for copied in self if copied.source is not source]


def copy_model(patcher: Any) -> MemoryFile:
    """Return a file for a MODEL's weights, merged as its nodes say. A LoRA's factors are left out.

    The last one is kept as long as ComfyUI has the model: with a changed strength of a LoRA, it is the same again.

    Raises:
        InvalidRequest: it does not fit into memory, or a weight is quantised.
    """
    merged = merged_weights(patcher)
    text = described([[name, patcher.patches[name]] for name in sorted(merged)])
    last_copy = current().part(_LastCopy)
    for copied in last_copy:
        if copied.source() is patcher.model and copied.merged == text:
            return copied.file
    last_copy.clear()  # makes room for another one
    file = _new_copy(patcher, merged)
    last_copy.append(_Copy(source=weakref.ref(patcher.model, last_copy.forget), merged=text, file=file))
    return file


def fill_copy(file: MemoryFile) -> None:
    """Copy the weights, if that has not been done yet.

    Raises:
        InvalidRequest: see ``MemoryFile.fill``.
    """
    try:
        file.fill()
    except BaseException:
        current().part(_LastCopy).clear()  # what is half copied is of no use
        raise


def _new_copy(patcher: Any, merged: frozenset[str]) -> MemoryFile:
    unet_config: Mapping[str, Any] = patcher.model.model_config.unet_config
    # A file's metadata becomes part of ``unet_config``, so this is what the file may have said.
    said = {name: value for name, value in unet_config.items() if isinstance(value, bool | int | float | str | list)}
    return MemoryFile(patcher, (PREFIX, ""), {"transformer": said}, merged)


def copy_vae(vae: Any) -> MemoryFile:
    """Return a file for a VAE's weights.

    Raises:
        InvalidRequest: it does not fit into memory, or a weight is quantised.
    """
    module = vae.first_stage_model
    config = _ltx_config(module) if isinstance(module, VideoVAE) else {}
    return MemoryFile(vae.patcher, ("", "vae."), {"vae": config})


def _ltx_config(module: VideoVAE) -> dict[str, Any]:
    """Return what a file's metadata says about an LTX VAE."""
    config = {
        "dims": 3,
        "norm_layer": "pixel_norm",
        "latent_log_var": "uniform",
        "causal_decoder": module.decoder.causal,
        "spatial_padding_mode": module.decoder.conv_in.conv.padding_mode,
        "encoder_blocks": module.encoder.blocks_desc,
        "decoder_blocks": module.decoder.blocks_desc,
    }
    # Versions of ComfyUI before these read them use the default values, too.
    return config | {name: getattr(module, name) for name in _LTX_DECODING if hasattr(module, name)}


def adopt(remote: RemotePatcher, source: Any) -> None:
    """Set on a parallel MODEL what nodes have set on another MODEL of the same weights.

    What is merged into the copied weights already is left out.

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
    if needing_layers or source.weight_wrapper_patches:
        what = needing_layers[0] if needing_layers else "layers or weights"
        raise InvalidRequest(f"a node before Parallel Model changes {what}, which is not supported: bypass that node")
    check_compute_dtype(source.object_patches)
    check_model_options(source.model_options)
    for name in ("model_sampling", "latent_format"):
        # While a clone of the MODEL is loaded, its object patches are in place of what the model itself has.
        setattr(ours, name, source.object_patches_backup.get(name, getattr(theirs, name)))
    copied = source.clone()  # with ComfyUI's own copies of everything that is set on it
    remote.object_patches, remote.model_options = copied.object_patches, copied.model_options
    merged = merged_weights(source)
    remote.patches = {name: changes for name, changes in _changes(copied).items() if name not in merged}
    remote.hook_patches = {ref: _fitting(copied, patches) for ref, patches in copied.hook_patches.items()}
    remote.patches_uuid = copied.patches_uuid
    for key, injections in copied.injections.items():
        remote.set_injections(key, injections)
    remote.attachments, remote.additional_models = copied.attachments, copied.additional_models
    for own, others in ((remote.callbacks, copied.callbacks), (remote.wrappers, copied.wrappers)):
        for kind, by_key in others.items():
            for key, functions in by_key.items():
                own.setdefault(kind, {}).setdefault(key, []).extend(functions)
