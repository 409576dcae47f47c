"""The bridge between ComfyUI's NextDiT with Z-Image's modulation and diffusers' transformer, for Z-Image and Turbo."""

from typing import Any

import comfy.ldm.lumina.model
import torch
from torch import Tensor

from ...parallel_backend.checkpoint.single_file import is_in_memory
from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import Bridge, CoreText, non_default, pop_text
from ..bridges.stored_weight import stored_weight

PAD_MULTIPLE = 32
"""Learned tokens pad each sequence to a multiple of this."""

MOST_DEVIATION = 0.42
"""The standard deviation below which ComfyUI computes in fp16."""

_WITH_DEVIATION = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes for which torch computes a standard deviation."""


class ZImage(Bridge):
    """Z-Image's bridge. ComfyUI runs the model with Lumina 2's transformer class."""

    native_class = comfy.ldm.lumina.model.NextDiT
    text = CoreText(components={"text_encoder": ("Qwen3Model", "Qwen3ForCausalLM")}, clip_type="LUMINA2")
    vaes = ("AutoencoderKL",)

    def unet_config(self) -> dict[str, Any]:
        """See ``Bridge``."""
        config = self.config
        unet_config = {
            "image_model": "lumina2",
            "patch_size": config["all_patch_size"][0],
            "in_channels": config["in_channels"],
            "dim": config["dim"],
            "cap_feat_dim": config["cap_feat_dim"],
            "n_layers": config["n_layers"],
            "qk_norm": config["qk_norm"],
            "n_heads": config["n_heads"],
            "n_kv_heads": config["n_kv_heads"],
            "axes_dims": list(config["axes_dims"]),
            "axes_lens": list(config["axes_lens"]),
            "rope_theta": config["rope_theta"],
            "ffn_dim_multiplier": 8.0 / 3.0,
            "z_image_modulation": True,
            "time_scale": config["t_scale"],
            "pad_tokens_multiple": PAD_MULTIPLE,
        }
        return unet_config | non_default(self.native_class, {"n_refiner_layers": config["n_refiner_layers"]})

    def values_for_dtype(self) -> dict[str, Any]:
        """See ``Bridge``. Newer ComfyUIs compute in fp16, too, if the norm before the last layer varies little.

        A copied model keeps its file's setting, since its weights are written only after all other checks.
        """
        said = self.config.get("_allow_fp16")
        if said is not None or is_in_memory(self.checkpoint.path):
            return {"allow_fp16": bool(said)}
        norm = stored_weight(self.checkpoint, f"layers.{self.config['n_layers'] - 2}.ffn_norm1.weight")
        if norm is None or norm.dtype not in _WITH_DEVIATION:
            return {}
        return {"allow_fp16": torch.std(norm, unbiased=False).item() < MOST_DEVIATION}

    def inputs(self, x: Tensor, timestep: Tensor, call_args: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``. A text mask is refused: ComfyUI's layers attend to masked text, diffusers' do not."""
        for ignored in ("num_tokens", "clip_text_pooled"):  # ComfyUI's Z-Image ignores them, too
            call_args.pop(ignored, None)
        return {"hidden_states": x, "timestep": timestep, "encoder_hidden_states": pop_text(call_args)}

    def family_latent_scale(self) -> LatentScale:
        """See ``Bridge``."""
        return LatentScale(channels=16, spatial=8, video=False)
