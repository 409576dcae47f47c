"""CogVideoX (2B, 5B, 1.5; text and image to video) over diffusers' ``CogVideoXTransformer3DModel``."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn

from ...errors import InvalidRequest
from ...interfaces.family import AttentionSite, Block, Family, Inputs, Variant
from ...interfaces.geometry import IMAGE, LATENT, TEXT, TIMESTEP, AllReduce, AttentionKind, Extent, Geometry, Shapes
from ...interfaces.state import State
from ...interfaces.tensor_cuts import ColumnParallel, Cuts, RowParallel, attention_cuts
from ..shared.patchify import check_concat, check_text, pad_to_patch, to_latent
from ..shared.streams import at_least_one

_OFS = 2.0
"""The ``ofs`` that diffusers' pipeline passes to models that embed it."""


class CogVideoX(Family):
    """CogVideoX in three parts.

    Inputs, batch first: the latent ``[B, C, T, H, W]``, the timestep ``[B]`` in 0..999, and

    - ``encoder_hidden_states`` ``[B, L, D]``: text from T5. L is fixed unless all positions are rotary;
    - ``concat`` ``[B, C', T, H, W]``: an image's latent, for models that take more channels than they predict;
    - ``ofs`` ``[B]``: for models that embed it (I2V of 1.5); 2 by default.

    The prediction is v, as in diffusers.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_attention_heads": 30,
        "attention_head_dim": 64,
        "in_channels": 16,
        "out_channels": 16,
        "ofs_embed_dim": None,
        "text_embed_dim": 4096,
        "num_layers": 30,
        "sample_width": 90,
        "sample_height": 60,
        "sample_frames": 49,
        "patch_size": 2,
        "patch_size_t": None,
        "temporal_compression_ratio": 4,
        "max_text_seq_length": 226,
        "activation_fn": "gelu-approximate",
        "use_rotary_positional_embeddings": False,
        "use_learned_positional_embeddings": False,
    }
    first_layer: ClassVar[str] = "patch_embed"
    values_alive: ClassVar[float] = 13.2
    required: ClassVar[tuple[str, ...]] = ("encoder_hidden_states",)
    optional: ClassVar[tuple[str, ...]] = ("concat", "ofs")

    @staticmethod
    def _describe(config: Mapping[str, Any]) -> Geometry:
        if config["activation_fn"] != "gelu-approximate":
            raise InvalidRequest(
                f"CogVideoX with activation_fn {config['activation_fn']!r} is not supported: 'gelu-approximate' would "
                "work"
            )
        heads, head_dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
        return Geometry(
            channels=config["out_channels"],
            out_channels=config["out_channels"],
            patch=(config["patch_size_t"] or 1, config["patch_size"], config["patch_size"]),
            layers=layers,
            sites=(AttentionKind(streams=(TEXT, IMAGE), heads=heads, head_dim=head_dim, count=layers),),
            all_reduces=(
                AllReduce(tokens=TEXT, width=heads * head_dim, count=2 * layers),
                AllReduce(tokens=IMAGE, width=heads * head_dim, count=2 * layers, min_rows=1),
            ),
        )

    @staticmethod
    def _cuts(config: Mapping[str, Any]) -> Cuts:
        """The norms of q and k span one head and need no cut."""
        heads = (config["num_attention_heads"], config["attention_head_dim"])
        hidden = ((4 * math.prod(heads), 1),)
        return attention_cuts("transformer_blocks.*.attn1", *heads) | {
            "transformer_blocks.*.ff.net.0.proj": ColumnParallel(hidden),
            "transformer_blocks.*.ff.net.2": RowParallel(hidden),
        }

    @staticmethod
    def _extent(config: Mapping[str, Any], geometry: Geometry, shapes: Shapes) -> Extent:
        latent = shapes[LATENT]
        text = check_text(shapes["encoder_hidden_states"], config["text_embed_dim"])
        _check_positions(config, text, latent[2:], geometry.grid(latent[2:]))
        check_concat(config["in_channels"] - geometry.channels, shapes, "InstructPixToPixConditioning")
        if "ofs" in shapes and (not config["ofs_embed_dim"] or len(shapes["ofs"]) != 1):
            takes = "one number per sample" if config["ofs_embed_dim"] else "none"
            raise InvalidRequest(f"ofs of shape {list(shapes['ofs'])} does not fit: this model takes {takes}")
        values = geometry.out_channels * math.prod(geometry.patch)
        return Extent(streams={TEXT: text, IMAGE: math.prod(geometry.grid(latent[2:]))}, values=values)

    def blocks_and_sites(self) -> tuple[list[Block], list[AttentionSite]]:
        layers = self.module.transformer_blocks
        blocks = [Block(run=partial(_run, layer), modules=(layer,)) for layer in layers]
        return blocks, [AttentionSite(module=layer.attn1, streams=(TEXT, IMAGE)) for layer in layers]

    def image(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self._embed_tokens(inputs)[:, inputs["encoder_hidden_states"].shape[1] :]

    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        """Pad the latent to whole patches, as ComfyUI does."""
        tokens, text_tokens = self._embed_tokens(inputs), inputs["encoder_hidden_states"].shape[1]
        return State(
            streams={TEXT: tokens[:, :text_tokens], IMAGE: tokens[:, text_tokens:]},
            tables={IMAGE: self._rope(self._latent(inputs))},
            context={"temb": self._time(inputs)},
        )

    def head(self, state: State) -> Tensor:
        module, tokens = self.module, state.streams[IMAGE]
        normed = module.norm_out(module.norm_final(tokens), temb=state.context["temb"])
        prediction: Tensor = module.proj_out(normed)
        return prediction

    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        """Crop the padding."""
        return to_latent(tokens, size, self.geometry, "c pt ph pw")

    def stock(self, inputs: Mapping[str, Tensor]) -> Tensor:
        latent = self._latent(inputs)
        rope = self._rope(latent)
        out: Tensor = self.module(
            hidden_states=rearrange(latent, "b c t h w -> b t c h w"),
            encoder_hidden_states=inputs["encoder_hidden_states"].to(self.dtype),
            timestep=inputs[TIMESTEP],
            ofs=_ofs(inputs),
            image_rotary_emb=(rope["cos"][0], rope["sin"][0]) if rope else None,
            return_dict=False,
        )[0]
        frames, height, width = inputs[LATENT].shape[2:]
        return rearrange(out, "b t c h w -> b c t h w")[:, :, :frames, :height, :width]

    def _embed_tokens(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return text tokens followed by image tokens, ``[B, L + S, D]``."""
        text, latent = inputs["encoder_hidden_states"].to(self.dtype), self._latent(inputs)
        tokens: Tensor = self.module.patch_embed(text, rearrange(latent, "b c t h w -> b t c h w"))
        return tokens

    def _latent(self, inputs: Mapping[str, Tensor]) -> Tensor:
        latents = [inputs[name] for name in (LATENT, "concat") if name in inputs]
        return torch.cat([pad_to_patch(part.to(self.dtype), self.geometry.patch) for part in latents], dim=1)

    def _time(self, inputs: Mapping[str, Tensor]) -> Tensor:
        module = self.module
        temb: Tensor = module.time_embedding(module.time_proj(inputs[TIMESTEP].float()).to(self.dtype))
        if module.ofs_embedding is not None:
            temb = temb + module.ofs_embedding(module.ofs_proj(_ofs(inputs)).to(self.dtype))
        return temb

    def _rope(self, latent: Tensor) -> dict[str, Tensor]:
        """Return rotary tables ``[1, S, D]`` as diffusers' pipelines compute them, or none without rotary positions."""
        from diffusers.models.embeddings import get_3d_rotary_pos_embed
        from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

        config = self.module.config
        if not config.use_rotary_positional_embeddings:
            return {}
        frames, *grid = self.geometry.grid(latent.shape[2:])
        rows, columns = (length // config.patch_size for length in (config.sample_height, config.sample_width))
        region: dict[str, Any] = {"crops_coords": None, "grid_type": "slice", "max_size": (rows, columns)}
        if config.patch_size_t is None:
            region = {"crops_coords": get_resize_crop_region_for_grid(tuple(grid), columns, rows)}
        cos, sin = get_3d_rotary_pos_embed(
            config.attention_head_dim, grid_size=tuple(grid), temporal_size=frames, device=latent.device, **region
        )
        return {"cos": cos[None], "sin": sin[None]}

    @staticmethod
    def variants() -> dict[str, Variant]:
        small = {
            "num_layers": 2, "num_attention_heads": 48, "attention_head_dim": 16, "text_embed_dim": 32,
            "time_embed_dim": 24, "sample_height": 6, "sample_width": 10, "sample_frames": 9, "max_text_seq_length": 7,
        }  # fmt: skip
        rotary = {**small, "use_rotary_positional_embeddings": True}
        newer = {**rotary, "patch_size_t": 2, "patch_bias": False}
        text: Inputs = {"encoder_hidden_states": ("text", "text_embed_dim")}
        image: Inputs = {**text, "concat": (16, "size")}
        learned = {**rotary, "max_text_seq_length": 226, "in_channels": 32, "use_learned_positional_embeddings": True}
        return {
            "2b": Variant(
                config={**small, "num_attention_heads": 30, "max_text_seq_length": 226}, size=(3, 5, 9), text=226,
                inputs=text, fixed_text=True,
            ),
            "5b": Variant(config=rotary, size=(3, 5, 9), text=5, inputs=text),
            "5b i2v": Variant(config=learned, size=(3, 6, 10), text=226, inputs=image, fixed_text=True),
            "1.5": Variant(config=newer, size=(5, 5, 9), text=5, inputs=text),
            "1.5 i2v": Variant(
                config={**newer, "in_channels": 32, "ofs_embed_dim": 24}, size=(5, 5, 9), text=5,
                inputs={**image, "ofs": ()},
            ),
        }  # fmt: skip


def _ofs(inputs: Mapping[str, Tensor]) -> Tensor:
    return inputs["ofs"].float() if "ofs" in inputs else torch.full_like(inputs[TIMESTEP], _OFS, dtype=torch.float32)


def _run(layer: nn.Module, state: State) -> State:
    # The layer fails on 0 image tokens, so a rank without any adds a placeholder, which the attention seam ignores.
    image, tables = state.streams[IMAGE], state.tables[IMAGE]
    rope = (at_least_one(tables["cos"])[0], at_least_one(tables["sin"])[0]) if tables else None
    out, text = layer(
        hidden_states=at_least_one(image),
        encoder_hidden_states=state.streams[TEXT],
        temb=state.context["temb"],
        image_rotary_emb=rope,
    )
    return state.with_streams(**{TEXT: text, IMAGE: out[:, : image.shape[1]]})


def _check_positions(config: Mapping[str, Any], text: int, size: Sequence[int], grid: Sequence[int]) -> None:
    """Check that the model has positions for this many text tokens and for a latent of this ``size``.

    Raises:
        InvalidRequest: it lacks positions.
    """
    rotary, learned = config["use_rotary_positional_embeddings"], config["use_learned_positional_embeddings"]
    wanted = config["max_text_seq_length"]
    if (learned or not rotary) and text != wanted:
        raise InvalidRequest(
            f"the text has {text} tokens, and this model takes {wanted}: pad or shorten it to {wanted} tokens"
        )
    frames = (config["sample_frames"] - 1) // config["temporal_compression_ratio"] + 1
    native = (frames, config["sample_height"], config["sample_width"])
    if learned and tuple(size) != native:
        raise InvalidRequest(
            f"a latent of {_times(size)} does not fit this model, which learned its positions for {_times(native)} "
            "alone (frames x height x width)"
        )
    largest = [length // config["patch_size"] for length in native[1:]]
    if rotary and config["patch_size_t"] and any(have > most for have, most in zip(grid[1:], largest, strict=True)):
        raise InvalidRequest(
            f"a latent of {_times(size)} has {_times(grid[1:])} patches per frame, and this model has positions for at "
            f"most {_times(largest)}"
        )


def _times(lengths: Sequence[int]) -> str:
    return " x ".join(map(str, lengths))
