"""Wan 2.1 and 2.2 (text, image, and first and last frame to video): ComfyUI's WanModel and diffusers' transformer."""

from collections.abc import Mapping
from typing import Any

import comfy.ldm.wan.model
import torch
from torch import Tensor

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import BackendText, Bridge, layer, split_channels, text_of, unusual
from ..bridges.refusals import INPAINTING_CONDS


class Wan(Bridge):
    """The kind is seen by the channels and by whether there is an embedder for images."""

    native = comfy.ldm.wan.model.WanModel
    text = BackendText(key="umt5xxl", length=512, encoder="UMT5EncoderModel")
    vaes = ("AutoencoderKLWan",)

    @property
    def conds(self) -> frozenset[str]:
        """See ``Bridge``. What an image encoder saw is taken without an embedder for it as well (2.2's A14B)."""
        images = self.config["in_channels"] > self.config["out_channels"]
        seen = {"clip_vision_output"} if images or self.config.get("image_dim") else frozenset()
        return (INPAINTING_CONDS if images else frozenset()) | seen

    def unet_config(self) -> dict[str, Any]:
        """See ``Bridge``."""
        config = self.config
        found = {
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
        places = config.get("pos_embed_seq_len")
        found |= unusual(self.native, {"text_dim": config["text_dim"]})
        return found | ({"flf_pos_embed_token_number": places} if places else {})

    def check(self) -> None:
        """See ``Bridge``."""
        super().check()
        self.checkpoint.boundary()
        channels = self.core_config().latent_format.latent_channels
        if self.config["out_channels"] != channels:
            raise InvalidRequest(
                f"{self.name} predicts {self.config['out_channels']} latent channels; ComfyUI's Wan has {channels}"
            )
        expected = _SCALES[channels]
        if self.latents() != expected:
            raise InvalidRequest(f"{self.name}: the VAE's {self.latents()} is not that of Wan, {expected}")

    def inputs(self, x: Tensor, timestep: Tensor, given: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``. A mask over a video that is partly given (2.2's TI2V) weighs the frames' timesteps."""
        found = split_channels(x, self.config["out_channels"])
        found |= {"timestep": timestep, "encoder_hidden_states": text_of(given)}
        seen = given.pop("clip_fea", None)  # ignored by ComfyUI too where there is no embedder for it
        if seen is not None and self.config.get("image_dim"):
            found["encoder_hidden_states_image"] = seen
        if "denoise_mask" in given:
            found["frame_weights"] = torch.mean(given.pop("denoise_mask"), dim=(1, 3, 4))
        return found

    def scale(self) -> LatentScale:
        """See ``Bridge``."""
        return _SCALES.get(self.config["out_channels"], _SCALES[16])

    def attributes(self, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """See ``Bridge``."""
        patch_size = tuple(self.config["patch_size"])
        return {"patch_size": patch_size, "patch_embedding": layer(weights, "patch_embedding")}


_SCALES = {
    16: LatentScale(channels=16, temporal=4, spatial=8),
    48: LatentScale(channels=48, temporal=4, spatial=16),
}
