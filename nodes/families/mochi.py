"""The bridge between ComfyUI's AsymmDiTJoint and diffusers' transformer, for Mochi 1."""

from collections.abc import Mapping
from typing import Any

import torch
from comfy.ldm.genmo.joint_model.asymm_models_joint import AsymmDiTJoint
from torch import Tensor

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import Bridge, CoreText, pop_text


class Mochi(Bridge):
    """Mochi's bridge. ComfyUI reverses the direction of time, and so does the backend."""

    native_class = AsymmDiTJoint
    text = CoreText(components={"text_encoder": ("T5EncoderModel",)}, clip_type="MOCHI")
    vaes = ("AutoencoderKLMochi",)

    def unet_config(self) -> dict[str, Any]:
        """See ``Bridge``."""
        config = self.config
        return {
            "image_model": "mochi_preview",
            "depth": config["num_layers"],
            "patch_size": config["patch_size"],
            "num_heads": config["num_attention_heads"],
            "hidden_size_x": config["num_attention_heads"] * config["attention_head_dim"],
            "hidden_size_y": config["pooled_projection_dim"],
            "mlp_ratio_x": 4.0,
            "mlp_ratio_y": 4.0,
            "learn_sigma": False,
            "in_channels": config["in_channels"],
            "qk_norm": True,
            "qkv_bias": False,
            "out_bias": True,
            "attn_drop": 0.0,
            "patch_embed_bias": True,
            "posenc_preserve_area": True,
            "timestep_mlp_bias": True,
            "attend_to_padding": False,
            "timestep_scale": 1000.0,
            "use_t5": True,
            "t5_feat_dim": config["text_embed_dim"],
            "t5_token_length": config.get("max_sequence_length", 256),
            "rope_theta": 10000.0,
        }

    @property
    def replaceable_blocks(self) -> Mapping[str, int]:
        """See ``Bridge``."""
        return {"double_block": self.config["num_layers"]}

    def inputs(self, x: Tensor, timestep: Tensor, call_args: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``. ComfyUI's layers attend to the first ``num_tokens`` tokens of the text."""
        mask, num_tokens = call_args.pop("attention_mask", None), call_args.pop("num_tokens")
        text = pop_text(call_args)
        if mask is None:
            raise InvalidRequest("the conditioning has no attention_mask: encode the prompt with Mochi's own CLIP")
        if mask.shape[-1] != text.shape[1]:
            raise InvalidRequest(
                f"the text has {text.shape[1]} tokens and its attention_mask {mask.shape[-1]}, as after "
                "ConditioningConcat, which ComfyUI's own Mochi cannot compute either: use ConditioningCombine instead"
            )
        leading = torch.arange(text.shape[1], device=mask.device) < num_tokens
        if not torch.equal(mask.bool(), leading.expand_as(mask)):
            raise InvalidRequest("a text mask with gaps, or one that differs within the batch, is not supported")
        return {
            "hidden_states": x,
            "timestep": timestep,
            "encoder_hidden_states": text,
            "encoder_attention_mask": mask.bool(),
        }

    def family_latent_scale(self) -> LatentScale:
        """See ``Bridge``."""
        return LatentScale(channels=self.config["in_channels"], temporal=6, spatial=8)
