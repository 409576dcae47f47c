"""Refuse what cannot work because the weights are in other processes.

Each check names the cause and runs before anything is sent.
"""

import re
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from comfy.model_management import OOM_EXCEPTION, InterruptProcessingException
from torch import Tensor

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.layout.parallel_layout import ParallelLayout
from ..backend.packs import calling_node, failed_node, maker
from .attention_choice import OVERRIDE, SPARSE, chosen_kernel, is_sparse
from .instead import instead_of

LAYER_OPTIONS = {
    "patches": "changes what the model's layers compute, as HyperTile, FreeU and model patches (DiffSynth, Uni3C) do",
    OVERRIDE: "chooses an attention kernel, for which Parallel Loader and Parallel Model have the input attention",
    "rope_options": "scales or shifts the positions inside the model, as ScaleROPE does",
}
"""What a node does that leaves one of these keys in ``transformer_options``."""
TRANSFORMER = "diffusion_model"
"""Where ComfyUI's model has its transformer."""
REPLACEMENTS, BLOCKS = "patches_replace", "dit"
"""Where ``transformer_options`` has the functions that replace parts of the model, and among them those for blocks."""
COMPILE_KEY = "torch_compile_kwargs"
"""The key that ComfyUI's ``set_torch_compile_wrapper`` leaves in ``model_options``."""
UNSUPPORTED_CONDS = (
    "control", "gligen", "concat_latent_image", "concat_mask", "concat_image", "noise_concat",
    "clip_vision_output", "reference_latents", "vace_frames", "time_dim_concat", "camera_conditions",
    "audio_embed", "reference_motion",
    "control_video", "face_video_pixels", "pose_video_latent", "unclip_conditioning",
    "context_latents", "ref_latent", "clip_vision_outputs", "reference_latents_text_embeds",
)  # fmt: skip
INPAINTING_CONDS = frozenset({"concat_latent_image", "concat_mask"})
VARYING_CONDS = (
    "area", "mask", "hooks", "start_percent", "end_percent", "clip_start_percent", "clip_end_percent", "default",
)  # fmt: skip
"""Conditioning that varies over steps or over the image."""


def check_number_of_latents(given: int, taken: int, model: str, maker: str) -> None:
    """Refuse a nested latent of another number of tensors than a model predicts.

    Args:
        maker: ComfyUI's node that makes a latent of this number.

    Raises:
        InvalidRequest: the number is another.
    """
    if given == taken:
        return
    if taken == 1:
        raise _nested(model)
    raise InvalidRequest(
        f"{model} makes picture and sound together and takes a latent of {taken} tensors, and this one has {given}: "
        f"use {maker}"
    )


def _nested(taker: str) -> InvalidRequest:
    return InvalidRequest(
        f"the latent consists of several tensors (video with audio), and {taker} takes one: pass the video's, which "
        "LTXVSeparateAVLatent gives"
    )


def check_latent(latent: Tensor, channels: int, taker: str = "this model") -> None:
    """Refuse a latent that a model or VAE cannot take.

    Raises:
        InvalidRequest: a nested latent, a wrong number of channels, or values that are not finite.
    """
    if latent.is_nested:
        raise _nested(taker)
    if latent.shape[1] != channels:
        raise InvalidRequest(
            f"the latent has {latent.shape[1]} channels and {taker} works on {channels}: "
            "encode it with the VAE of Parallel Loader"
        )
    check_finite(latent)


def check_finite(latent: Tensor) -> None:
    """Refuse a latent with NaN or infinity.

    Raises:
        InvalidRequest: it has such values.
    """
    if not torch.isfinite(latent).all():
        raise InvalidRequest("the latent has values that are not finite (NaN or infinity); check the node that made it")


def check_branches(layout: ParallelLayout | None, branches: int) -> None:
    """Refuse a ``cfg`` degree above the number of branches.

    Raises:
        InvalidRequest: there are fewer branches than the layout's ``cfg``.
    """
    if layout is None or layout.cfg <= branches:
        return
    if branches == 1:
        raise InvalidRequest(
            f"layout cfg={layout.cfg} computes the positive and the negative prompt on different ranks, but this "
            "sampler call has no negative prompt (its cfg is 1.0, or it takes only one prompt): raise the sampler's "
            "cfg, or set cfg to 1 in Parallel Layout"
        )
    raise InvalidRequest(
        f"layout cfg={layout.cfg}: this sampler call has {branches} prompts, so cfg can be at most {branches}; "
        "give the other ranks to ulysses or data"
    )


def check_model_options(model_options: Mapping[str, Any]) -> None:
    """Refuse options that a node set on the MODEL and that need the layers in ComfyUI's process.

    Raises:
        InvalidRequest: there is such an option. The message says what the node does.
    """
    if model_options.get(COMPILE_KEY):
        raise layers_unavailable(
            "a node compiles the model, as TorchCompileModel does, for which Parallel Loader and Parallel Model have "
            "the input compile"
        )
    check_options(model_options.get("transformer_options", {}))


def check_compute_dtype(object_patches: Mapping[str, Any]) -> None:
    """Refuse another dtype for the computation: the ranks hold the weights in the dtype that they compute in.

    Raises:
        InvalidRequest: a node set one.
    """
    if object_patches.get("manual_cast_dtype") is not None:
        raise InvalidRequest(
            "ModelComputeDtype has no effect on a parallel model: remove it, and choose the dtype in Parallel Loader"
        )


