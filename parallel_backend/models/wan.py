"""Wan 2.1 (and what shares its shape) over diffusers' ``WanTransformer3DModel``."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InvalidRequest
from ..state import State
from .base import Family, Geometry

_DEFAULTS: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "num_layers": 40,
    "rope_max_seq_len": 1024,
}
"""What ``WanTransformer3DModel`` takes for a number that its config leaves out."""


class Wan(Family):
    """Inputs: ``hidden_states`` ``[B, C, T, H, W]``, ``timestep`` ``[B]``, ``encoder_hidden_states`` ``[B, L, D]``."""

    inputs: ClassVar[tuple[str, ...]] = ("hidden_states", "timestep", "encoder_hidden_states")
    latent: ClassVar[str] = "hidden_states"
    timestep: ClassVar[str] = "timestep"

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.geometry = self.describe(self.module.config)
        self.blocks = [partial(_run_block, block) for block in self.module.blocks]
        self.attentions = [block.attn1 for block in self.module.blocks]

    @staticmethod
    def describe(config: Mapping[str, Any]) -> Geometry:
        """See ``Family.describe``."""
        if config.get("image_dim") is not None:
            raise InvalidRequest(
                f"this Wan transformer takes image embeddings (image_dim={config['image_dim']}), which is not "
                "supported yet; Wan text-to-video transformers are"
            )
        config = _DEFAULTS | dict(config)
        t, h, w = config["patch_size"]
        return Geometry(
            in_channels=config["in_channels"],
            out_channels=config["out_channels"] or config["in_channels"],
            patch=(t, h, w),
            heads=config["num_attention_heads"],
            head_dim=config["attention_head_dim"],
            layers=config["num_layers"],
            positions=config["rope_max_seq_len"],
        )

    @staticmethod
    def check(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """See ``Family.check``."""
        shape, width = shapes["encoder_hidden_states"], config.get("text_dim", _DEFAULTS["text_dim"])
        if len(shape) != 3 or shape[1] < 1 or shape[2] != width:
            raise InvalidRequest(
                f"conditioning of shape {list(shape)} does not fit this model, whose text encoder gives "
                f"[batch, tokens, {width}]"
            )

    @property
    def dtype(self) -> torch.dtype:
        """See ``Family.dtype``."""
        dtype: torch.dtype = self.module.patch_embedding.weight.dtype
        return dtype

    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        """See ``Family.embed``. A latent that is no whole number of patches is padded as in ComfyUI."""
        module = self.module
        latent = pad_to_patch(inputs["hidden_states"].to(self.dtype), self.geometry.patch)
        rope_cos, rope_sin = module.rope(latent)
        tokens = module.patch_embedding(latent).flatten(2).transpose(1, 2).contiguous()
        temb, modulation, text, _ = module.condition_embedder(
            inputs["timestep"].float(), inputs["encoder_hidden_states"].to(self.dtype), None, timestep_seq_len=None
        )
        return State(
            tokens=tokens,
            per_token={"rope_cos": rope_cos, "rope_sin": rope_sin},
            context={"temb": temb, "modulation": modulation.unflatten(1, (6, -1)), "text": text},
        )

    def head(self, state: State) -> Tensor:
        """See ``Family.head``."""
        module, tokens = self.module, state.tokens
        shift, scale = (module.scale_shift_table + state.context["temb"].unsqueeze(1)).chunk(2, dim=1)
        normed = (module.norm_out(tokens.float()) * (1 + scale) + shift).type_as(tokens)
        prediction: Tensor = module.proj_out(normed)
        return prediction

    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        """See ``Family.unpatchify``. What was padded is cropped."""
        grid = self.geometry.grid(size)
        folded = tokens.view(tokens.shape[0], *grid, *self.geometry.patch, self.geometry.out_channels)
        whole = folded.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)
        return whole[:, :, : size[0], : size[1], : size[2]].contiguous()


def _run_block(block: nn.Module, state: State) -> State:
    tokens = block(
        state.tokens,
        state.context["text"],
        state.context["modulation"],
        (state.per_token["rope_cos"], state.per_token["rope_sin"]),
    )
    return State(tokens=tokens, per_token=state.per_token, context=state.context)


def pad_to_patch(latent: Tensor, patch: Sequence[int]) -> Tensor:
    """Pad ``[B, C, T, H, W]`` circularly at the end, as ComfyUI's ``comfy.ldm.common_dit.pad_to_patch_size``."""
    missing = [-length % step for length, step in zip(latent.shape[2:], patch, strict=True)]
    if not any(missing):
        return latent
    return F.pad(latent, [side for length in reversed(missing) for side in (0, length)], mode="circular")
