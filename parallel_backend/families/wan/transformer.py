"""Wan 2.1 and 2.2 (text and image to video) over diffusers' ``WanTransformer3DModel``."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.nn.functional import pad

from ...errors import InvalidRequest
from ...interfaces.family import AttentionSite, Block, Family, Inputs, Variant
from ...interfaces.geometry import IMAGE, LATENT, TIMESTEP, AllReduce, AttentionKind, Extent, Geometry, Shapes
from ...interfaces.state import State
from ...interfaces.tensor_cuts import ColumnParallel, Cuts, HeadsNorm, RowParallel, attention_cuts
from ..shared.patchify import check_concat, check_text, crop, pad_to_patch, to_latent

_TEXT = 512
"""Text tokens that diffusers' cross-attention expects after the tokens of an image."""

_IMAGE_CONTEXT = "image context"
"""Name of an image's tokens in a state's context."""


class Wan(Family):
    """Wan in three parts.

    Inputs, batch first: the latent ``[B, C, T, H, W]``, the timestep ``[B]``, or ``[B, T]`` per latent frame, and

    - ``encoder_hidden_states`` ``[B, L, D]``: text;
    - ``encoder_hidden_states_image`` ``[B, L, D]``: an image, for models with an image embedder. A model for a first
      and a last image takes both or one;
    - ``concat`` ``[B, C', T, H, W]``: mask and image latent, for models that take more channels than they predict;
    - ``frame_weights`` ``[B, T]``: factors on a timestep ``[B]``, 0 for clean frames (TI2V of 2.2).
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 40,
        "attention_head_dim": 128,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 4096,
        "ffn_dim": 13824,
        "num_layers": 40,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "pos_embed_seq_len": None,
        "rope_max_seq_len": 1024,
    }
    first_layer: ClassVar[str] = "patch_embedding"
    values_alive: ClassVar[float] = 12.1
    frame_timesteps: ClassVar[bool] = True
    required: ClassVar[tuple[str, ...]] = ("encoder_hidden_states",)
    optional: ClassVar[tuple[str, ...]] = ("encoder_hidden_states_image", "concat", "frame_weights")

    @staticmethod
    def _describe(config: Mapping[str, Any]) -> Geometry:
        _check_embedder(config)
        heads, head_dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
        out_channels = config["out_channels"] or config["in_channels"]
        norms = [AllReduce(tokens=name, width=1, count=n * layers, itemsize=4) for name, n in _norms(config)]
        return Geometry(
            channels=out_channels,
            out_channels=out_channels,
            patch=tuple(config["patch_size"]),
            layers=layers,
            sites=(AttentionKind(streams=(IMAGE,), heads=heads, head_dim=head_dim, count=layers),),
            all_reduces=(AllReduce(tokens=IMAGE, width=heads * head_dim, count=3 * layers), *norms),
            positions=config["rope_max_seq_len"],
        )

    @staticmethod
    def _cuts(config: Mapping[str, Any]) -> Cuts:
        heads, hidden = (config["num_attention_heads"], config["attention_head_dim"]), ((config["ffn_dim"], 1),)
        cuts = attention_cuts("blocks.*.attn1", *heads) | attention_cuts("blocks.*.attn2", *heads)
        cuts |= {f"blocks.*.attn{i}.norm_{x}": HeadsNorm(heads) for i in (1, 2) for x in "qk"}
        if config["added_kv_proj_dim"] is not None:
            cuts |= {f"blocks.*.attn2.add_{x}_proj": ColumnParallel((heads,)) for x in "kv"}
            cuts |= {"blocks.*.attn2.norm_added_k": HeadsNorm(heads)}
        return cuts | {"blocks.*.ffn.net.0.proj": ColumnParallel(hidden), "blocks.*.ffn.net.2": RowParallel(hidden)}

    @staticmethod
    def _extent(config: Mapping[str, Any], geometry: Geometry, shapes: Shapes) -> Extent:
        latent = shapes[LATENT]
        text = check_text(shapes["encoder_hidden_states"], config["text_dim"])
        context = {"text": text} | _image_context(config, shapes)
        check_concat(config["in_channels"] - geometry.channels, shapes, "WanImageToVideo")
        weights = shapes.get("frame_weights")
        if weights is not None and weights[1:] != (latent[2],):
            raise InvalidRequest(f"frame_weights of shape {list(weights)} does not fit a latent of {latent[2]} frames")
        values = geometry.out_channels * math.prod(geometry.patch)
        return Extent(streams={IMAGE: math.prod(geometry.grid(latent[2:]))}, values=values, context=context)

    def blocks_and_sites(self) -> tuple[list[Block], list[AttentionSite]]:
        layers = self.module.blocks
        blocks = [Block(run=self._modulate), *(Block(run=partial(_run, layer), modules=(layer,)) for layer in layers)]
        return blocks, [AttentionSite(module=layer.attn1, streams=(IMAGE,)) for layer in layers]

    def image(self, inputs: Mapping[str, Tensor]) -> Tensor:
        tokens: Tensor = self.module.patch_embedding(self._latent(inputs))
        return rearrange(tokens, "b d t h w -> b (t h w) d").contiguous()

    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        """Pad the latent to whole patches, as ComfyUI does."""
        rope_cos, rope_sin = self.module.rope(self._latent(inputs))
        tables = {"rope_cos": rope_cos, "rope_sin": rope_sin}
        context, timestep = self._context(inputs), self._timestep(inputs)
        if timestep.ndim == 1:
            context |= self._time(timestep)
        else:
            tables["timestep"] = timestep
        return State(streams={IMAGE: self.image(inputs)}, tables={IMAGE: tables}, context=context)

    def head(self, state: State) -> Tensor:
        module, tokens = self.module, state.streams[IMAGE]
        temb = state.context["temb"].unsqueeze(1) if "temb" in state.context else state.tables[IMAGE]["temb"]
        shift, scale = (module.scale_shift_table.unsqueeze(1) + temb.unsqueeze(2)).unbind(2)
        normed = (module.norm_out(tokens.float()) * (1 + scale) + shift).type_as(tokens)
        prediction: Tensor = module.proj_out(normed)
        return prediction

    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        """Crop the padding."""
        return to_latent(tokens, size, self.geometry, "pt ph pw c")

    def stock(self, inputs: Mapping[str, Tensor]) -> Tensor:
        image = inputs.get("encoder_hidden_states_image")
        if image is not None and self.module.condition_embedder.image_embedder.pos_embed is not None:
            image = rearrange(image, "b (images l) d -> (b images) l d", images=2)
        image = None if image is None else image.to(self.dtype)
        out: Tensor = self.module(
            hidden_states=self._latent(inputs),
            timestep=self._timestep(inputs),
            encoder_hidden_states=inputs["encoder_hidden_states"].to(self.dtype),
            encoder_hidden_states_image=image,
            return_dict=False,
        )[0]
        return crop(out, inputs[LATENT].shape[2:])

    def _latent(self, inputs: Mapping[str, Tensor]) -> Tensor:
        latents = [inputs[name] for name in (LATENT, "concat") if name in inputs]
        return torch.cat([pad_to_patch(part.to(self.dtype), self.geometry.patch) for part in latents], dim=1)

    @staticmethod
    def variants() -> dict[str, Variant]:
        small = {
            "num_attention_heads": 12, "attention_head_dim": 24, "num_layers": 2, "ffn_dim": 100, "text_dim": 32,
            "freq_dim": 32, "rope_max_seq_len": 64,
        }  # fmt: skip
        text: Inputs = {"encoder_hidden_states": ("text", "text_dim")}
        size = (3, 5, 7)
        concat: Inputs = {"concat": (20, "size")}
        image = {"image_dim": 20, "added_kv_proj_dim": 288}
        embedded: Inputs = {**text, **concat, "encoder_hidden_states_image": (10, "image_dim")}
        pair: Inputs = {**text, **concat, "encoder_hidden_states_image": ("pos_embed_seq_len", "image_dim")}
        return {
            "t2v": Variant(config=small, size=size, text=9, inputs=text),
            "i2v 2.1": Variant(
                config={**small, **image, "in_channels": 36}, size=size, text=512, inputs=embedded, fixed_text=True
            ),
            "flf2v 2.1": Variant(
                config={**small, **image, "in_channels": 36, "pos_embed_seq_len": 10}, size=size, text=512,
                inputs=pair, fixed_text=True,
            ),
            "i2v 2.2": Variant(config={**small, "in_channels": 36}, size=size, text=9, inputs={**text, **concat}),
            "ti2v 5b": Variant(
                config={
                    **small, "num_attention_heads": 24, "attention_head_dim": 12, "in_channels": 48, "out_channels": 48
                },
                size=size, text=9, inputs={**text, "frame_weights": ("frames",)},
            ),
        }  # fmt: skip

    def _context(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        embedder = self.module.condition_embedder
        text = embedder.text_embedder(inputs["encoder_hidden_states"].to(self.dtype))
        image = inputs.get("encoder_hidden_states_image")
        return {"text": text} if image is None else {"text": text, _IMAGE_CONTEXT: self._embed_image(image)}

    def _embed_image(self, image: Tensor) -> Tensor:
        """Embed tokens ``[B, L, D]``. In a model for two images, a single one counts as the first, as in ComfyUI."""
        embedder, length = self.module.condition_embedder.image_embedder, image.shape[1]
        image = image.to(self.dtype)
        if embedder.pos_embed is not None:  # diffusers expects the two images as two samples
            image = pad(image, (0, 0, 0, embedder.pos_embed.shape[1] - length))
            image = rearrange(image, "b (images l) d -> (b images) l d", images=2)
        tokens: Tensor = embedder(image)
        return tokens[:, :length]

    def _timestep(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return timesteps ``[B]``, or ``[B, S]`` per token where frames have timesteps or weights of their own.

        A timestep per frame already includes the weights.
        """
        timestep = inputs[TIMESTEP].float()
        if timestep.ndim == 1 and "frame_weights" in inputs:
            timestep = timestep[:, None] * inputs["frame_weights"].float()
        if timestep.ndim == 1:
            return timestep
        return repeat(timestep, "b t -> b (t hw)", hw=math.prod(self.geometry.grid(inputs[LATENT].shape[2:])[1:]))

    def _time(self, timestep: Tensor) -> dict[str, Tensor]:
        """Turn timesteps ``[...]`` into an embedding ``[..., D]`` and the blocks' modulation ``[..., 6, D]``."""
        embedder = self.module.condition_embedder
        wave = embedder.timesteps_proj(timestep.flatten()).unflatten(0, timestep.shape)
        dtype = embedder.time_embedder.linear_1.weight.dtype
        temb = embedder.time_embedder(wave.to(dtype)).to(self.dtype)
        modulation = rearrange(embedder.time_proj(embedder.act_fn(temb)), "... (six d) -> ... six d", six=6)
        return {"temb": temb, "modulation": modulation}

    def _modulate(self, state: State) -> State:
        """Embed the timesteps of this rank's tokens, if each token has its own."""
        tables = state.tables[IMAGE]
        if "timestep" not in tables:
            return state
        return replace(state, tables={IMAGE: {**tables, **self._time(tables["timestep"])}})


