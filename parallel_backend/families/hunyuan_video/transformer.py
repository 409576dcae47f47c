"""HunyuanVideo (text and image to video) over diffusers' ``HunyuanVideoTransformer3DModel``."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...errors import InvalidRequest
from ...interfaces.family import AttentionSite, Block, Family, Inputs, Variant
from ...interfaces.geometry import IMAGE, LATENT, TEXT, TIMESTEP, AttentionKind, Extent, Geometry, Shapes
from ...interfaces.state import State
from ...interfaces.tensor_cuts import Cuts
from ..shared import joint_attention
from ..shared.patchify import check_concat, check_mask, check_text, check_vector, crop, pad_to_patch, to_latent
from ..shared.streams import at_least_one

_REPLACE = "token_replace"
_CONDITIONS = (None, "latent_concat", _REPLACE)
_HEAD = "first in head"
"""The context's entry for a first frame that the last layer takes as one without noise."""


class HunyuanVideo(Family):
    """HunyuanVideo in three parts.

    Inputs, batch first: the latent ``[B, C, T, H, W]``, the timestep ``[B]`` in 0..1000, and

    - ``encoder_hidden_states`` ``[B, L, D]``: text from the language model;
    - ``pooled_projections`` ``[B, D]``: pooled text from CLIP;
    - ``encoder_attention_mask`` ``[B, L]``: True for text tokens that are not padding. Without it no token is padding;
    - ``mean_text`` ``[B, D]``: the mean text token that the text refiner takes. Without it, it is the mean of the
      tokens that are not padding, as in diffusers. ComfyUI takes the mean of all tokens;
    - ``guidance`` ``[B]``: for models distilled with guidance;
    - ``concat`` ``[B, C', T, H, W]``: an image's latent and a mask, for models that take more channels than they
      predict;
    - ``first_guidance`` ``[B]``: guidance of the first frame, for "token_replace" models. These models take the
      latent's first frame as an image without noise. diffusers gives that frame no guidance; ComfyUI does;
    - ``noisy_first_frame`` ``[B]``: 1 for samples of a "token_replace" model whose first frame has noise like the
      others, which makes it a text-to-video model; 0 for the others. Without it, no first frame has noise. With it,
      the last layer takes a first frame without noise as such, too, as in ComfyUI; in diffusers only the blocks do.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 16,
        "out_channels": 16,
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "num_layers": 20,
        "num_single_layers": 40,
        "mlp_ratio": 4.0,
        "patch_size": 2,
        "patch_size_t": 1,
        "guidance_embeds": True,
        "text_embed_dim": 4096,
        "pooled_projection_dim": 768,
        "image_condition_type": None,
    }
    first_layer: ClassVar[str] = "x_embedder"
    values_alive: ClassVar[float] = 19.1
    teacache: ClassVar[tuple[float, ...]] = (733.226126, -401.131952, 67.5869174, -3.149878, 0.0961237896)
    float16: ClassVar[bool] = False
    required: ClassVar[tuple[str, ...]] = ("encoder_hidden_states", "pooled_projections")
    optional: ClassVar[tuple[str, ...]] = (
        "encoder_attention_mask", "mean_text", "guidance", "first_guidance", "noisy_first_frame", "concat",
    )  # fmt: skip

    @staticmethod
    def _describe(config: Mapping[str, Any]) -> Geometry:
        if config["image_condition_type"] not in _CONDITIONS:
            raise InvalidRequest(
                f"HunyuanVideo with image_condition_type {config['image_condition_type']!r} is not supported: "
                "'latent_concat', 'token_replace' or null would work"
            )
        heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
        double, single = config["num_layers"], config["num_single_layers"]
        channels = config["out_channels"] or config["in_channels"]
        return Geometry(
            channels=channels,
            out_channels=channels,
            patch=(config["patch_size_t"], config["patch_size"], config["patch_size"]),
            layers=double + single,
            sites=(AttentionKind(streams=(IMAGE, TEXT), heads=heads, head_dim=head_dim, count=double + single),),
            all_reduces=joint_attention.all_reduces(
                (IMAGE, TEXT), heads * head_dim, double=double, single=single, padded_stream=TEXT
            ),
        )

    @staticmethod
    def _cuts(config: Mapping[str, Any]) -> Cuts:
        heads = (config["num_attention_heads"], config["attention_head_dim"])
        return joint_attention.cuts(heads, (int(math.prod(heads) * config["mlp_ratio"]), 1))

    @staticmethod
    def _extent(config: Mapping[str, Any], geometry: Geometry, shapes: Shapes) -> Extent:
        latent = shapes[LATENT]
        text = check_text(shapes["encoder_hidden_states"], config["text_embed_dim"])
        check_mask("encoder_attention_mask", shapes, text)
        check_vector("pooled_projections", shapes["pooled_projections"], config["pooled_projection_dim"])
        if "mean_text" in shapes:
            check_vector("mean_text", shapes["mean_text"], config["text_embed_dim"])
        joint_attention.check_guidance("HunyuanVideo", config, shapes)
        _check_first_frame(config, shapes)
        extra_channels = config["in_channels"] - geometry.channels
        check_concat(extra_channels, shapes, "HunyuanImageToVideo, guidance type v1 (concat)")
        image = math.prod(geometry.grid(latent[2:]))
        return Extent(streams={IMAGE: image, TEXT: text}, values=geometry.out_channels * math.prod(geometry.patch))

    def blocks_and_sites(self) -> tuple[list[Block], list[AttentionSite]]:
        double, single = self.module.transformer_blocks, self.module.single_transformer_blocks
        blocks = [Block(run=partial(_run, layer), modules=(layer,), parts=2) for layer in double]
        blocks += [Block(run=partial(_run, layer), modules=(layer,)) for layer in single]
        layers = [*double, *single]
        return blocks, [AttentionSite(module=layer.attn, streams=(IMAGE, TEXT)) for layer in layers]

    def image(self, inputs: Mapping[str, Tensor]) -> Tensor:
        tokens: Tensor = self.module.x_embedder(self._latent(inputs))
        return tokens

    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        """Pad the latent to whole patches, circularly. Every rank refines the whole text."""
        module, latent, mask = self.module, self._latent(inputs), inputs.get("encoder_attention_mask")
        timestep = inputs[TIMESTEP].float()
        cos, sin = module.rope(latent)
        pooled = inputs["pooled_projections"].to(self.dtype)
        temb, first = module.time_text_embed(timestep, pooled, self._guidance(inputs))
        if "first_guidance" in inputs:
            first = first + self._embed_guidance(inputs["first_guidance"].to(self.dtype) * 1000)
        text = self._text(inputs, timestep)
        tables = {"cos": cos[None], "sin": sin[None]}
        context = {"temb": temb}
        if "noisy_first_frame" in inputs:
            first = torch.where(inputs["noisy_first_frame"].bool()[:, None], temb, first)
            context[_HEAD] = first
        if first is not None:
            context["first"] = first
            # On the CPU, so that the blocks can count these tokens without waiting for the accelerator.
            per_frame = len(cos) // self.geometry.grid(latent.shape[2:])[0]
            tables["first"] = (torch.arange(len(cos)) < per_frame)[None]
        return State(
            streams={IMAGE: self.image(inputs), TEXT: text},
            tables={IMAGE: tables},
            masks={} if mask is None else {TEXT: mask.bool()},
            context=context,
        )

    def head(self, state: State) -> Tensor:
        image, context, norm_out = state.streams[IMAGE], state.context, self.module.norm_out
        if _HEAD in context:
            count = int(state.tables[IMAGE]["first"].sum())
            parts = (norm_out(image[:, :count], context[_HEAD]), norm_out(image[:, count:], context["temb"]))
            normed = torch.cat(parts, dim=1)
        else:
            normed = norm_out(image, context["temb"])
        prediction: Tensor = self.module.proj_out(normed)
        return prediction

    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        """Crop the padding."""
        return to_latent(tokens, size, self.geometry, "c pt ph pw")

    def stock(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """diffusers' own forward knows no ``first_guidance``, ``noisy_first_frame`` and ``mean_text``."""
        text = inputs["encoder_hidden_states"].to(self.dtype)
        mask = inputs.get("encoder_attention_mask")
        out: Tensor = self.module(
            hidden_states=self._latent(inputs),
            timestep=inputs[TIMESTEP].float(),
            encoder_hidden_states=text,
            encoder_attention_mask=text.new_ones(text.shape[:2], dtype=torch.bool) if mask is None else mask,
            pooled_projections=inputs["pooled_projections"].to(self.dtype),
            guidance=self._guidance(inputs),
            return_dict=False,
        )[0]
        return crop(out, inputs[LATENT].shape[2:])

    def _text(self, inputs: Mapping[str, Tensor], timestep: Tensor) -> Tensor:
        refiner, mask = self.module.context_embedder, inputs.get("encoder_attention_mask")
        text = inputs["encoder_hidden_states"].to(self.dtype)
        if "mean_text" not in inputs:
            refined: Tensor = refiner(text, timestep, mask)
            return refined
        temb = refiner.time_text_embed(timestep, inputs["mean_text"].to(self.dtype))
        refined = refiner.token_refiner(refiner.proj_in(text), temb, mask)
        return refined

    def _guidance(self, inputs: Mapping[str, Tensor]) -> Tensor | None:
        """Return guidance times 1000, rounded to the model's dtype as in ComfyUI and in diffusers' pipeline."""
        return inputs["guidance"].to(self.dtype) * 1000 if "guidance" in inputs else None

    def _embed_guidance(self, guidance: Tensor) -> Tensor:
        embed = self.module.time_text_embed
        embedded: Tensor = embed.guidance_embedder(embed.time_proj(guidance).to(self.dtype))
        return embedded

    def _latent(self, inputs: Mapping[str, Tensor]) -> Tensor:
        latents = [inputs[name] for name in (LATENT, "concat") if name in inputs]
        return torch.cat([pad_to_patch(part.to(self.dtype), self.geometry.patch) for part in latents], dim=1)

    @staticmethod
    def variants() -> dict[str, Variant]:
        small = {
            "num_layers": 2, "num_single_layers": 2, "num_refiner_layers": 1, "num_attention_heads": 24,
            "attention_head_dim": 16, "text_embed_dim": 64, "pooled_projection_dim": 32, "rope_axes_dim": (4, 6, 6),
        }  # fmt: skip
        text: Inputs = {
            "encoder_hidden_states": ("text", "text_embed_dim"), "pooled_projections": ("pooled_projection_dim",),
        }  # fmt: skip
        guided: Inputs = {**text, "encoder_attention_mask": ("text",), "guidance": ()}
        size = (3, 9, 13)
        return {
            "t2v": Variant(config=small, size=size, text=7, inputs=guided),
            "i2v concat": Variant(
                config={**small, "in_channels": 33, "guidance_embeds": False, "image_condition_type": "latent_concat"},
                size=size, text=7, inputs={**text, "concat": (17, "size")},
            ),
            "i2v replace": Variant(
                config={**small, "image_condition_type": "token_replace"}, size=size, text=7, inputs=guided
            ),
        }  # fmt: skip