def check_options(transformer_options: Mapping[str, Any]) -> None:
    """Refuse transformer options that need the layers in ComfyUI's process.

    Raises:
        InvalidRequest: there is such an option. The message says what the node does.
    """
    if is_sparse(transformer_options):
        action = "a node lets each token attend to some of the others, and the ranks compute all of its attention"
        raise layers_unavailable(action, SPARSE)
    for option, action in LAYER_OPTIONS.items():
        if transformer_options.get(option) and not (option == OVERRIDE and chosen_kernel(transformer_options[option])):
            raise layers_unavailable(f"a node {action} ({option})", maker(transformer_options[option]))
    replaced = transformer_options.get(REPLACEMENTS) or {}
    others = [functions for kind, functions in replaced.items() if functions and kind != BLOCKS]
    if others:
        raise layers_unavailable(
            f"a node replaces attention in the model, as PerturbedAttentionGuidance does ({REPLACEMENTS})",
            maker(others),
        )


def check_layer_changes(patcher: Any, changed_layer: tuple[str, str] | None) -> None:
    """Refuse what other nodes do to layers that are not in ComfyUI's process.

    Raises:
        InvalidRequest: a node replaces a part of the transformer, or wraps a weight or a layer.
    """
    replaced = sorted(name for name in patcher.object_patches if name.partition(".")[0] == TRANSFORMER)
    if replaced:
        raise transformer_replaced(replaced[0], patcher.object_patches[replaced[0]])
    wrapped = sorted(patcher.weight_wrapper_patches.keys() & patcher.model.state_dict().keys())
    if wrapped:
        raise layers_unavailable(f"a node computes the weight {wrapped[0]} anew at each use")
    check_changed_layer(changed_layer)


def transformer_replaced(name: str, value: Any) -> "Unavailable":
    """Return the refusal of something that a node has put into the place of the transformer or of a part of it."""
    action = "compiles" if type(value).__name__ == "OptimizedModule" else "replaces"  # torch's
    return layers_unavailable(f"a node {action} {name}", maker(value))


def check_changed_layer(changed_layer: tuple[str, str] | None) -> None:
    """Refuse a layer that a node has wrapped or replaced, because the ranks have others.

    Args:
        changed_layer: its name, and the node if that is known; None if there is none.

    Raises:
        InvalidRequest: there is one.
    """
    if changed_layer is not None:
        layer, node = changed_layer
        raise layers_unavailable(f"a node wraps or replaces the layer {layer}", node)


class Unavailable(InvalidRequest, AttributeError):
    """A node needs what is not in ComfyUI's process. As an ``AttributeError`` it lets ``hasattr`` answer False."""


def layers_unavailable(action: str, node: str = "") -> Unavailable:
    """Return the refusal of a node that needs the layers in ComfyUI's process.

    Args:
        action: what it does, which begins with "a node" if the node is not known.
        node: its name. By default, the node of another pack whose code calls ours.
    """
    node = node or calling_node()
    action = re.sub("^a node", node, action) if node else action
    return Unavailable(
        f"{action}; the layers of a parallel model run in the backend's processes: {instead_of(node)}, "
        "or load the model with ComfyUI's own loader"
    )


def failed_for_layers(error: Exception, asked: Mapping[str, str]) -> Unavailable | None:
    """Return the refusal that stands for an error of another pack's node that asked for layers; None for other errors.

    Args:
        asked: the name that each node asked for last and that ComfyUI's own transformer has.
    """
    node = failed_node(error)
    if node not in asked or isinstance(error, InvalidRequest | InterruptProcessingException | OOM_EXCEPTION):
        return None
    text = next(iter(str(error).splitlines()), "")  # a module's text has a line for each layer
    return layers_unavailable(f"a node uses {TRANSFORMER}.{asked[node]} ({type(error).__name__}: {text})", node)


def accepted_conds(supported: frozenset[str], *, masked: bool) -> frozenset[str]:
    """Return the names of the conditioning that a sampler call accepts.

    A model without channels for an image inpaints a masked latent with only the mask. ComfyUI then ignores the image
    and the mask that InpaintModelConditioning also puts into the conditioning.
    """
    return supported | INPAINTING_CONDS if masked else supported


def check_conds(conds: Iterable[Mapping[str, Any]], accepted: Container[str]) -> None:
    """Refuse conditioning that needs another model inside this one's layers, or that this model has no input for.

    ComfyUI silently drops some of it for text-to-image and text-to-video models.

    Raises:
        InvalidRequest: there is such conditioning. The message names it.
    """
    present = {
        name for cond in conds for name in UNSUPPORTED_CONDS if name not in accepted and cond.get(name) is not None
    }
    if present:
        raise InvalidRequest(
            f"conditioning with {', '.join(sorted(present))} is not supported by the parallel model: "
            "remove the node that adds it, or load the model with ComfyUI's own loader"
        )


def check_unused(call_args: Mapping[str, Any]) -> None:
    """Refuse arguments of a call to the transformer that the family's bridge did not use.

    Raises:
        InvalidRequest: there are such arguments. The message names them.
    """
    present = sorted(name for name, value in call_args.items() if value is not None)
    if present:
        raise InvalidRequest(
            f"conditioning with {', '.join(present)} is not supported by this model; remove the node that adds it"
        )
