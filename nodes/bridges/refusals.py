"""What cannot be done with weights that live elsewhere is refused here, by name and before anything is sent."""

from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.layout.parallel_layout import ParallelLayout

LAYER_OPTIONS = {
    "patches": "changes what the model's layers compute, as HyperTile, FreeU and DiffSynth's ControlNets do",
    "patches_replace": "skips or replaces layers of the model, as SkipLayerGuidance and PerturbedAttentionGuidance do",
    "optimized_attention_override": "chooses how attention is computed, for which ParallelLoader has an input here",
    "rope_options": "scales or shifts the positions inside the model, as ScaleROPE does",
}
"""What nodes hang into ``transformer_options``, and what such a node does."""
COMPILED = "torch_compile_kwargs"
"""What core's ``set_torch_compile_wrapper`` leaves in ``model_options``."""
UNSUPPORTED_CONDS = (
    "control", "gligen", "concat_latent_image", "concat_mask", "concat_image", "noise_concat_image",
    "clip_vision_output", "reference_latents", "vace_frames", "time_dim_concat", "camera_conditions",
    "audio_embed", "reference_motion",
    "control_video", "face_video_pixels", "pose_video_latent", "unclip_conditioning",
)  # fmt: skip
INPAINTING_CONDS = frozenset({"concat_latent_image", "concat_mask"})
PER_STEP_CONDS = (
    "area", "mask", "hooks", "start_percent", "end_percent", "clip_start_percent", "clip_end_percent", "default",
)  # fmt: skip
USE_KSAMPLER = "use KSampler (or any native sampling node) with this MODEL instead"


def check_latent(latent: Tensor, channels: int) -> None:
    """Refuse a latent that the model cannot take.

    Raises:
        InvalidRequest: several latents in one, a wrong number of channels, or values that are not finite.
    """
    if latent.is_nested:
        raise InvalidRequest("a latent of several tensors (video with audio) does not fit this model; pass the video's")
    if latent.shape[1] != channels:
        raise InvalidRequest(
            f"the latent has {latent.shape[1]} channels and this model works on {channels}: "
            "encode it with the VAE that ParallelLoader gives"
        )
    if not torch.isfinite(latent).all():
        raise InvalidRequest("the latent holds values that are not finite (NaN or infinity); look at what made it")


def check_branches(layout: ParallelLayout | None, branches: int) -> None:
    """Refuse a ``cfg`` degree that has nothing to share out.

    Raises:
        InvalidRequest: fewer branches than the layout's ``cfg``.
    """
    if layout is None or layout.cfg <= branches:
        return
    if branches == 1:
        raise InvalidRequest(
            f"layout cfg={layout.cfg} gives the positive and the negative prompt to different ranks, and this sampling "
            "has only one prompt: set cfg to something other than 1.0, or use a layout with cfg=1"
        )
    raise InvalidRequest(
        f"layout cfg={layout.cfg}: this sampling has {branches} prompts, so cfg is at most {branches}; "
        "give the other ranks to ulysses or data"
    )


def check_model_options(model_options: Mapping[str, Any]) -> None:
    """Refuse what nodes have added to a MODEL that needs its layers here.

    Raises:
        InvalidRequest: says what such a node does.
    """
    if model_options.get(COMPILED):
        raise without_layers("a node compiles the model, as TorchCompileModel does")
    check_options(model_options.get("transformer_options", {}))


def check_options(transformer_options: Mapping[str, Any]) -> None:
    """Refuse what a node has hung into the layers of the model.

    Raises:
        InvalidRequest: says what such a node does.
    """
    for option, doing in LAYER_OPTIONS.items():
        if transformer_options.get(option):
            raise without_layers(f"a node {doing} ({option})")


def without_layers(doing: str) -> InvalidRequest:
    """The refusal of a node that needs the layers in ComfyUI's process."""
    return InvalidRequest(
        f"{doing}; the layers of a parallel model run in the backend's processes: remove that node, "
        "or load the model with ComfyUI's own loader"
    )


def taken_conds(family: frozenset[str], *, masked: bool) -> frozenset[str]:
    """The conditioning that a family takes.

    A latent with a mask is inpainted by that alone in models without channels for a picture: there ComfyUI looks
    neither at the picture nor at the mask that InpaintModelConditioning puts into the conditioning as well.
    """
    return family | INPAINTING_CONDS if masked else family


def check_conds(conds: Iterable[Mapping[str, Any]], taken: Container[str]) -> None:
    """Refuse conditioning that needs another model inside this one's layers, or that this model has no input for.

    Core drops some of it without a word when the model is a text-to-image or text-to-video one. ``taken`` is what
    the family takes.

    Raises:
        InvalidRequest: names the kind.
    """
    present = {name for cond in conds for name in UNSUPPORTED_CONDS if name not in taken and cond.get(name) is not None}
    if present:
        raise InvalidRequest(
            f"conditioning with {', '.join(sorted(present))} is not supported by the parallel model: "
            "remove the node that adds it, or load the model with ComfyUI's own loader"
        )


def check_extra(extra: Mapping[str, Any]) -> None:
    """Refuse model inputs that the family's bridge does not carry over.

    Raises:
        InvalidRequest: names the inputs.
    """
    present = sorted(name for name, value in extra.items() if value is not None)
    if present:
        raise InvalidRequest(
            f"conditioning with {', '.join(present)} is not supported by this model; remove the node that adds it"
        )


def check_constant_conds(name: str, conditioning: list[Any], taken: Container[str]) -> None:
    """Refuse conditioning that changes from step to step or over the picture.

    Raises:
        InvalidRequest: names what it is and advises KSampler.
    """
    if len(conditioning) != 1:
        raise InvalidRequest(f"{name}: ParallelSampler takes one conditioning, not {len(conditioning)}; {USE_KSAMPLER}")
    check_conds([conditioning[0][1]], taken)
    present = [key for key in PER_STEP_CONDS if conditioning[0][1].get(key) is not None]
    if present:
        raise InvalidRequest(f"{name} has {', '.join(present)}, which ParallelSampler does not do; {USE_KSAMPLER}")
