"""Open-Sora 1.2 (text, image and video to video) over our ``STDiT3``, the module with the published names."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn

from ...errors import InvalidRequest
from ...interfaces.family import AttentionSite, Block, Family, Inputs, Variant
from ...interfaces.geometry import IMAGE, LATENT, TIMESTEP, AllReduce, AttentionKind, Extent, Geometry, Shapes
from ...interfaces.state import State
from ...interfaces.tensor_cuts import ColumnParallel, Cuts, HeadCounts, RowParallel
from ..shared.patchify import check_mask, check_text, check_vector, to_latent
from ..shared.streams import TEXT_MASK, at_least_one
from .times import generated

PIXELS = 8
"""Pixels of the video per row and per column of the latent."""

IMAGE_RATE = 120.0
"""The frame rate of a single frame."""

DEFAULT_RATE = 24.0
"""Frames a second of a video, unless an input says another number."""

GENERATED = "generated"
"""Name of the input that says which frames are generated."""


class OpenSora1(Family):
    """Open-Sora 1.2 in three parts.

    Inputs, batch first: the latent ``[B, 4, T, H, W]``, the timestep ``[B]`` in 0..1000, and

    - ``encoder_hidden_states`` ``[B, L, D]``: text from T5;
    - ``encoder_hidden_states_mask`` ``[B, L]``: True for text tokens that are not padding. Without it none is;
    - ``frame_rate`` ``[B]``: frames a second, by default 24, and 120 for a single frame;
    - ``resolution`` ``[B, 2]``: height and width in pixels, by default the latent's. The first sample's count;
    - ``generated`` ``[B, T]``: 1 for a frame that is generated, 0 for one that is given, and between them the part of
      the times from which on an edited frame is generated.

    The module predicts data minus noise, and this family the opposite, as ComfyUI's flow models do.

    A token of the image stream is one patch position in all frames. The stream is ``[B * T, S, D]``, so that spatial
    attention goes through the attention seam and temporal attention stays on the rank.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 4,
        "patch_size": (1, 2, 2),
        "hidden_size": 1152,
        "depth": 28,
        "num_heads": 16,
        "mlp_ratio": 4.0,
        "caption_channels": 4096,
        "model_max_length": 300,
    }
    first_layer: ClassVar[str] = "x_embedder"
    values_alive: ClassVar[float] = 16.0
    required: ClassVar[tuple[str, ...]] = ("encoder_hidden_states",)
    optional: ClassVar[tuple[str, ...]] = (TEXT_MASK, "frame_rate", "resolution", GENERATED)

    @staticmethod
    def _describe(config: Mapping[str, Any]) -> Geometry:
        width, heads, depth, patch = (config[name] for name in ("hidden_size", "num_heads", "depth", "patch_size"))
        _check_supported(width, heads, patch)
        return Geometry(
            channels=config["in_channels"],
            out_channels=config["in_channels"],
            patch=tuple(patch),
            layers=depth,
            sites=(
                AttentionKind(streams=(IMAGE,), heads=heads, head_dim=width // heads, count=depth, within_frames=True),
            ),
            all_reduces=(AllReduce(tokens=IMAGE, width=width, count=6 * depth, min_rows=1),),
        )

    @staticmethod
    def _cuts(config: Mapping[str, Any]) -> Cuts:
        width, heads = config["hidden_size"], config["num_heads"]
        by_head, hidden = (heads, width // heads), (round(width * config["mlp_ratio"]), 1)
        cuts: Cuts = {
            "attn": HeadCounts({"num_heads": (heads, 1)}),
            "attn.qkv": ColumnParallel((by_head,) * 3),
            "attn.proj": RowParallel((by_head,)),
            "cross_attn": HeadCounts({"num_heads": (heads, 1)}),
            "cross_attn.q_linear": ColumnParallel((by_head,)),
            "cross_attn.kv_linear": ColumnParallel((by_head,) * 2),
            "cross_attn.proj": RowParallel((by_head,)),
            "mlp.fc1": ColumnParallel((hidden,)),
            "mlp.fc2": RowParallel((hidden,)),
        }
        lists = ("spatial_blocks", "temporal_blocks")
        return {f"{blocks}.*.{name}": cut for blocks in lists for name, cut in cuts.items()}

    @staticmethod
    def _extent(config: Mapping[str, Any], geometry: Geometry, shapes: Shapes) -> Extent:
        frames, rows, columns = geometry.grid(shapes[LATENT][2:])
        text = check_text(shapes["encoder_hidden_states"], config["caption_channels"])
        if text > config["model_max_length"]:
            raise InvalidRequest(
                f"a prompt of {text} tokens is too long: Open-Sora takes at most {config['model_max_length']}; shorten "
                "it"
            )
        check_mask(TEXT_MASK, shapes, text)
        if len(shapes.get("frame_rate", (1,))) != 1:
            raise InvalidRequest(f"frame_rate of shape {list(shapes['frame_rate'])}: [batch] is needed")
        for name, width in (("resolution", 2), (GENERATED, frames)):
            if name in shapes:
                check_vector(name, shapes[name], width)
        return Extent(
            streams={IMAGE: rows * columns},
            values=frames * geometry.out_channels * math.prod(geometry.patch),
            context={"text": text},
            rows=frames,
        )

    def blocks_and_sites(self) -> tuple[list[Block], list[AttentionSite]]:
        """A block is a pair of a spatial and a temporal layer."""
        spatial, temporal = self.module.spatial_blocks, self.module.temporal_blocks
        pairs = list(zip(spatial, temporal, strict=True))
        blocks = [Block(run=partial(self._run_pair, *pair), modules=pair) for pair in pairs]
        return blocks, [AttentionSite(module=layer.attn, streams=(IMAGE,)) for layer in spatial]

    def image(self, inputs: Mapping[str, Tensor]) -> Tensor:
        height, width = self._resolution(inputs)[0].unbind()
        tokens: Tensor = self.module.embed_patches(inputs[LATENT].to(self.dtype), height, width)
        return tokens

    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        """Fill up the last patches with zeros, as the authors do."""
        module, frames = self.module, inputs[LATENT].shape[2]
        times = module.embed_time(inputs[TIMESTEP].float(), self._rate(inputs), frames, self.generated_frames(inputs))
        cos, sin = module.rope(frames)
        context = {
            "embedded": times.embedded,
            "given": times.given,
            "modulation": times.modulation,
            "text": module.y_embedder(inputs["encoder_hidden_states"].to(self.dtype)),
            "cos": cos,
            "sin": sin,
        }
        if times.x_mask is not None:
            context["x_mask"] = times.x_mask
        if TEXT_MASK in inputs:
            context["text_mask"] = inputs[TEXT_MASK][:, None, None]
        return State(streams={IMAGE: self.image(inputs)}, context=context)

    def head(self, state: State) -> Tensor:
        """A token has the values of all frames. Those after the velocity's have no use."""
        pixels, channels = math.prod(self.geometry.patch), self.geometry.out_channels
        by_pixel = rearrange(self.values(state), "n s (p c) -> n s p c", p=pixels)[..., :channels]
        return -rearrange(by_pixel, "(b t) s p c -> b s (t p c)", b=len(state.context["embedded"]))

    def values(self, state: State) -> Tensor:
        """Return all values that the module predicts for its tokens, ``[B * T, S, values]``."""
        from .module import Times

        context = state.context
        named = {name: context[name] for name in ("embedded", "given", "modulation")}
        values: Tensor = self.module.final_layer(state.streams[IMAGE], Times(**named, x_mask=context.get("x_mask")))
        return values

    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        """Crop the padding."""
        frames = self.geometry.grid(size)[0]
        by_frame = rearrange(tokens, "b s (t values) -> b (t s) values", t=frames)
        return to_latent(by_frame, size, self.geometry, "pt ph pw c")

    def stock(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The module's own forward."""
        height, width = self._resolution(inputs).unbind(1)
        out: Tensor = self.module(
            inputs[LATENT].to(self.dtype),
            inputs[TIMESTEP].float(),
            inputs["encoder_hidden_states"],
            self._rate(inputs),
            height,
            width,
            mask=inputs.get(TEXT_MASK),
            x_mask=self.generated_frames(inputs),
        )
        return -out[:, : self.geometry.out_channels]

    def generated_frames(self, inputs: Mapping[str, Tensor]) -> Tensor | None:
        """Return which frames are generated at the timestep, bool ``[B, T]``; None if all always are."""
        return generated(inputs[GENERATED].float(), inputs[TIMESTEP].float()) if GENERATED in inputs else None

    def through(self, layer: nn.Module, state: State) -> State:
        """Return the state behind a layer. A rank may hold no token."""
        context, local_tokens = state.context, state.streams[IMAGE].shape[1]
        tokens = at_least_one(state.streams[IMAGE])
        rotation = (context["cos"], context["sin"])
        tokens = layer(tokens, context["modulation"], context["text"], context.get("text_mask"), rotation)
        return state.with_streams(**{IMAGE: tokens[:, :local_tokens]})

    def _run_pair(self, spatial: nn.Module, temporal: nn.Module, state: State) -> State:
        return self.through(temporal, self.through(spatial, state))

    def _resolution(self, inputs: Mapping[str, Tensor]) -> Tensor:
        latent = inputs[LATENT]
        if "resolution" in inputs:
            return inputs["resolution"].float()
        # Filled on the device: for a copy of numbers, the CPU would wait for the GPU.
        sides = [latent.new_full((len(latent),), side * PIXELS, dtype=torch.float32) for side in latent.shape[3:]]
        return torch.stack(sides, dim=1)

    def _rate(self, inputs: Mapping[str, Tensor]) -> Tensor:
        latent = inputs[LATENT]
        if "frame_rate" in inputs:
            return inputs["frame_rate"].float()
        rate = IMAGE_RATE if latent.shape[2] == 1 else DEFAULT_RATE
        return latent.new_full((len(latent),), rate, dtype=torch.float32)

    @staticmethod
    def variants() -> dict[str, Variant]:
        small = {"hidden_size": 128, "num_heads": 16, "depth": 2, "caption_channels": 32, "model_max_length": 12}
        inputs: Inputs = {"encoder_hidden_states": ("text", "caption_channels")}
        masked: Inputs = {**inputs, TEXT_MASK: ("text",), "frame_rate": ()}
        given: Inputs = {**masked, GENERATED: ("frames",)}
        plain = {**small, "qk_norm": False, "pred_sigma": False, "mlp_ratio": 3.0}
        return {
            "video": Variant(config=small, size=(3, 9, 13), text=7, inputs=masked),
            "given frames": Variant(config=small, size=(3, 9, 13), text=7, inputs=given),
            "one frame": Variant(config=small, size=(1, 9, 13), text=7, inputs=inputs),
            "without norms": Variant(config=plain, size=(3, 9, 13), text=7, inputs=masked),
        }


def _check_supported(width: int, heads: int, patch: Sequence[int]) -> None:
    if width % heads or width // heads % 2:
        raise InvalidRequest(
            f"Open-Sora with hidden_size {width} and num_heads {heads} is not supported: hidden_size has to be an even "
            "multiple of num_heads"
        )
    if width % 4:
        raise InvalidRequest(f"Open-Sora with hidden_size {width} is not supported: a multiple of 4 would work")
    if len(patch) != 3 or patch[0] != 1:
        raise InvalidRequest(f"Open-Sora with patch_size {list(patch)} is not supported: [1, 2, 2] would work")
