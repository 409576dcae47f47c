"""LTX-Video (2B and 13B, text, image and keyframes to video) over diffusers' ``LTXVideoTransformer3DModel``."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from ...errors import InvalidRequest
from ...interfaces.family import AttentionSite, Block, Family, Inputs, Variant
from ...interfaces.geometry import IMAGE, LATENT, TIMESTEP, AllReduce, AttentionKind, Extent, Geometry, Shapes
from ...interfaces.state import State
from ...interfaces.tensor_cuts import ColumnParallel, Cuts, HeadOutputs, HeadsNorm, RowParallel, attention_cuts
from ..shared.patchify import check_text, to_latent
from ..shared.streams import at_least_one

_DEFAULT_ONLY = ("patch_size", "patch_size_t", "activation_fn", "qk_norm")
"""Config values with only the default supported: no checkpoint has another."""

_PIXELS = (8, 32, 32)
"""Frames, rows and columns of the video per latent frame, row and column. Positions are the video's."""

_FRAME_RATE = 25.0
"""Default frames per second, as in ComfyUI."""


class LTXVideo(Family):
    """LTX-Video in three parts.

    Inputs, batch first: the latent ``[B, 128, T, H, W]``, the timestep ``[B]`` or ``[B, T]`` in 0..1, and

    - ``encoder_hidden_states`` ``[B, L, D]``: text from T5;
    - ``encoder_attention_mask`` ``[B, L]``: True for text tokens that are not padding;
    - ``frame_rate`` ``[B]``: frames per second, 25 by default;
    - ``video_coords`` ``[B, 3, S]``: frame, row and column of the video at which each of the ``T * H * W`` tokens
      starts. From 0.9.5 on, a video starts with a single frame, and keyframes have positions of their own. By default
      tokens are 8 frames, 32 rows and 32 columns apart, as in 0.9.0 and 0.9.1;
    - ``frame_weights`` ``[B, T]`` and ``token_weights`` ``[B, S]``: factors on the timestep of each frame and token; 0
      for clean ones.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 128,
        "out_channels": 128,
        "patch_size": 1,
        "patch_size_t": 1,
        "num_attention_heads": 32,
        "attention_head_dim": 64,
        "num_layers": 28,
        "activation_fn": "gelu-approximate",
        "qk_norm": "rms_norm_across_heads",
        "caption_channels": 4096,
    }
    first_layer: ClassVar[str] = "proj_in"
    values_alive: ClassVar[float] = 17.0
    teacache: ClassVar[tuple[float, ...]] = (21.4700694, -12.8016453, 2.31279151, 0.792487521, 0.00969274326)
    frame_timesteps: ClassVar[bool] = True
    float16: ClassVar[bool] = False
    required: ClassVar[tuple[str, ...]] = ("encoder_hidden_states",)
    optional: ClassVar[tuple[str, ...]] = (
        "encoder_attention_mask", "frame_rate", "video_coords", "frame_weights", "token_weights",
    )  # fmt: skip

    @staticmethod
    def _describe(config: Mapping[str, Any]) -> Geometry:
        for name in _DEFAULT_ONLY:
            if config[name] != LTXVideo.defaults[name]:
                raise InvalidRequest(
                    f"LTX-Video with {name} {config[name]!r} is not supported: {LTXVideo.defaults[name]!r} would work"
                )
        heads, head_dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
        norms = ((IMAGE, 3), ("text", 1))
        return Geometry(
            channels=config["in_channels"],
            out_channels=config["out_channels"] or config["in_channels"],
            patch=(1, 1, 1),
            layers=layers,
            sites=(AttentionKind(streams=(IMAGE,), heads=heads, head_dim=head_dim, count=layers),),
            all_reduces=(
                AllReduce(tokens=IMAGE, width=heads * head_dim, count=3 * layers),
                *(AllReduce(tokens=tokens, width=1, count=count * layers, itemsize=4) for tokens, count in norms),
            ),
        )

    @staticmethod
    def _cuts(config: Mapping[str, Any]) -> Cuts:
        """Rotary tables hold the features of all heads, with different angles for each."""
        heads = (config["num_attention_heads"], config["attention_head_dim"])
        hidden = ((4 * math.prod(heads), 1),)
        cuts = attention_cuts("transformer_blocks.*.attn1", *heads)
        cuts |= attention_cuts("transformer_blocks.*.attn2", *heads)
        cuts |= {f"transformer_blocks.*.attn{i}.norm_{x}": HeadsNorm(heads) for i in (1, 2) for x in "qk"}
        cuts |= {
            "transformer_blocks.*.ff.net.0.proj": ColumnParallel(hidden),
            "transformer_blocks.*.ff.net.2": RowParallel(hidden),
        }
        return cuts | {"rope": HeadOutputs(heads)}

    @staticmethod
    def _extent(config: Mapping[str, Any], geometry: Geometry, shapes: Shapes) -> Extent:
        batch, _, *size = shapes[LATENT]
        text = check_text(shapes["encoder_hidden_states"], config["caption_channels"])
        tokens = math.prod(size)
        _check(shapes, "encoder_attention_mask", (batch, text), f"the text has {text} tokens")
        _check(shapes, "frame_rate", (batch,), "one number per sample is needed")
        _check(shapes, "video_coords", (batch, 3, tokens), f"the latent has {tokens} tokens with 3 coordinates")
        _check(shapes, "frame_weights", (batch, size[0]), f"the latent has {size[0]} frames")
        _check(shapes, "token_weights", (batch, tokens), f"the latent has {tokens} tokens")
        return Extent(streams={IMAGE: tokens}, values=geometry.out_channels, context={"text": text})

    def blocks_and_sites(self) -> tuple[list[Block], list[AttentionSite]]:
        layers = self.module.transformer_blocks
        blocks = [Block(run=self._modulate), *(Block(run=partial(_run, layer), modules=(layer,)) for layer in layers)]
        return blocks, [AttentionSite(module=layer.attn1, streams=(IMAGE,)) for layer in layers]

    def image(self, inputs: Mapping[str, Tensor]) -> Tensor:
        tokens: Tensor = self.module.proj_in(self._tokens(inputs))
        return tokens

    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        module, tokens = self.module, self._tokens(inputs)
        cos, sin = module.rope(tokens, **_rope_arguments(inputs))
        tables = {"cos": cos, "sin": sin}
        context = {"text": module.caption_projection(inputs["encoder_hidden_states"].to(self.dtype))}
        if "encoder_attention_mask" in inputs:
            context["mask"] = ((1 - inputs["encoder_attention_mask"].to(self.dtype)) * -10000.0).unsqueeze(1)
        timestep = _timestep(inputs)
        if timestep.ndim == 1:
            context |= self._time(timestep[:, None])
        else:
            tables["timestep"] = timestep
        return State(streams={IMAGE: self.image(inputs)}, tables={IMAGE: tables}, context=context)

    def head(self, state: State) -> Tensor:
        module, embedded = self.module, _timestep_rows(state, "embedded")
        shift, scale = (module.scale_shift_table + embedded[:, :, None]).unbind(2)
        prediction: Tensor = module.proj_out(module.norm_out(state.streams[IMAGE]) * (1 + scale) + shift)
        return prediction

    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        return to_latent(tokens, size, self.geometry, "pt ph pw c")

    def stock(self, inputs: Mapping[str, Tensor]) -> Tensor:
        out: Tensor = self.module(
            hidden_states=self._tokens(inputs),
            encoder_hidden_states=inputs["encoder_hidden_states"].to(self.dtype),
            timestep=_timestep(inputs),
            encoder_attention_mask=inputs.get("encoder_attention_mask"),
            **_rope_arguments(inputs),
            return_dict=False,
        )[0]
        return self.unpatchify(out, inputs[LATENT].shape[2:])

    def _tokens(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return rearrange(inputs[LATENT].to(self.dtype), "b c t h w -> b (t h w) c")

    def _time(self, timestep: Tensor) -> dict[str, Tensor]:
        """Turn timesteps ``[B, N]`` into the blocks' modulation ``[B, N, 6D]`` and an embedding ``[B, N, D]``."""
        batch = len(timestep)
        temb, embedded = self.module.time_embed(timestep.flatten(), batch_size=batch, hidden_dtype=self.dtype)
        rows = {"temb": temb, "embedded": embedded}
        return {name: rearrange(row, "(b n) d -> b n d", b=batch) for name, row in rows.items()}

    def _modulate(self, state: State) -> State:
        """Embed the timesteps of this rank's tokens, if each token has its own."""
        tables = state.tables[IMAGE]
        if "timestep" not in tables:
            return state
        return replace(state, tables={IMAGE: {**tables, **self._time(tables["timestep"])}})

    @staticmethod
    def variants() -> dict[str, Variant]:
        small = {
            "num_layers": 2, "num_attention_heads": 32, "attention_head_dim": 4, "cross_attention_dim": 128,
            "caption_channels": 24, "in_channels": 20, "out_channels": 20,
        }  # fmt: skip
        large = {**small, "attention_head_dim": 8, "cross_attention_dim": 256}
        text: Inputs = {"encoder_hidden_states": ("text", "caption_channels"), "encoder_attention_mask": ("text",)}
        size = (3, 5, 7)
        keyframes: Inputs = {**text, "frame_rate": (), "video_coords": (3, "tokens"), "token_weights": ("tokens",)}
        return {
            "2b": Variant(config=small, size=size, text=7, inputs={**text, "frame_rate": ()}),
            "2b i2v": Variant(config=small, size=size, text=7, inputs={**text, "frame_weights": ("frames",)}),
            "13b keyframes": Variant(config=large, size=size, text=7, inputs=keyframes),
        }


