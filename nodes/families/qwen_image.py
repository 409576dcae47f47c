"""The bridge between ComfyUI's and diffusers' transformers of the same name, for Qwen-Image and Qwen-Image-Edit."""

from collections.abc import Mapping
from typing import Any

import comfy.ldm.qwen_image.model
import torch
from torch import Tensor, nn

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import Bridge, CoreText, non_default, pop_text

PATCH = 2
NOT_INFERRED = (
    "patch_size", "out_channels", "attention_head_dim", "num_attention_heads", "joint_attention_dim", "axes_dims_rope",
)  # fmt: skip
"""Config entries that ComfyUI's model detection does not infer; it assumes the native class's defaults."""

TIMESTEP_ZERO = "index_timestep_zero"
"""ComfyUI's name of the reference method that diffusers calls ``zero_cond_t`` (Edit 2511)."""


class QwenImage(Bridge):
    """Qwen-Image's bridge. Latents have a frame dim of length 1."""

    native_class = comfy.ldm.qwen_image.model.QwenImageTransformer2DModel
    supported_conds = frozenset({"reference_latents"})
    text = CoreText(components={"text_encoder": ("Qwen2_5_VLForConditionalGeneration",)}, clip_type="QWEN_IMAGE")
    vaes = ("AutoencoderKLQwenImage", "AutoencoderKLWan")  # the layers are the same: a single file does not tell which

    def unet_config(self) -> dict[str, Any]:
        """See ``Bridge``."""
        config = self.config
        unet_config = {
            "image_model": "qwen_image",
            "in_channels": config["in_channels"],
            "num_layers": config["num_layers"],
        }
        if config.get("zero_cond_t"):
            unet_config["default_ref_method"] = TIMESTEP_ZERO
        not_inferred = {name: config[name] for name in NOT_INFERRED if name in config}
        return unet_config | non_default(self.native_class, not_inferred)

    @property
    def replaceable_blocks(self) -> Mapping[str, int]:
        """See ``Bridge``."""
        return {"double_block": self.config["num_layers"]}

    def inputs(self, x: Tensor, timestep: Tensor, call_args: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``.

        Positions are ComfyUI's. diffusers' positions differ by one if a side has an odd number of patches, and its
        text starts after the largest image instead of after the generated one.
        """
        text = pop_text(call_args)
        inputs = {"hidden_states": x, "timestep": timestep, "encoder_hidden_states": text}
        names = ("ref_latents", "ref_latents_method")
        references: dict[str, Any] = {name: call_args.pop(name) for name in names if name in call_args}
        self._check_reference_method(references)
        inputs |= {f"reference_{i}": latent for i, latent in enumerate(references.get("ref_latents", ()), start=1)}
        probe: Any = _PositionProbe(self.native_class)
        self.native_class._forward(probe, x, timestep, text, transformer_options={}, **references)
        return inputs | {"start_ids": torch.cat(probe.starts, dim=1)}

    def _check_reference_method(self, references: dict[str, Any]) -> None:
        """Refuse a reference method that the model was not trained for.

        Models with ``zero_cond_t`` expect references at timestep zero; others do not.
        """
        method = references.get("ref_latents_method")
        timestep_zero = bool(self.config.get("zero_cond_t"))
        if "ref_latents" in references and method is not None and (method == TIMESTEP_ZERO) != timestep_zero:
            supported = TIMESTEP_ZERO if timestep_zero else f"any but {TIMESTEP_ZERO}"
            raise InvalidRequest(f"reference_latents_method {method}: {self.name} takes {supported}")

    def family_latent_scale(self) -> LatentScale:
        """See ``Bridge``."""
        return LatentScale(channels=16, temporal=4, spatial=8)


class _PositionProbe:
    """Stub for ComfyUI's transformer.

    Its layers return their input, so that running ``_forward`` records where the text and each image start.

    Attributes:
        starts: the positions ``[B, 1, 3]`` of the text's first token and of each image's first patch.
    """

    patch_size = PATCH
    default_ref_method = "index"
    transformer_blocks: tuple[nn.Module, ...] = ()

    def __init__(self, native_class: type[Any]) -> None:
        self._native_class, self.starts = native_class, list[Tensor]()

    def process_img(self, *args: Any, **kwargs: Any) -> Any:
        """Run ComfyUI's ``process_img`` and record the position of the image's first patch."""
        packed = self._native_class.process_img(self, *args, **kwargs)
        self.starts.append(packed[1][:, :1])
        return packed

    def pe_embedder(self, ids: Tensor) -> Tensor:
        """Record the text's first position, from ``ids`` ``[B, S, 3]``, where text comes first."""
        self.starts.insert(0, ids[:, :1])
        return ids[:, None]

    def time_text_embed(self, timestep: Tensor, *_: Any) -> Tensor:
        """Return the input."""
        return timestep

    def img_in(self, tokens: Tensor, *_: Any) -> Tensor:
        """Return the input."""
        return tokens

    txt_in = txt_norm = norm_out = proj_out = img_in
