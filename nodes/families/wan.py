"""The bridge between ComfyUI's WanModel and diffusers' transformer, for Wan 2.1 and 2.2.

The variants make videos from text, from an image, and from a first and a last frame.
"""

from collections.abc import Mapping
from typing import Any

import comfy.ldm.wan.model
from einops import reduce
from torch import Tensor

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import BackendText, Bridge, non_default, pop_text, split_channels
from ..bridges.refusals import INPAINTING_CONDS


class Wan(Bridge):
    """Wan's bridge. The number of channels and the image embedder tell the variants apart."""

    native_class = comfy.ldm.wan.model.WanModel
    text = BackendText(key="umt5xxl", length=512, encoder="UMT5EncoderModel")
    vaes = ("AutoencoderKLWan",)

    @property
    def supported_conds(self) -> frozenset[str]:
        """See ``Bridge``.

        Image-to-video models without an image embedder (2.2's A14B) accept a CLIP vision output and ignore it, as in
        ComfyUI.
        """
        takes_image = self.config["in_channels"] > self.config["out_channels"]
        clip_vision = {"clip_vision_output"} if takes_image or self.config.get("image_dim") else frozenset()
        return (INPAINTING_CONDS if takes_image else frozenset()) | clip_vision

    def unet_config(self) -> dict[str, Any]:
        """See ``Bridge``."""
        config = self.config
        unet_config = {
            "image_model": "wan2.1",
            "model_type": "i2v" if config.get("image_dim") else "t2v",
            "patch_size": tuple(config["patch_size"]),
            "in_dim": config["in_channels"],
            "out_dim": config["out_channels"],
            "dim": config["num_attention_heads"] * config["attention_head_dim"],
            "ffn_dim": config["ffn_dim"],
            "freq_dim": config["freq_dim"],
            "num_heads": config["num_attention_heads"],
            "num_layers": config["num_layers"],
            "window_size": (-1, -1),
            "qk_norm": True,
            "cross_attn_norm": config["cross_attn_norm"],
            "eps": config["eps"],
        }
        image_tokens = config.get("pos_embed_seq_len")
        unet_config |= non_default(self.native_class, {"text_dim": config["text_dim"]})
        return unet_config | ({"flf_pos_embed_token_number": image_tokens} if image_tokens else {})

    @property
    def replaceable_blocks(self) -> Mapping[str, int]:
        """See ``Bridge``."""
        return {"double_block": self.config["num_layers"]}

    def check(self) -> None:
        """See ``Bridge``."""
        super().check()
        self.checkpoint.boundary()  # raises if there are two transformers and no valid boundary_ratio
        channels = self.core_config().latent_format.latent_channels
        if self.config["out_channels"] != channels:
            raise InvalidRequest(
                f"{self.name} predicts {self.config['out_channels']} latent channels; ComfyUI's Wan has {channels}: "
                "use an original Wan model"
            )
        scale, expected = self.latent_scale(), _SCALES[channels]
        if scale != expected:
            raise InvalidRequest(
                f"{self.name}: the VAE reduces height and width {scale.spatial} times and frames {scale.temporal} "
                f"times; Wan's VAE with {channels} channels reduces them {expected.spatial} and {expected.temporal} "
                "times: use the vae of the same model"
            )

    def inputs(self, x: Tensor, timestep: Tensor, call_args: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``. The mask of a video with known frames (2.2's TI2V) scales each frame's timestep."""
        inputs = split_channels(x, self.config["out_channels"])
        inputs |= {"timestep": timestep, "encoder_hidden_states": pop_text(call_args)}
        clip_vision = call_args.pop("clip_fea", None)  # models without an image embedder ignore it, as in ComfyUI
        if clip_vision is not None and self.config.get("image_dim"):
            inputs["encoder_hidden_states_image"] = clip_vision
        if "denoise_mask" in call_args:
            inputs["frame_weights"] = reduce(call_args.pop("denoise_mask"), "b c t h w -> b t", "mean")
        return inputs

    def family_latent_scale(self) -> LatentScale:
        """See ``Bridge``."""
        return _SCALES.get(self.config["out_channels"], _SCALES[16])

    def attributes(self) -> dict[str, Any]:
        """See ``Bridge``."""
        return {"patch_size": tuple(self.config["patch_size"])}


_SCALES = {
    16: LatentScale(channels=16, temporal=4, spatial=8),
    48: LatentScale(channels=48, temporal=4, spatial=16),
}
