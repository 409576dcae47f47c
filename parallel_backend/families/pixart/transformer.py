"""PixArt (alpha and Sigma) over diffusers' ``PixArtTransformer2DModel``."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...errors import InvalidRequest
from ...interfaces.family import AttentionSite, Block, Family, Inputs, Variant
from ...interfaces.geometry import IMAGE, LATENT, TEXT, TIMESTEP, AllReduce, AttentionKind, Extent, Geometry, Shapes
from ...interfaces.state import State
from ...interfaces.tensor_cuts import Cuts
from ..shared.basic_blocks import block_cuts, check_channels, without_variance
from ..shared.patchify import check_text, check_vector, pad_to_patch, to_latent

_PIXELS = 8
"""Pixels of the image per pixel of the latent, along each dim."""


class PixArt(Family):
    """PixArt in three parts.

    Inputs, batch first: the latent ``[B, 4, H, W]``, the timestep ``[B]`` in 0..999, and

    - ``encoder_hidden_states`` ``[B, L, D]``: text from T5;
    - ``encoder_attention_mask`` ``[B, L]``: True for text tokens that are not padding. Without it no token is padding;
    - ``resolution`` ``[B, 2]``: height and width in pixels, by default the latent's;
    - ``aspect_ratio`` ``[B, 1]``: height divided by width, by default the latent's;
    - ``position_range`` ``[B]``: one more than the last row's and column's position would be, the same for all samples.
      By default the published config's, for any size of the latent.

    As in ComfyUI, models that were not trained with resolution and aspect ratio (Sigma, alpha at 512) ignore them.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_attention_heads": 16,
        "attention_head_dim": 72,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 28,
        "cross_attention_dim": 1152,
        "patch_size": 2,
        "activation_fn": "gelu-approximate",
        "caption_channels": None,
        "attention_type": "default",
    }
    first_layer: ClassVar[str] = "pos_embed"
    values_alive: ClassVar[float] = 13.1
    required: ClassVar[tuple[str, ...]] = ("encoder_hidden_states",)
    optional: ClassVar[tuple[str, ...]] = (
        "encoder_attention_mask", "resolution", "aspect_ratio", "position_range",
    )  # fmt: skip

    @staticmethod
    def _describe(config: Mapping[str, Any]) -> Geometry:
        _check_supported(config)
        heads, head_dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
        return Geometry(
            channels=config["in_channels"],
            out_channels=config["in_channels"],
            patch=(config["patch_size"],) * 2,
            layers=layers,
            sites=(AttentionKind(streams=(IMAGE,), heads=heads, head_dim=head_dim, count=layers),),
            all_reduces=(AllReduce(tokens=IMAGE, width=heads * head_dim, count=3 * layers),),
        )

    @staticmethod
    def _cuts(config: Mapping[str, Any]) -> Cuts:
        return block_cuts("transformer_blocks.*", config, cross=True)

    @staticmethod
    def _extent(config: Mapping[str, Any], geometry: Geometry, shapes: Shapes) -> Extent:
        text = check_text(shapes["encoder_hidden_states"], config["caption_channels"] or config["cross_attention_dim"])
        for name, width in (("encoder_attention_mask", text), ("resolution", 2), ("aspect_ratio", 1)):
            if name in shapes:
                check_vector(name, shapes[name], width)
        if len(shapes.get("position_range", (1,))) != 1:
            raise InvalidRequest(f"position_range of shape {list(shapes['position_range'])}: [batch] is needed")
        return Extent(
            streams={IMAGE: math.prod(geometry.grid(shapes[LATENT][2:]))},
            values=geometry.out_channels * math.prod(geometry.patch),
            context={TEXT: text},
        )

    def blocks_and_sites(self) -> tuple[list[Block], list[AttentionSite]]:
        layers = self.module.transformer_blocks
        blocks = [Block(run=partial(_run, layer), modules=(layer,)) for layer in layers]
        return blocks, [AttentionSite(module=layer.attn1, streams=(IMAGE,)) for layer in layers]

    def image(self, inputs: Mapping[str, Tensor]) -> Tensor:
        embed, latent = self.module.pos_embed, self._latent(inputs)
        if "position_range" not in inputs:
            tokens: Tensor = embed(latent).contiguous()
            return tokens
        from diffusers.models.embeddings import get_2d_sincos_pos_embed

        patches: Tensor = embed.proj(latent)
        positions = get_2d_sincos_pos_embed(
            patches.shape[1], patches.shape[2:], base_size=inputs["position_range"][0].float(), device=latent.device
        )
        tokens = (patches.flatten(2).transpose(1, 2) + positions.float()).to(patches.dtype)
        return tokens.contiguous()

    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        """Masked text gets diffusers' bias, which its cross-attention adds."""
        module = self.module
        tokens = self.image(inputs)
        modulation, embedded = module.adaln_single(
            inputs[TIMESTEP], self._conditions(inputs), batch_size=len(tokens), hidden_dtype=self.dtype
        )
        text = inputs["encoder_hidden_states"].to(self.dtype)
        context = {
            "text": text if module.caption_projection is None else module.caption_projection(text),
            "modulation": modulation,
            "embedded": embedded,
        }
        if "encoder_attention_mask" in inputs:
            context["bias"] = (1 - inputs["encoder_attention_mask"][:, None].to(self.dtype)) * -10000.0
        return State(streams={IMAGE: tokens}, context=context)

    def head(self, state: State) -> Tensor:
        """Drop the learned variance, which follows the noise in the channels."""
        module = self.module
        shift, scale = (module.scale_shift_table + state.context["embedded"][:, None]).chunk(2, dim=1)
        values = module.proj_out(module.norm_out(state.streams[IMAGE]) * (1 + scale) + shift)
        return without_variance(values, self.config)

    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        """Crop the padding."""
        return to_latent(tokens, size, self.geometry, "ph pw c")

    def stock(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """diffusers' own forward knows no ``position_range``."""
        height, width = inputs[LATENT].shape[2:]
        out: Tensor = self.module(
            hidden_states=self._latent(inputs),
            encoder_hidden_states=inputs["encoder_hidden_states"].to(self.dtype),
            timestep=inputs[TIMESTEP],
            added_cond_kwargs=self._conditions(inputs),
            encoder_attention_mask=inputs.get("encoder_attention_mask"),
            return_dict=False,
        )[0]
        return out[:, : self.geometry.out_channels, :height, :width]

    def _latent(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Pad the latent to whole patches, as in all families. ComfyUI's own PixArt fails on a partial patch."""
        return pad_to_patch(inputs[LATENT].to(self.dtype), self.geometry.patch)

    def _conditions(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Return resolution and aspect ratio, or None if the model was not trained with them."""
        if not self.module.use_additional_conditions:
            return None
        latent = inputs[LATENT]
        height, width = latent.shape[2:]
        # Filled on the device: for a copy of numbers, the CPU would wait for the GPU.
        sides = torch.cat(
            [latent.new_full((1, 1), side * _PIXELS, dtype=torch.float32) for side in (height, width)], dim=1
        )
        defaults = {"resolution": sides, "aspect_ratio": sides[:, :1] / sides[:, 1:]}
        return {name: inputs.get(name, value.expand(len(latent), -1)) for name, value in defaults.items()}

    @staticmethod
    def variants() -> dict[str, Variant]:
        small = {
            "num_layers": 2, "num_attention_heads": 16, "attention_head_dim": 12, "cross_attention_dim": 192,
            "caption_channels": 32, "sample_size": 128,
        }  # fmt: skip
        text: Inputs = {"encoder_hidden_states": ("text", "caption_channels")}
        masked: Inputs = {**text, "encoder_attention_mask": ("text",)}
        sized: Inputs = {**masked, "resolution": (2,), "aspect_ratio": (1,)}
        unsized = {**small, "use_additional_conditions": False}
        return {
            "alpha": Variant(config=small, size=(9, 14), text=7, inputs=sized),
            "alpha, size of the latent": Variant(config=small, size=(9, 14), text=7, inputs=text),
            "alpha 512": Variant(config={**small, "sample_size": 64}, size=(9, 14), text=7, inputs=masked),
            "sigma": Variant(config=unsized, size=(9, 14), text=7, inputs=text),
        }


def _run(layer: nn.Module, state: State) -> State:
    image = layer(
        state.streams[IMAGE],
        encoder_hidden_states=state.context["text"],
        encoder_attention_mask=state.context.get("bias"),
        timestep=state.context["modulation"],
    )
    return state.with_streams(**{IMAGE: image})


def _check_supported(config: Mapping[str, Any]) -> None:
    activation, kind = config["activation_fn"], config["attention_type"]
    if activation not in ("gelu", "gelu-approximate"):
        raise InvalidRequest(
            f"PixArt with activation_fn {activation!r} is not supported: 'gelu' or 'gelu-approximate' would work"
        )
    if kind not in (None, "default"):
        raise InvalidRequest(f"PixArt with attention_type {kind!r} is not supported: 'default' would work")
    if config["cross_attention_dim"] is None:
        raise InvalidRequest(
            "PixArt with cross_attention_dim null is not supported, because it ignores the text: the width of the "
            "model would work"
        )
    check_channels("PixArt", config)