class _ImageAndText:
    """Stands in for the tensor of an image's and a text's tokens, for a text of any length.

    diffusers' cross-attention splits that tensor 512 tokens before its end, but ComfyUI's texts may be longer.
    """

    def __init__(self, image: Tensor, text: Tensor) -> None:
        split = image.shape[1]
        self.shape = (len(text), split + _TEXT, text.shape[2])
        self._parts = {(None, split): image, (split, None): text}

    def __getitem__(self, cut: tuple[slice, slice]) -> Tensor:
        return self._parts[cut[1].start, cut[1].stop]


def _run(block: nn.Module, state: State) -> State:
    tables = state.tables[IMAGE]
    modulation = state.context.get("modulation", tables.get("modulation"))
    rope = (tables["rope_cos"], tables["rope_sin"])
    text: Any = state.context["text"]
    if _IMAGE_CONTEXT in state.context:
        text = _ImageAndText(state.context[_IMAGE_CONTEXT], text)
    return state.with_streams(**{IMAGE: block(state.streams[IMAGE], text, modulation, rope)})


def _check_embedder(config: Mapping[str, Any]) -> None:
    width, added = config["image_dim"], config["added_kv_proj_dim"]
    if (width is None) != (added is None):
        raise InvalidRequest(
            f"a Wan transformer with image_dim {width} and added_kv_proj_dim {added} is not supported: both or neither "
            "would work"
        )