def _check_first_frame(config: Mapping[str, Any], shapes: Shapes) -> None:
    """Refuse inputs about the first frame that the model does not use."""
    replaces = config["image_condition_type"] == _REPLACE
    if "first_guidance" in shapes and not (config["guidance_embeds"] and replaces):
        raise InvalidRequest(
            "this HunyuanVideo transformer takes no first_guidance: only models with guidance_embeds and "
            f"image_condition_type {_REPLACE!r} use it"
        )
    if "noisy_first_frame" in shapes and not (replaces and len(shapes["noisy_first_frame"]) == 1):
        raise InvalidRequest(
            f"noisy_first_frame of shape {list(shapes['noisy_first_frame'])} cannot be used: models with "
            f"image_condition_type {_REPLACE!r} take [batch], and others take none"
        )


def _run(layer: nn.Module, state: State) -> State:
    tables, context = state.tables[IMAGE], state.context
    image, text = state.streams[IMAGE], state.streams[TEXT]
    text_tokens = text.shape[1]
    text = at_least_one(text)  # the layer cuts text off the end by a negative index, which fails for 0 tokens
    rope = (tables["cos"][0], tables["sin"][0]) if image.shape[1] else None  # diffusers cannot rotate 0 tokens
    first_frame = (context["first"], int(tables["first"].sum())) if "first" in tables else ()
    image, text = layer(image, text, context["temb"], None, rope, *first_frame)
    return state.with_streams(**{IMAGE: image, TEXT: text[:, :text_tokens]})
