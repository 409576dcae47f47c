"""Wan 2.1 and 2.2 (text, image, and first and last frame to video): ComfyUI's WanModel and diffusers' transformer."""

from collections.abc import Mapping
from typing import Any

import comfy.ldm.wan.model
import torch
from torch import Tensor

from ...parallel_backend.errors import InvalidRequest
from .bridge import BackendText, Bridge, VideoScale, layer, split_channels, text_of


class Wan(Bridge):
    """The kind is seen by the channels and by whether there is an embedder for images."""

    native = comfy.ldm.wan.model.WanModel
    text = BackendText(key="umt5xxl", length=512, encoder="UMT5EncoderModel")
    vaes = ("AutoencoderKLWan",)

    @property
    def conds(self) -> frozenset[str]:
        """See ``Bridge``."""
        beside = (
            {"concat_latent_image", "concat_mask"} if self.config["in_channels"] > self.config["out_channels"] else ()
        )
        return frozenset({*beside, *(["clip_vision_output"] if self.config.get("image_dim") else [])})

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
            "text_dim": config["text_dim"],
            "num_heads": config["num_attention_heads"],
            "num_layers": config["num_layers"],
            "cross_attn_norm": config["cross_attn_norm"],
            "eps": config["eps"],
        }
        places = config.get("pos_embed_seq_len")
        return found | ({"flf_pos_embed_token_number": places} if places else {})

    def check(self) -> None:
        """See ``Bridge``."""
        super().check()
        if "transformer_2" in self.checkpoint.components:
            raise InvalidRequest(f"{self.name} has two transformers (Wan 2.2's experts), and one is supported")
        channels = self.core_config().latent_format.latent_channels
        if self.config["out_channels"] != channels:
            raise InvalidRequest(
                f"{self.name} predicts {self.config['out_channels']} latent channels; ComfyUI's Wan has {channels}"
            )
        expected = _SCALES[channels]
        if "vae" in self.checkpoint.components and self.scale() != expected:
            raise InvalidRequest(f"{self.name}: the VAE's {self.scale()} is not that of Wan, {expected}")

    def inputs(self, x: Tensor, timestep: Tensor, given: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``. A mask over a video that is partly given (2.2's TI2V) weighs the frames' timesteps."""
        found = split_channels(x, self.config["out_channels"])
        found |= {"timestep": timestep, "encoder_hidden_states": text_of(given)}
        if "clip_fea" in given:
            found["encoder_hidden_states_image"] = given.pop("clip_fea")
        if "denoise_mask" in given:
            found["frame_weights"] = torch.mean(given.pop("denoise_mask"), dim=(1, 3, 4))
        return found

    def scale(self) -> VideoScale:
        """See ``Bridge``."""
        if "vae" not in self.checkpoint.components:
            return _SCALES.get(self.config["out_channels"], _SCALES[16])
        config = self.checkpoint.config("vae")
        # The spelling is diffusers' own.
        downsample = config.get("temperal_downsample", [False, True, True])
        return VideoScale(
            channels=config.get("z_dim", 16),
            temporal=2 ** sum(map(bool, downsample)),
            spatial=2 ** len(downsample) * (config.get("patch_size") or 1),
        )

    def attributes(self, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """See ``Bridge``."""
        patch_size = tuple(self.config["patch_size"])
        return {"patch_size": patch_size, "patch_embedding": layer(weights, "patch_embedding")}


_SCALES = {
    16: VideoScale(channels=16, temporal=4, spatial=8),
    48: VideoScale(channels=48, temporal=4, spatial=16),
}