def _norms(config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return which tokens a layer normalises over all heads, and how often."""
    return [(IMAGE, 3), ("text", 1), *([(_IMAGE_CONTEXT, 1)] if config["added_kv_proj_dim"] is not None else [])]


def _image_context(config: Mapping[str, Any], shapes: Shapes) -> dict[str, int]:
    """Check the shape of an image embedding and return its number of tokens, or nothing if the model takes none."""
    shape, width = shapes.get("encoder_hidden_states_image"), config["image_dim"]
    if width is None:
        if shape is not None:
            raise InvalidRequest("encoder_hidden_states_image cannot be used: this model takes no image embedding")
        return {}
    if shape is None or len(shape) != 3 or shape[2] != width:
        raise InvalidRequest(
            f"this model needs the embedding of an image, [batch, tokens, {width}], and got "
            f"{'none' if shape is None else list(shape)}: add CLIPVisionEncode's output with WanImageToVideo"
        )
    positions = config["pos_embed_seq_len"]
    if positions is not None and shape[1] > positions:
        raise InvalidRequest(
            f"this model takes the embeddings of a first and a last image, {positions} tokens, and got {shape[1]}: "
            "connect WanFirstLastFrameToVideo with no more than two"
        )
    return {_IMAGE_CONTEXT: shape[1]}
