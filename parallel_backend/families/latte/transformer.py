"""Latte (text to video) over diffusers' ``LatteTransformer3DModel``."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from einops import rearrange, repeat
from torch import Tensor, nn

from ...errors import InvalidRequest
from ...interfaces.family import AttentionSite, Block, Family, Inputs, Variant
from ...interfaces.geometry import IMAGE, LATENT, TIMESTEP, AllReduce, AttentionKind, Extent, Geometry, Shapes
from ...interfaces.state import State
from ...interfaces.tensor_cuts import Cuts
from ..shared.basic_blocks import block_cuts, check_channels, check_norm, without_variance
from ..shared.patchify import check_text, pad_to_patch, to_latent
from ..shared.streams import at_least_one

_REQUIRED_NUMBERS = ("in_channels", "patch_size", "cross_attention_dim", "caption_channels")
"""Numbers that have no default and that every text-to-video model has."""


class Latte(Family):
    """Latte in three parts.

    Inputs, batch first: the latent ``[B, 4, T, H, W]``, the timestep ``[B]`` in 0..999, and

    - ``encoder_hidden_states`` ``[B, L, D]``: text from T5. No token is masked.

    A token of the image stream is one patch position in all frames. The stream is ``[B * T, S, D]``, so that spatial
    attention goes through the attention seam and temporal attention stays on the rank.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_attention_heads": 16,
        "attention_head_dim": 88,
        "in_channels": None,
        "out_channels": None,
        "num_layers": 1,
        "cross_attention_dim": None,
        "patch_size": None,
        "activation_fn": "geglu",
        "norm_type": "layer_norm",
        "caption_channels": None,
        "video_length": 16,
    }
    first_layer: ClassVar[str] = "pos_embed"
    values_alive: ClassVar[float] = 24.4
    required: ClassVar[tuple[str, ...]] = ("encoder_hidden_states",)

    @staticmethod
    def _describe(config: Mapping[str, Any]) -> Geometry:
        check_norm("Latte", config, "ada_norm_single")
        _check_numbers(config)
        check_channels("Latte", config)
        heads, head_dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
        return Geometry(
            channels=config["in_channels"],
            out_channels=config["in_channels"],
            patch=(1, config["patch_size"], config["patch_size"]),
            layers=layers,
            sites=(AttentionKind(streams=(IMAGE,), heads=heads, head_dim=head_dim, count=layers, within_frames=True),),
            all_reduces=(AllReduce(tokens=IMAGE, width=heads * head_dim, count=5 * layers, min_rows=1),),
        )

    @staticmethod
    def _cuts(config: Mapping[str, Any]) -> Cuts:
        return block_cuts("transformer_blocks.*", config, cross=True) | block_cuts(
            "temporal_transformer_blocks.*", config, cross=False
        )

    @staticmethod
    def _extent(config: Mapping[str, Any], geometry: Geometry, shapes: Shapes) -> Extent:
        latent = shapes[LATENT]
        frames, rows, columns = geometry.grid(latent[2:])
        if frames not in (1, config["video_length"]):
            raise InvalidRequest(
                f"a latent of {frames} frames cannot be used: this Latte makes {config['video_length']}, or 1"
            )
        return Extent(
            streams={IMAGE: rows * columns},
            values=frames * geometry.out_channels * math.prod(geometry.patch),
            context={"text": check_text(shapes["encoder_hidden_states"], config["caption_channels"])},
            rows=frames,
        )

    def blocks_and_sites(self) -> tuple[list[Block], list[AttentionSite]]:
        """A block is a pair of a spatial and a temporal layer."""
        spatial, temporal = self.module.transformer_blocks, self.module.temporal_transformer_blocks
        blocks = [
            Block(run=partial(self._run_pair, i, *pair), modules=pair)
            for i, pair in enumerate(zip(spatial, temporal, strict=True))
        ]
        return blocks, [AttentionSite(module=layer.attn1, streams=(IMAGE,)) for layer in spatial]

    def image(self, inputs: Mapping[str, Tensor]) -> Tensor:
        tokens: Tensor = self.module.pos_embed(rearrange(self._latent(inputs), "b c t h w -> (b t) c h w"))
        return tokens

    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        """Pad the latent to whole patches, as ComfyUI does."""
        module, latent = self.module, self._latent(inputs)
        tokens = self.image(inputs)
        modulation, embedded = module.adaln_single(
            inputs[TIMESTEP], batch_size=latent.shape[0], hidden_dtype=tokens.dtype
        )
        text = module.caption_projection(inputs["encoder_hidden_states"].to(self.dtype))
        return State(
            streams={IMAGE: tokens},
            context={
                "modulation": modulation,
                "embedded": embedded,
                "text": repeat(text, "b l d -> (b t) l d", t=latent.shape[2]).contiguous(),
            },
        )

    def head(self, state: State) -> Tensor:
        """A token has the values of all frames."""
        module, tokens, embedded = self.module, state.streams[IMAGE], state.context["embedded"]
        by_frame = repeat(embedded, "b d -> (b t) 1 d", t=len(tokens) // len(embedded))
        shift, scale = (module.scale_shift_table[None] + by_frame).chunk(2, dim=1)
        values = without_variance(module.proj_out(module.norm_out(tokens) * (1 + scale) + shift), module.config)
        return rearrange(values, "(b t) s values -> b s (t values)", b=len(embedded))

    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        """Crop the padding."""
        by_frame = rearrange(tokens, "b s (t values) -> b (t s) values", t=size[0])
        return to_latent(by_frame, size, self.geometry, "pt ph pw c")

    def stock(self, inputs: Mapping[str, Tensor]) -> Tensor:
        out: Tensor = self.module(
            self._latent(inputs),
            timestep=inputs[TIMESTEP],
            encoder_hidden_states=inputs["encoder_hidden_states"].to(self.dtype),
            return_dict=False,
        )[0]
        _, height, width = inputs[LATENT].shape[2:]
        return out[:, : self.geometry.out_channels, :, :height, :width]

    def _latent(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return pad_to_patch(inputs[LATENT].to(self.dtype), self.geometry.patch)

    def _run_pair(self, index: int, spatial: nn.Module, temporal: nn.Module, state: State) -> State:
        modulation, local_tokens = state.context["modulation"], state.streams[IMAGE].shape[1]
        tokens = at_least_one(state.streams[IMAGE])
        batch, frames, positions = len(modulation), len(tokens) // len(modulation), tokens.shape[1]
        tokens = spatial(
            tokens,
            encoder_hidden_states=state.context["text"],
            timestep=modulation.repeat_interleave(frames, dim=0),
        )
        by_position = rearrange(tokens, "(b t) s d -> (b s) t d", b=batch)
        if index == 0 and frames > 1:
            by_position = by_position + self.module.temp_pos_embed.to(by_position.dtype)
        by_position = temporal(by_position, timestep=modulation.repeat_interleave(positions, dim=0))
        tokens = rearrange(by_position, "(b s) t d -> (b t) s d", b=batch)
        return state.with_streams(**{IMAGE: tokens[:, :local_tokens]})

    @staticmethod
    def variants() -> dict[str, Variant]:
        small = {
            "num_attention_heads": 16, "attention_head_dim": 8, "in_channels": 4, "out_channels": 8, "num_layers": 2,
            "cross_attention_dim": 128, "attention_bias": True, "sample_size": 8, "patch_size": 2,
            "activation_fn": "gelu-approximate", "norm_type": "ada_norm_single", "norm_elementwise_affine": False,
            "caption_channels": 32, "video_length": 3,
        }  # fmt: skip
        inputs: Inputs = {"encoder_hidden_states": ("text", "caption_channels")}
        gated = {**small, "activation_fn": "geglu", "out_channels": None}
        return {
            "video": Variant(config=small, size=(3, 9, 13), text=7, inputs=inputs),
            "one frame": Variant(config=small, size=(1, 9, 13), text=7, inputs=inputs),
            "fixed variance": Variant(config=gated, size=(3, 9, 13), text=7, inputs=inputs),
        }


def _check_numbers(config: Mapping[str, Any]) -> None:
    missing = [name for name in _REQUIRED_NUMBERS if config[name] is None]
    if missing:
        raise InvalidRequest(
            f"Latte without {', '.join(missing)} in its config is not supported: add a number for each"
        )
