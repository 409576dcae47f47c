"""Open-Sora 2.0 (text and image to video) over diffusers' Flux.1 with a condition and a half-split rotation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor

from ...errors import InvalidRequest
from ...interfaces.family import Inputs, Variant
from ...interfaces.geometry import IMAGE, LATENT, TEXT, Extent, Geometry, Shapes
from ..flux.transformer import Flux
from ..shared import joint_attention
from ..shared.patchify import check_text, check_vector, to_latent, to_tokens

_PATCH = (1, 2, 2)

_AXES = 3
"""Numbers in a position: frame, row, column."""


class OpenSora2(Flux):
    """Open-Sora 2.0 in three parts, of which Flux.1's layers are the largest.

    Inputs, batch first: the latent ``[B, 16, T, H, W]``, the timestep ``[B]`` in 0..1000, and

    - ``encoder_hidden_states`` ``[B, L, D]``: text from T5. No token is masked, padding neither;
    - ``pooled_projections`` ``[B, D]``: pooled text from CLIP;
    - ``concat`` ``[B, 17, T, H, W]``: 1 in the first channel where a frame is given, then the latent of the given
      frames, with zeros elsewhere. Without it no frame is given.
    """

    defaults: ClassVar[Mapping[str, Any]] = Flux.defaults
    first_layer: ClassVar[str] = "x_embedder"
    values_alive: ClassVar[float] = 18.3
    teacache: ClassVar[tuple[float, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ("concat",)
    time_factor: ClassVar[float] = 1.0

    @staticmethod
    def _describe(config: Mapping[str, Any]) -> Geometry:
        if config["guidance_embeds"]:
            raise InvalidRequest("Open-Sora 2.0 with guidance_embeds is not supported: no published model has them")
        return replace(Flux._describe(config), patch=_PATCH)

    @staticmethod
    def _extent(config: Mapping[str, Any], geometry: Geometry, shapes: Shapes) -> Extent:
        text = check_text(shapes["encoder_hidden_states"], config["joint_attention_dim"])
        check_vector("pooled_projections", shapes["pooled_projections"], config["pooled_projection_dim"])
        _check_given_frames(geometry, shapes)
        size = shapes[LATENT][2:]
        return Extent(
            streams={TEXT: text, IMAGE: math.prod(geometry.grid(size))},
            values=geometry.out_channels * math.prod(_PATCH),
        )

    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        return to_latent(tokens, size, self.geometry, "c pt ph pw")

    def _tokens(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return packed tokens ``[B, S, 4C + 4(C + 1)]``, the condition after the latent, and positions ``[S, 3]``."""
        latent = inputs[LATENT].to(self.dtype)
        tokens = to_tokens(latent, _PATCH, "c pt ph pw")
        if "concat" in inputs:
            condition = to_tokens(inputs["concat"].to(self.dtype), _PATCH, "c pt ph pw")
        else:
            condition = tokens.new_zeros(*tokens.shape[:2], tokens.shape[2] + math.prod(_PATCH))
        frames, *grid = self.geometry.grid(latent.shape[2:])
        ids = joint_attention.positions(latent, grid, _AXES).repeat(frames, 1, 1)
        ids[..., 0] = torch.arange(frames, device=ids.device)[:, None]
        return torch.cat([tokens, condition], dim=2), rearrange(ids, "frames positions axes -> (frames positions) axes")

    @staticmethod
    def variants() -> dict[str, Variant]:
        small = {
            "num_layers": 2, "num_single_layers": 2, "num_attention_heads": 24, "attention_head_dim": 16,
            "joint_attention_dim": 64, "pooled_projection_dim": 32, "axes_dims_rope": (4, 6, 6),
        }  # fmt: skip
        text: Inputs = {
            "encoder_hidden_states": ("text", "joint_attention_dim"), "pooled_projections": ("pooled_projection_dim",),
        }  # fmt: skip
        return {
            "t2v": Variant(config=small, size=(3, 9, 13), text=7, inputs=text),
            "i2v": Variant(config=small, size=(3, 9, 13), text=7, inputs={**text, "concat": (17, "size")}),
            "image": Variant(config=small, size=(1, 9, 14), text=7, inputs=text),
        }


def _check_given_frames(geometry: Geometry, shapes: Shapes) -> None:
    shape, wanted = shapes.get("concat"), (geometry.channels + 1, *shapes[LATENT][2:])
    if shape is not None and shape[1:] != wanted:
        raise InvalidRequest(
            f"given frames of shape {list(shape)} do not fit the latent: [batch, {', '.join(map(str, wanted))}] would "
            "work, the mask's channel first"
        )
