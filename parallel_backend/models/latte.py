"""Latte (text to video) over diffusers' ``LatteTransformer3DModel``."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import InvalidRequest
from ..interfaces.family import AttentionSite, Block, Family, Inputs, Variant
from ..interfaces.geometry import IMAGE, LATENT, TIMESTEP, Extent, Geometry, Shapes, Site, Sum
from ..interfaces.state import State
from ..interfaces.tensor_cuts import Cuts
from .shared.basic_blocks import block_cuts, check_channels, check_norm, without_variance
from .shared.patchify import check_text, pad_to_patch, unfold
from .shared.streams import at_least_one

_DEFAULTS: dict[str, Any] = {
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
"""What ``LatteTransformer3DModel`` takes for a number that its config leaves out."""

_NEEDED = ("in_channels", "patch_size", "cross_attention_dim", "caption_channels")
"""Numbers without which there is no text-to-video model."""


class Latte(Family):
    """Inputs, batch first: the latent ``[B, 4, T, H, W]``, the timestep ``[B]`` in 0..999, and

    - ``encoder_hidden_states`` ``[B, L, D]`` of T5, no token of which is masked.

    A token of the image stream is a place in all frames. Its tensors are ``[B * T, places, D]``, so that spatial
    attention passes the seam and attention over frames stays on the rank.
    """

    required: ClassVar[tuple[str, ...]] = ("encoder_hidden_states",)

    @staticmethod
    def describe(config: Mapping[str, Any]) -> Geometry:
        """See ``Family.describe``."""
        config = _DEFAULTS | dict(config)
        check_norm("Latte", config, "ada_norm_single")
        missing = [name for name in _NEEDED if config[name] is None]
        if missing:
            raise InvalidRequest(f"Latte without {', '.join(missing)} in its config is not supported: give a number")
        check_channels("Latte", config)
        heads, head_dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
        return Geometry(
            channels=config["in_channels"],
            out_channels=config["in_channels"],
            patch=(1, config["patch_size"], config["patch_size"]),
            layers=layers,
            sites=(Site(streams=(IMAGE,), heads=heads, head_dim=head_dim, count=layers),),
            sums=(Sum(tokens=IMAGE, width=heads * head_dim, count=5 * layers, least=1),),
        )

    @staticmethod
    def cuts(config: Mapping[str, Any]) -> Cuts:
        """See ``Family.cuts``."""
        config = _DEFAULTS | dict(config)
        return block_cuts("transformer_blocks.*", config, cross=True) | block_cuts(
            "temporal_transformer_blocks.*", config, cross=False
        )

    @staticmethod
    def extent(config: Mapping[str, Any], shapes: Shapes) -> Extent:
        """See ``Family.extent``."""
        config = _DEFAULTS | dict(config)
        geometry, latent = Latte.describe(config), shapes[LATENT]
        frames, rows, columns = geometry.grid(latent[2:])
        if frames not in (1, config["video_length"]):
            raise InvalidRequest(f"a latent of {frames} frames: this Latte makes {config['video_length']}, or 1")
        return Extent(
            streams={IMAGE: rows * columns},
            values=frames * geometry.out_channels * math.prod(geometry.patch),
            context={"text": check_text(shapes["encoder_hidden_states"], config["caption_channels"])},
            rows=frames,
        )

    def parts(self) -> tuple[list[Block], list[AttentionSite]]:
        """See ``Family.parts``. A block is a spatial and a temporal layer."""
        spatial, temporal = self.module.transformer_blocks, self.module.temporal_transformer_blocks
        blocks = [
            Block(run=partial(self._run_pair, i, *pair), modules=pair)
            for i, pair in enumerate(zip(spatial, temporal, strict=True))
        ]
        return blocks, [AttentionSite(module=layer.attn1, streams=(IMAGE,)) for layer in spatial]

    @property
    def dtype(self) -> torch.dtype:
        """See ``Family.dtype``."""
        dtype: torch.dtype = self.module.pos_embed.proj.weight.dtype
        return dtype

    def image(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """See ``Family.image``."""
        tokens: Tensor = self.module.pos_embed(self._latent(inputs).transpose(1, 2).flatten(0, 1))
        return tokens

    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        """See ``Family.embed``. A latent that is no whole number of patches is padded as in ComfyUI."""
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
                "text": text.repeat_interleave(latent.shape[2], dim=0),
            },
        )

    def head(self, state: State) -> Tensor:
        """See ``Family.head``. The values of a token are those of all frames."""
        module, tokens, embedded = self.module, state.streams[IMAGE], state.context["embedded"]
        by_row = embedded.repeat_interleave(len(tokens) // len(embedded), dim=0)
        shift, scale = (module.scale_shift_table[None] + by_row[:, None]).chunk(2, dim=1)
        values = without_variance(module.proj_out(module.norm_out(tokens) * (1 + scale) + shift), module.config)
        by_frame: Tensor = values.unflatten(0, (len(embedded), -1))
        return by_frame.transpose(1, 2).flatten(2)

    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        """See ``Family.unpatchify``. What was padded is cropped."""
        by_frame = tokens.unflatten(2, (size[0], -1)).transpose(1, 2).flatten(1, 2)
        return unfold(by_frame, size, self.geometry, channels_last=True)

    def stock(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """See ``Family.stock``."""
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
        modulation, own = state.context["modulation"], state.streams[IMAGE].shape[1]
        tokens = at_least_one(state.streams[IMAGE])
        batch, frames, places = len(modulation), len(tokens) // len(modulation), tokens.shape[1]
        tokens = spatial(
            tokens,
            encoder_hidden_states=state.context["text"],
            timestep=modulation.repeat_interleave(frames, dim=0),
        )
        by_place = tokens.unflatten(0, (batch, frames)).transpose(1, 2).flatten(0, 1)
        if index == 0 and frames > 1:
            by_place = by_place + self.module.temp_pos_embed.to(by_place.dtype)
        by_place = temporal(by_place, timestep=modulation.repeat_interleave(places, dim=0))
        tokens = by_place.unflatten(0, (batch, places)).transpose(1, 2).flatten(0, 1)
        return state.with_streams(**{IMAGE: tokens[:, :own]})

    @staticmethod
    def variants() -> dict[str, Variant]:
        """See ``Family.variants``."""
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