def _run(layer: nn.Module, state: State) -> State:
    tables, context = state.tables[IMAGE], state.context
    out: Tensor = layer(
        hidden_states=state.streams[IMAGE],
        encoder_hidden_states=context["text"],
        temb=at_least_one(_timestep_rows(state, "temb")),  # on a rank without tokens a placeholder, which nothing reads
        image_rotary_emb=(tables["cos"], tables["sin"]),
        encoder_attention_mask=context.get("mask"),
    )
    return state.with_streams(**{IMAGE: out})


def _timestep_rows(state: State, name: str) -> Tensor:
    """Return a tensor that depends on the timestep: ``[B, 1, D]`` for all tokens, or ``[B, S, D]`` for each."""
    return state.context[name] if name in state.context else state.tables[IMAGE][name]


def _timestep(inputs: Mapping[str, Tensor]) -> Tensor:
    """Return timesteps in 0..1000 as in diffusers: ``[B]``, or ``[B, S]`` where each token has its own."""
    timestep, (_, _, _, height, width) = inputs[TIMESTEP].float(), inputs[LATENT].shape
    if "frame_weights" in inputs:
        timestep = timestep.view(len(timestep), -1) * inputs["frame_weights"].float()
    if timestep.ndim == 2:
        timestep = repeat(timestep, "b t -> b (t hw)", hw=height * width)
    if "token_weights" in inputs:
        timestep = timestep.view(len(timestep), -1) * inputs["token_weights"].float()
    return timestep * 1000


def _rope_arguments(inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the tokens' positions as arguments of diffusers' ``LTXVideoRotaryPosEmbed``, with time in seconds."""
    latent = inputs[LATENT]
    rate = inputs["frame_rate"].float() if "frame_rate" in inputs else latent.new_full((len(latent),), _FRAME_RATE)
    if "video_coords" in inputs:
        frame, row, column = inputs["video_coords"].float().unbind(1)
        return {"video_coords": torch.stack([frame / rate[:, None], row, column], dim=1)}
    seconds = _PIXELS[0] / rearrange(rate, "b -> b 1 1 1 1")
    sizes = dict(zip(("num_frames", "height", "width"), latent.shape[2:], strict=True))
    return {**sizes, "rope_interpolation_scale": (seconds, *_PIXELS[1:])}


def _check(shapes: Shapes, name: str, wanted: tuple[int, ...], reason: str) -> None:
    """Check that the input ``name``, if there is one, has the shape ``wanted``."""
    shape = shapes.get(name, wanted)
    if tuple(shape) != wanted:
        raise InvalidRequest(f"{name} of shape {list(shape)} does not fit: {reason}, so {list(wanted)} would work")
