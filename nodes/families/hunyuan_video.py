"""The bridge between ComfyUI's and diffusers' HunyuanVideo, for text and image to video."""

from collections.abc import Mapping
from typing import Any

import comfy.ldm.hunyuan_video.model
from torch import Tensor

from ...parallel_backend.checkpoint.single_file import SingleFile
from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import Bridge, CoreText, pop_guidance, pop_pooled_text, pop_text, split_channels
from ..bridges.refusals import INPAINTING_CONDS


class HunyuanVideo(Bridge):
    """HunyuanVideo's bridge.

    The number of channels and diffusers' ``image_condition_type`` tell the variants apart. A file does not say whether
    its model continues a first frame: the conditioning does, as in ComfyUI.
    """

    native_class = comfy.ldm.hunyuan_video.model.HunyuanVideo
    text = CoreText(
        components={
            "text_encoder": ("LlamaModel", "LlamaForCausalLM", "LlavaForConditionalGeneration"),
            "text_encoder_2": ("CLIPTextModel",),
        },
        clip_type="HUNYUAN_VIDEO",
    )
    vaes = ("AutoencoderKLHunyuanVideo",)

    @property
    def supported_conds(self) -> frozenset[str]:
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

    @property
    def replaceable_blocks(self) -> Mapping[str, int]:
        """See ``Bridge``."""
        return {"double_block": self.config["num_layers"], "single_block": self.config["num_single_layers"]}

    def inputs(self, x: Tensor, timestep: Tensor, call_args: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``. ComfyUI's transformer cuts the pooled text to its own width, too."""
        call_args.pop("disable_time_r", None)  # concerns a layer that these models lack
        width = self.config["pooled_projection_dim"]
        inputs = split_channels(x, self.config["out_channels"])
        inputs |= {"timestep": timestep, "encoder_hidden_states": pop_text(call_args)}
        inputs["pooled_projections"] = pop_pooled_text(call_args)[:, :width]
        inputs |= self._first_frame(x, call_args.pop("guiding_frame_index", None))
        guidance = pop_guidance(call_args, distilled=bool(self.config.get("guidance_embeds")))
        inputs |= guidance
        if self._replaces_first_frame and guidance:
            inputs["first_guidance"] = guidance["guidance"]
        if "attention_mask" in call_args:
            inputs["encoder_attention_mask"] = call_args.pop("attention_mask").bool()
            inputs["mean_text"] = inputs["encoder_hidden_states"].mean(dim=1)
        return inputs

    @property
    def _replaces_first_frame(self) -> bool:
        """Whether the model's video can start with a given first frame."""
        return self.config.get("image_condition_type") == "token_replace"

    def _first_frame(self, x: Tensor, index: Tensor | None) -> dict[str, Tensor]:
        """Return the inputs that tell the model whether the latent's first frame is given.

        Args:
            x: the latent.
            index: the given frame, or None.
        """
        self._check_guiding_frame(index, optional=isinstance(self.checkpoint, SingleFile))
        if not self._replaces_first_frame:
            return {}
        return {"noisy_first_frame": x.new_full((len(x),), float(index is None))}

    def _check_guiding_frame(self, index: Tensor | None, *, optional: bool) -> None:
        named = index is not None and bool((index != 0).any())
        if self._replaces_first_frame and (named or (index is None and not optional)):
            problem = "has none" if index is None else f"names frame {int(index.flatten()[0])}"
            raise InvalidRequest(
                f"{self.name} continues an image that is the video's first frame, and this conditioning {problem}: "
                "connect HunyuanImageToVideo with guidance type v2 (replace), for the negative prompt too"
            )
        if not self._replaces_first_frame and index is not None:
            raise InvalidRequest(
                f"{self.name} cannot continue a first frame (v2 (replace)); choose another guidance type in "
                "HunyuanImageToVideo"
            )

    def family_latent_scale(self) -> LatentScale:
        """See ``Bridge``."""
        return LatentScale(channels=16, temporal=4, spatial=8)
