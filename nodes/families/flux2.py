"""The bridge between ComfyUI's Flux and diffusers' transformer, for Flux.2 (dev and klein).

All layers of Flux.2 share one modulation.
"""

from typing import Any

from torch import Tensor

from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import CoreText, pop_guidance, pop_text
from .flux import Flux


class Flux2(Flux):
    """Flux.2's bridge. Each latent pixel is a token: the VAE packs its patches into channels."""

    supported_conds = frozenset({"reference_latents"})
    text = CoreText(components={"text_encoder": ("Mistral3ForConditionalGeneration",)}, clip_type="FLUX")
    vaes = ("AutoencoderKLFlux2",)
    patch = 1

    def unet_config(self) -> dict[str, Any]:
        """See ``Bridge``."""
        config = self.config
        return {
            "image_model": "flux2",
            "in_channels": config["in_channels"],
            "out_channels": config.get("out_channels") or config["in_channels"],
            "patch_size": self.patch,
            "vec_in_dim": None,
            "context_in_dim": config["joint_attention_dim"],
            "hidden_size": config["num_attention_heads"] * config["attention_head_dim"],
            "mlp_ratio": config["mlp_ratio"],
            "num_heads": config["num_attention_heads"],
            "depth": config["num_layers"],
            "depth_single_blocks": config["num_single_layers"],
            "axes_dim": list(config["axes_dims_rope"]),
            "theta": config["rope_theta"],
            "qkv_bias": False,
            "ops_bias": False,
            "guidance_embed": bool(config["guidance_embeds"]),
            "global_modulation": True,
            "mlp_silu_act": True,
            "default_ref_method": "index",
            "ref_index_scale": 10.0,
            "txt_ids_dims": [3],
            "yak_mlp": False,
            "txt_norm": False,
        }

    def inputs(self, x: Tensor, timestep: Tensor, call_args: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``. ComfyUI's transformer ignores a pooled text, too."""
        call_args.pop("y", None)
        inputs = {"hidden_states": x, "timestep": timestep, "encoder_hidden_states": pop_text(call_args)}
        inputs |= pop_guidance(call_args, distilled=self.unet_config()["guidance_embed"])
        return inputs | self.pop_references(x, timestep, call_args)

    def family_latent_scale(self) -> LatentScale:
        """See ``Bridge``."""
        return LatentScale(channels=128, spatial=16, video=False)
