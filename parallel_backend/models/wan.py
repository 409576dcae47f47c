"""Wan 2.1 and 2.2 (text and image to video) over diffusers' ``WanTransformer3DModel``."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..errors import InvalidRequest
from ..interfaces.family import AttentionSite, Block, Family, Inputs, Variant
from ..interfaces.geometry import IMAGE, LATENT, TIMESTEP, Extent, Geometry, Shapes, Site, Sum
from ..interfaces.state import State
from ..interfaces.tensor_cuts import ColumnParallel, Cuts, HeadsNorm, RowParallel, attention
from .shared.patchify import check_concat, check_text, crop, pad_to_patch, unfold

_DEFAULTS: dict[str, Any] = {
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
"""What ``WanTransformer3DModel`` takes for a number that its config leaves out."""

_TEXT = 512
"""Text tokens that diffusers' cross-attention expects behind those of an image."""

_SEEN = "image context"
"""An image's tokens in a state's context."""


class Wan(Family):
    """Inputs, batch first: the latent, the timestep ``[B]`` or one a latent frame ``[B, T]``, and

    - ``encoder_hidden_states`` ``[B, L, D]``;
    - ``encoder_hidden_states_image`` ``[B, L, D]`` where the model has an image embedder,
      which for a model of two images is that of both, or of one;
    - ``concat`` ``[B, C', T, H, W]``, the mask and the image's latent, where it takes more channels than it predicts;
    - ``frame_weights`` ``[B, T]``: by how much of a timestep ``[B]`` each frame is still noise (2.2's TI2V).
    """

    frame_timesteps: ClassVar[bool] = True
    required: ClassVar[tuple[str, ...]] = ("encoder_hidden_states",)
    optional: ClassVar[tuple[str, ...]] = ("encoder_hidden_states_image", "concat", "frame_weights")

    @staticmethod
    def describe(config: Mapping[str, Any]) -> Geometry:
        """See ``Family.describe``."""
        config = _DEFAULTS | dict(config)
        _check_embedder(config)
        heads, head_dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
        out_channels = config["out_channels"] or config["in_channels"]
        normed = [Sum(tokens=tokens, width=1, count=count * layers, itemsize=4) for tokens, count in _normed(config)]
        return Geometry(
            channels=out_channels,
            out_channels=out_channels,
            patch=tuple(config["patch_size"]),
            layers=layers,
            sites=(Site(streams=(IMAGE,), heads=heads, head_dim=head_dim, count=layers),),
            sums=(Sum(tokens=IMAGE, width=heads * head_dim, count=3 * layers), *normed),
            positions=config["rope_max_seq_len"],
        )

    @staticmethod
    def cuts(config: Mapping[str, Any]) -> Cuts:
        """See ``Family.cuts``."""
        config = _DEFAULTS | dict(config)
        heads, hidden = (config["num_attention_heads"], config["attention_head_dim"]), ((config["ffn_dim"], 1),)
        cuts = attention("blocks.*.attn1", *heads) | attention("blocks.*.attn2", *heads)
        cuts |= {f"blocks.*.attn{i}.norm_{x}": HeadsNorm(heads) for i in (1, 2) for x in "qk"}
        if config["added_kv_proj_dim"] is not None:
            cuts |= {f"blocks.*.attn2.add_{x}_proj": ColumnParallel((heads,)) for x in "kv"}
            cuts |= {"blocks.*.attn2.norm_added_k": HeadsNorm(heads)}
        return cuts | {"blocks.*.ffn.net.0.proj": ColumnParallel(hidden), "blocks.*.ffn.net.2": RowParallel(hidden)}

    @staticmethod
    def extent(config: Mapping[str, Any], shapes: Shapes) -> Extent:
        """See ``Family.extent``."""
        config = _DEFAULTS | dict(config)
        geometry, latent = Wan.describe(config), shapes[LATENT]
        text = check_text(shapes["encoder_hidden_states"], config["text_dim"])
        context = {"text": text} | _image_context(config, shapes)
        check_concat(config["in_channels"] - geometry.channels, shapes, "WanImageToVideo")
        weights = shapes.get("frame_weights")
        if weights is not None and weights[1:] != (latent[2],):
            raise InvalidRequest(f"frame_weights of shape {list(weights)}: the latent has {latent[2]} frames")
        values = geometry.out_channels * math.prod(geometry.patch)
        return Extent(streams={IMAGE: math.prod(geometry.grid(latent[2:]))}, values=values, context=context)

    def parts(self) -> tuple[list[Block], list[AttentionSite]]:
        """See ``Family.parts``."""
        layers = self.module.blocks
        blocks = [Block(run=self._modulate), *(Block(run=partial(_run, layer), modules=(layer,)) for layer in layers)]
        return blocks, [AttentionSite(module=layer.attn1, streams=(IMAGE,)) for layer in layers]

    @property
    def dtype(self) -> torch.dtype:
        """See ``Family.dtype``."""
        dtype: torch.dtype = self.module.patch_embedding.weight.dtype
        return dtype

    def image(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """See ``Family.image``."""
        tokens: Tensor = self.module.patch_embedding(self._latent(inputs))
        return tokens.flatten(2).transpose(1, 2).contiguous()

    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        """See ``Family.embed``. A latent that is no whole number of patches is padded as in ComfyUI."""
        module = self.module
        latent = self._latent(inputs)
        rope_cos, rope_sin = module.rope(latent)
        tables = {"rope_cos": rope_cos, "rope_sin": rope_sin}
        context = self._context(inputs)
        timestep = self._timestep(inputs)
        if timestep.ndim == 1:
            context |= self._time(timestep)
        else:
            tables["timestep"] = timestep.repeat_interleave(math.prod(self.geometry.grid(latent.shape[2:])[1:]), dim=1)
        return State(streams={IMAGE: self.image(inputs)}, tables={IMAGE: tables}, context=context)

    def head(self, state: State) -> Tensor:
        """See ``Family.head``."""
        module, tokens = self.module, state.streams[IMAGE]
        temb = state.context["temb"].unsqueeze(1) if "temb" in state.context else state.tables[IMAGE]["temb"]
        shift, scale = (module.scale_shift_table.unsqueeze(1) + temb.unsqueeze(2)).unbind(2)
        normed = (module.norm_out(tokens.float()) * (1 + scale) + shift).type_as(tokens)
        prediction: Tensor = module.proj_out(normed)
        return prediction

    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        """See ``Family.unpatchify``. What was padded is cropped."""
        return unfold(tokens, size, self.geometry, channels_last=True)

    def stock(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """See ``Family.stock``."""
        timestep = self._timestep(inputs)
        latent = self._latent(inputs)
        if timestep.ndim == 2:
            _, height, width = self.geometry.grid(latent.shape[2:])
            timestep = timestep.repeat_interleave(height * width, dim=1)
        image = inputs.get("encoder_hidden_states_image")
        if image is not None and self.module.condition_embedder.image_embedder.pos_embed is not None:
            image = image.unflatten(1, (2, -1)).flatten(0, 1)
        image = None if image is None else image.to(self.dtype)
        out: Tensor = self.module(
            hidden_states=latent,
            timestep=timestep,
            encoder_hidden_states=inputs["encoder_hidden_states"].to(self.dtype),
            encoder_hidden_states_image=image,
            return_dict=False,
        )[0]
        return crop(out, inputs[LATENT].shape[2:])

    def _latent(self, inputs: Mapping[str, Tensor]) -> Tensor:
        parts = [inputs[LATENT], *([inputs["concat"]] if "concat" in inputs else [])]
        return torch.cat([pad_to_patch(part.to(self.dtype), self.geometry.patch) for part in parts], dim=1)

    @staticmethod
    def variants() -> dict[str, Variant]:
        """See ``Family.variants``."""
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
        return {"text": text} if image is None else {"text": text, _SEEN: self._seen(image.to(self.dtype))}

    def _seen(self, image: Tensor) -> Tensor:
        """An image's tokens ``[B, L, D]``. Where two images have places, one alone takes the first, as in ComfyUI."""
        embedder, length = self.module.condition_embedder.image_embedder, image.shape[1]
        if embedder.pos_embed is not None:  # diffusers wants the two as two samples
            image = pad(image, (0, 0, 0, embedder.pos_embed.shape[1] - length)).unflatten(1, (2, -1)).flatten(0, 1)
        tokens: Tensor = embedder(image)
        return tokens[:, :length]

    @staticmethod
    def _timestep(inputs: Mapping[str, Tensor]) -> Tensor:
        """``[B]``, or ``[B, T]`` where it is given so, with the weights in it, or where there are weights."""
        timestep = inputs[TIMESTEP].float()
        weighed = timestep.ndim == 1 and "frame_weights" in inputs
        return timestep[:, None] * inputs["frame_weights"].float() if weighed else timestep

    def _time(self, timestep: Tensor) -> dict[str, Tensor]:
        """Timesteps ``[...]`` to their embedding ``[..., D]`` and the blocks' modulation ``[..., 6, D]``."""
        embedder = self.module.condition_embedder
        wave = embedder.timesteps_proj(timestep.flatten()).unflatten(0, timestep.shape)
        dtype = next(iter(embedder.time_embedder.parameters())).dtype
        temb = embedder.time_embedder(wave.to(dtype)).to(self.dtype)
        return {"temb": temb, "modulation": embedder.time_proj(embedder.act_fn(temb)).unflatten(-1, (6, -1))}

    def _modulate(self, state: State) -> State:
        """Embed the own tokens' timesteps, where they have each their own."""
        tables = state.tables[IMAGE]
        if "timestep" not in tables:
            return state
        return replace(state, tables={IMAGE: {**tables, **self._time(tables["timestep"])}})


class _Beside:
    """An image's and a text's tokens in the place of one tensor with both, for a text of any length.

    diffusers' cross-attention cuts that tensor in two, 512 tokens before its end. ComfyUI's texts may be longer.
    """

    def __init__(self, image: Tensor, text: Tensor) -> None:
        images = image.shape[1]
        self.shape = (len(text), images + _TEXT, text.shape[2])
        self._parts = {(None, images): image, (images, None): text}

    def __getitem__(self, cut: tuple[slice, slice]) -> Tensor:
        return self._parts[cut[1].start, cut[1].stop]


def _run(block: nn.Module, state: State) -> State:
    tables = state.tables[IMAGE]
    modulation = state.context.get("modulation", tables.get("modulation"))
    rope = (tables["rope_cos"], tables["rope_sin"])
    text: Any = state.context["text"]
    if _SEEN in state.context:
        text = _Beside(state.context[_SEEN], text)
    return state.with_streams(**{IMAGE: block(state.streams[IMAGE], text, modulation, rope)})


def _check_embedder(config: Mapping[str, Any]) -> None:
    width, added = config["image_dim"], config["added_kv_proj_dim"]
    if (width is None) != (added is None):
        raise InvalidRequest(
            f"a Wan transformer with image_dim {width} and added_kv_proj_dim {added} is not supported: both or neither "
            "would work"
        )


def _normed(config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """How many norms over all heads a layer has for which tokens."""
    return [(IMAGE, 3), ("text", 1), *([(_SEEN, 1)] if config["added_kv_proj_dim"] is not None else [])]


def _image_context(config: Mapping[str, Any], shapes: Shapes) -> dict[str, int]:
    """The tokens of an image embedding, where the model takes one."""
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
    places = config["pos_embed_seq_len"]
    if places is not None and shape[1] > places:
        raise InvalidRequest(
            f"this model takes the embeddings of a first and a last image, {places} tokens, and got {shape[1]}: "
            "connect WanFirstLastFrameToVideo with no more than two"
        )
    return {_SEEN: shape[1]}
