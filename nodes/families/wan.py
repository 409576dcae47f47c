"""Wan 2.1 text-to-video: ComfyUI's WAN21 model class over diffusers' WanTransformer3DModel."""

from collections.abc import Mapping
from typing import Any

import comfy.ldm.wan.model
import comfy.ops
import comfy.patcher_extension
import comfy.supported_models
import torch
from torch import Tensor

from ...parallel_backend.checkpoint import Checkpoint
from ...parallel_backend.errors import InvalidRequest
from ..connection import Handle
from ..guards import check_extra
from ..previews import fit_latent_format
from ..remote_model import RemoteModel
from .bridge import Bridge, VideoScale

DTYPES: dict[str, torch.dtype] = {
    "auto": torch.float32,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""In which dtype latents and text are handed over; ``auto`` leaves the rounding to the ranks."""


class RemoteWan(RemoteModel):
    """Takes the calls that ComfyUI makes to its ``WanModel``."""

    def __init__(self, handle: Handle, *, unet_config: Mapping[str, Any]) -> None:
        super().__init__(
            handle,
            dtype=DTYPES[handle.spec.dtype],
            weights=_native_names(unet_config),
            channels=unet_config["in_dim"],
        )
        self.patch_size = tuple(unet_config["patch_size"])
        self.patch_embedding = self.weight("patch_embedding")

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor | None = None,
        clip_fea: Tensor | None = None,
        time_dim_concat: Tensor | None = None,
        transformer_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The flow prediction for ``x`` ``[B, C, T, H, W]``, through other nodes' DIFFUSION_MODEL wrappers.

        Raises:
            InvalidRequest: an input that the family does not carry over.
        """
        options = transformer_options or {}
        wrappers = comfy.patcher_extension.get_all_wrappers(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, options)
        executor = comfy.patcher_extension.WrapperExecutor.new_class_executor(self._forward, self, wrappers)
        out: Tensor = executor.execute(x, timestep, context, clip_fea, time_dim_concat, options, **kwargs)
        return out

    def _forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor | None,
        clip_fea: Tensor | None,
        time_dim_concat: Tensor | None,
        transformer_options: Mapping[str, Any],
        **kwargs: Any,
    ) -> Tensor:
        check_extra({"clip_fea": clip_fea, "time_dim_concat": time_dim_concat, **kwargs})
        if context is None:
            raise InvalidRequest("the conditioning has no text; encode the prompt with the CLIP of ParallelLoader")
        inputs = {"hidden_states": x, "timestep": timestep, "encoder_hidden_states": context}
        return self.predict(inputs, latent="hidden_states", transformer_options=transformer_options)


def _native_names(unet_config: Mapping[str, Any]) -> dict[str, Tensor]:
    shape = {name: value for name, value in unet_config.items() if name != "disable_unet_model_creation"}
    native = comfy.ldm.wan.model.WanModel(
        **shape, device="meta", dtype=torch.bfloat16, operations=comfy.ops.disable_weight_init
    )
    return dict(native.state_dict())


def _unet_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What ComfyUI's model detection would find in the converted weights."""
    return {
        "image_model": "wan2.1",
        "model_type": "t2v",
        "patch_size": tuple(config["patch_size"]),
        "in_dim": config["in_channels"],
        "out_dim": config["out_channels"],
        "dim": config["num_attention_heads"] * config["attention_head_dim"],
        "ffn_dim": config["ffn_dim"],
        "freq_dim": config["freq_dim"],
        "text_dim": config["text_dim"],
        "num_heads": config["num_attention_heads"],
        "num_layers": config["num_layers"],
        "cross_attn_norm": config["cross_attn_norm"],
        "eps": config["eps"],
        "disable_unet_model_creation": True,
    }


def _check(checkpoint: Checkpoint) -> None:
    config, name = checkpoint.config("transformer"), checkpoint.path.name
    try:
        unet_config = _unet_config(config)
    except KeyError as error:
        raise InvalidRequest(f"{name}: the transformer's config.json lacks {error}") from error
    if config.get("image_dim") or unet_config["in_dim"] != unet_config["out_dim"]:
        raise InvalidRequest(f"{name} is an image-to-video model; only text-to-video is supported")
    if "transformer_2" in checkpoint.components:
        raise InvalidRequest(f"{name} has two transformers (Wan 2.2); only Wan 2.1 with one is supported")
    expected = comfy.supported_models.WAN21_T2V.latent_format.latent_channels
    if unet_config["in_dim"] != expected:
        raise InvalidRequest(f"{name} works on {unet_config['in_dim']} latent channels; {expected} are supported")
    if "vae" in checkpoint.components and _scale(checkpoint) != VideoScale(channels=expected, temporal=4, spatial=8):
        raise InvalidRequest(f"{name}: the VAE's {_scale(checkpoint)} is not Wan 2.1's (16 channels, 1/4 in time, 1/8)")


def _scale(checkpoint: Checkpoint) -> VideoScale:
    if "vae" not in checkpoint.components:
        return VideoScale(channels=16, temporal=4, spatial=8)
    config = checkpoint.config("vae")
    # The spelling is diffusers' own.
    downsample = config.get("temperal_downsample", [False, True, True])
    return VideoScale(
        channels=config.get("z_dim", 16), temporal=2 ** sum(map(bool, downsample)), spatial=2 ** len(downsample)
    )


def _model(handle: Handle) -> Any:
    unet_config = _unet_config(handle.checkpoint.config("transformer"))
    model = comfy.supported_models.WAN21_T2V(unet_config).get_model({})
    model.diffusion_model = RemoteWan(handle, unet_config=unet_config)
    fit_latent_format(model.latent_format, handle.checkpoint)
    return model


BRIDGE = Bridge(
    check=_check,
    model=_model,
    scale=_scale,
    text_key="umt5xxl",
    text_length=512,
    vaes=("AutoencoderKLWan",),
    text_encoders=("UMT5EncoderModel",),
)
