"""Qwen-Image and Qwen-Image-Edit: ComfyUI's and diffusers' transformers of the same name."""

from typing import Any

import comfy.ldm.qwen_image.model
import torch
from torch import Tensor, nn

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import Bridge, CoreText, text_of, unusual

PATCH = 2
NUMBERS = (
    "patch_size", "out_channels", "attention_head_dim", "num_attention_heads", "joint_attention_dim", "axes_dims_rope",
)  # fmt: skip
"""What ComfyUI's detection takes defaults for."""

TIMESTEP_ZERO = "index_timestep_zero"
"""ComfyUI's name of the references' treatment that diffusers calls ``zero_cond_t`` (Edit 2511)."""


class QwenImage(Bridge):
    """Latents have a dim for frames, of which there is one."""

    native = comfy.ldm.qwen_image.model.QwenImageTransformer2DModel
    conds = frozenset({"reference_latents"})
    text = CoreText(components={"text_encoder": ("Qwen2_5_VLForConditionalGeneration",)}, clip_type="QWEN_IMAGE")
    vaes = ("AutoencoderKLQwenImage",)

    def unet_config(self) -> dict[str, Any]:
        """See ``Bridge``."""
        config = self.config
        found = {"image_model": "qwen_image", "in_channels": config["in_channels"], "num_layers": config["num_layers"]}
        if config.get("zero_cond_t"):
            found["default_ref_method"] = TIMESTEP_ZERO
        return found | unusual(self.native, {name: config[name] for name in NUMBERS if name in config})

    def inputs(self, x: Tensor, timestep: Tensor, given: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``.

        Positions are ComfyUI's: diffusers' are one apart where a side has an odd number of patches, and its text
        begins behind the largest picture instead of the one that is made.
        """
        text = text_of(given)
        found = {"hidden_states": x, "timestep": timestep, "encoder_hidden_states": text}
        names = ("ref_latents", "ref_latents_method")
        references: dict[str, Any] = {name: given.pop(name) for name in names if name in given}
        self._check_method(references)
        found |= {f"reference_{i}": latent for i, latent in enumerate(references.get("ref_latents", ()), start=1)}
        seen = _Packing(self.native)
        self.native._forward(seen, x, timestep, text, transformer_options={}, **references)
        return found | {"start_ids": torch.cat(seen.starts, dim=1)}

    def _check_method(self, references: dict[str, Any]) -> None:
        """Whether references have a timestep of their own is a matter of how the model was trained, not of a node."""
        method = references.get("ref_latents_method")
        zero = bool(self.config.get("zero_cond_t"))
        if "ref_latents" in references and method is not None and (method == TIMESTEP_ZERO) != zero:
            wanted = TIMESTEP_ZERO if zero else f"any but {TIMESTEP_ZERO}"
            raise InvalidRequest(f"reference_latents_method {method}: {self.name} takes {wanted}")

    def scale(self) -> LatentScale:
        """See ``Bridge``."""
        return LatentScale(channels=16, temporal=4, spatial=8)


class _Packing:
    """Stands for ComfyUI's transformer, all of whose layers give back what they get.

    ``starts`` are the positions ``[B, 1, 3]`` of the text's first token and of each picture's first patch.
    """

    patch_size = PATCH
    default_ref_method = "index"
    transformer_blocks: tuple[nn.Module, ...] = ()

    def __init__(self, native: type[Any]) -> None:
        self._native, self.starts = native, list[Tensor]()

    def process_img(self, *args: Any, **kwargs: Any) -> Any:
        """ComfyUI's own, whose second answer are the positions ``[B, S, 3]``."""
        packed = self._native.process_img(self, *args, **kwargs)
        self.starts.append(packed[1][:, :1])
        return packed

    def pe_embedder(self, ids: Tensor) -> Tensor:
        """All positions, those of the text first."""
        self.starts.insert(0, ids[:, :1])
        return ids[:, None]

    def time_text_embed(self, timestep: Tensor, *_: Any) -> Tensor:
        """Nothing is computed."""
        return timestep

    def img_in(self, tokens: Tensor, *_: Any) -> Tensor:
        """Nothing is computed."""
        return tokens

    txt_in = txt_norm = norm_out = proj_out = img_in
