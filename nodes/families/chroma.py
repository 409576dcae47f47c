"""The bridge between ComfyUI's and diffusers' transformers of Chroma."""

from typing import Any

import comfy.ldm.chroma.model
from torch import Tensor

from ..bridges.bridge import CoreText, pop_guidance, pop_text
from .flux import Flux


class Chroma(Flux):
    """Chroma's bridge: Flux.1's blocks, whose modulation a small network makes from time and guidance."""

    native_class = comfy.ldm.chroma.model.Chroma
    supported_conds = frozenset()
    text = CoreText(components={"text_encoder": ("T5EncoderModel",)}, clip_type="CHROMA")

    def unet_config(self) -> dict[str, Any]:
        """See ``Bridge``. ComfyUI's class counts packed channels, as diffusers' does."""
        config = self.config
        width = config["num_attention_heads"] * config["attention_head_dim"]
        return {
            "image_model": "chroma",
            "in_channels": config["in_channels"],
            "out_channels": config.get("out_channels") or config["in_channels"],
            "patch_size": self.patch,
            "vec_in_dim": None,
            "context_in_dim": config["joint_attention_dim"],
            "hidden_size": width,
            "mlp_ratio": 4.0,
            "num_heads": config["num_attention_heads"],
            "depth": config["num_layers"],
            "depth_single_blocks": config["num_single_layers"],
            "axes_dim": list(config.get("axes_dims_rope", (16, 56, 56))),
            "theta": 10000,
            "qkv_bias": True,
            "txt_ids_dims": [],
            "in_dim": config.get("approximator_num_channels", 64),
            "out_dim": width,
            "hidden_dim": config.get("approximator_hidden_dim", 5120),
            "n_layers": config.get("approximator_layers", 5),
        }

    def inputs(self, x: Tensor, timestep: Tensor, call_args: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``. ComfyUI's transformer ignores a pooled text, too."""
        call_args.pop("y", None)
        inputs = {"hidden_states": x, "timestep": timestep, "encoder_hidden_states": pop_text(call_args)}
        return inputs | pop_guidance(call_args, distilled=True)
