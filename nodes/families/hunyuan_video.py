"""HunyuanVideo (text and image to video): ComfyUI's HunyuanVideo and diffusers' transformer."""

from typing import Any

import comfy.ldm.hunyuan_video.model
from torch import Tensor

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import Bridge, CoreText, guidance_of, pooled_of, split_channels, text_of
from ..bridges.refusals import INPAINTING_CONDS


class HunyuanVideo(Bridge):
    """The kind is seen by the channels, and by ``image_condition_type``, which only diffusers has."""

    native = comfy.ldm.hunyuan_video.model.HunyuanVideo
    text = CoreText(
        components={
            "text_encoder": ("LlamaModel", "LlamaForCausalLM", "LlavaForConditionalGeneration"),
            "text_encoder_2": ("CLIPTextModel",),
        },
        clip_type="HUNYUAN_VIDEO",
    )
    vaes = ("AutoencoderKLHunyuanVideo",)

    @property
    def conds(self) -> frozenset[str]:
        """See ``Bridge``."""
        return INPAINTING_CONDS if self.config["in_channels"] > self.config["out_channels"] else frozenset()

    def unet_config(self) -> dict[str, Any]:
        """See ``Bridge``."""
        config = self.config
        side = config["patch_size"]
        return {
            "image_model": "hunyuan_video",
            "in_channels": config["in_channels"],
            "patch_size": [config["patch_size_t"], side, side],
            "out_channels": config["out_channels"],
            "vec_in_dim": config["pooled_projection_dim"],
            "axes_dim": list(config.get("rope_axes_dim", (16, 56, 56))),
            "meanflow": False,
            "context_in_dim": config["text_embed_dim"],
            "hidden_size": config["num_attention_heads"] * config["attention_head_dim"],
            "mlp_ratio": config["mlp_ratio"],
            "num_heads": config["num_attention_heads"],
            "depth": config["num_layers"],
            "depth_single_blocks": config["num_single_layers"],
            "theta": config.get("rope_theta", 256.0),
            "qkv_bias": True,
            "byt5": False,
            "guidance_embed": bool(config.get("guidance_embeds", False)),
            "use_cond_type_embedding": False,
            "vision_in_dim": None,
            "meanflow_sum": False,
        }

    def inputs(self, x: Tensor, timestep: Tensor, given: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``. ComfyUI's transformer reads as much of the pooled text as it was made for."""
        given.pop("disable_time_r", None)  # of a layer that these models do not have
        width = self.config["pooled_projection_dim"]
        found = split_channels(x, self.config["out_channels"])
        found |= {"timestep": timestep, "encoder_hidden_states": text_of(given)}
        found["pooled_projections"] = pooled_of(given)[:, :width]
        self._check_guided(given.pop("guiding_frame_index", None))
        guided = guidance_of(given, distilled=bool(self.config.get("guidance_embeds")))
        found |= guided
        if self._replaces and guided:
            found["first_guidance"] = guided["guidance"]
        if "attention_mask" in given:
            found["encoder_attention_mask"] = given.pop("attention_mask").bool()
            found["mean_text"] = found["encoder_hidden_states"].mean(dim=1)
        return found

    @property
    def _replaces(self) -> bool:
        """Whether the video continues a first frame that it is given."""
        return self.config.get("image_condition_type") == "token_replace"

    def _check_guided(self, index: Tensor | None) -> None:
        if self._replaces and (index is None or bool((index != 0).any())):
            raise InvalidRequest(
                f"{self.name} continues an image that is the video's first frame, and this conditioning "
                f"{'has none' if index is None else f'names frame {int(index.flatten()[0])}'}: connect "
                "HunyuanImageToVideo with guidance type v2 (replace), for the negative prompt too"
            )
        if not self._replaces and index is not None:
            raise InvalidRequest(
                f"{self.name} is no model that continues a first frame (v2 (replace)); choose another guidance type "
                "in HunyuanImageToVideo"
            )

    def scale(self) -> LatentScale:
        """See ``Bridge``."""
        return LatentScale(channels=16, temporal=4, spatial=8)
