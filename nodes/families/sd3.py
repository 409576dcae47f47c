"""The bridge between ComfyUI's MMDiT and diffusers' transformer, for Stable Diffusion 3 and 3.5."""

from collections.abc import Mapping
from typing import Any

from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper
from torch import Tensor

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import Bridge, CoreText, pop_pooled_text, pop_text

HEAD_DIM = 64
"""The head width of ComfyUI's class, which has as many heads as layers."""


class SD3(Bridge):
    """Stable Diffusion 3's bridge. The second attention of 3.5 medium is ComfyUI's ``x_block_self_attn``."""

    native_class = OpenAISignatureMMDITWrapper
    text = CoreText(
        components={
            "text_encoder": ("CLIPTextModelWithProjection",),
            "text_encoder_2": ("CLIPTextModelWithProjection",),
            "text_encoder_3": ("T5EncoderModel",),
        },
        clip_type="SD3",
        optional=frozenset({"text_encoder_2", "text_encoder_3"}),
    )
    vaes = ("AutoencoderKL",)

    def unet_config(self) -> dict[str, Any]:
        """See ``Bridge``."""
        config = self.config
        positions = config["pos_embed_max_size"]
        text = {"in_features": config["joint_attention_dim"], "out_features": config["caption_projection_dim"]}
        unet_config = {
            "in_channels": config["in_channels"],
            "patch_size": config["patch_size"],
            "out_channels": config.get("out_channels") or config["in_channels"],
            "depth": config["num_layers"],
            "input_size": None,
            "adm_in_channels": config["pooled_projection_dim"],
            "context_embedder_config": {"target": "torch.nn.Linear", "params": text},
            "num_patches": positions**2,
            "pos_embed_max_size": positions,
            "pos_embed_scaling_factor": None,
            "x_block_self_attn_layers": sorted(config.get("dual_attention_layers") or ()),
        }
        return unet_config | ({"qk_norm": "rms"} if config.get("qk_norm") else {})

    @property
    def replaceable_blocks(self) -> Mapping[str, int]:
        """See ``Bridge``."""
        return {"double_block": self.config["num_layers"]}

    def check(self) -> None:
        """See ``Bridge``."""
        super().check()
        layers, heads, head_dim = (
            self.config.get(name) for name in ("num_layers", "num_attention_heads", "attention_head_dim")
        )
        if (heads, head_dim) != (layers, HEAD_DIM):
            raise InvalidRequest(
                f"{self.name} has {layers} layers of {heads} heads of width {head_dim}; ComfyUI's Stable Diffusion 3 "
                f"has as many heads as layers, of width {HEAD_DIM}"
            )

    def inputs(self, x: Tensor, timestep: Tensor, call_args: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``."""
        return {
            "hidden_states": x,
            "timestep": timestep,
            "encoder_hidden_states": pop_text(call_args),
            "pooled_projections": pop_pooled_text(call_args),
        }

    def family_latent_scale(self) -> LatentScale:
        """See ``Bridge``."""
        return LatentScale(channels=self.config["in_channels"], spatial=8, video=False)
