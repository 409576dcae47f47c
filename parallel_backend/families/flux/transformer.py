"""Flux.1 (dev, schnell, Fill, Kontext) over diffusers' ``FluxTransformer2DModel``."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...interfaces.family import AttentionSite, Block, Family, Inputs, Variant
from ...interfaces.geometry import IMAGE, LATENT, TEXT, TIMESTEP, AttentionKind, Extent, Geometry, Shapes
from ...interfaces.state import State
from ...interfaces.tensor_cuts import Cuts
from ..shared import joint_attention
from ..shared.patchify import check_concat, check_reference, check_text, check_vector, to_latent, to_tokens
from ..shared.streams import at_least_one

_PATCH = (2, 2)
"""Flux packs patches into channels before its module, whose own ``patch_size`` is 1."""

_AXES = 3
"""Numbers in a position: image, row, column."""


class Flux(Family):
    """Flux.1 in three parts.

    Inputs, batch first: the latent ``[B, 16, H, W]``, the timestep ``[B]`` in 0..1, and

    - ``encoder_hidden_states`` ``[B, L, D]``: text from T5;
    - ``pooled_projections`` ``[B, D]``: pooled text from CLIP;
    - ``guidance`` ``[B]``: for models distilled with guidance;
    - ``concat`` ``[B, C, H, W]``: for Fill, the masked image's latent and the mask, in additional channels;
    - ``reference`` ``[B, N, 64]`` and ``reference_ids`` ``[B, N, 3]``: for Kontext, the tokens of reference images and
      their positions. They follow the latent's tokens.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 64,
        "out_channels": None,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": False,
    }
    first_layer: ClassVar[str] = "x_embedder"
    values_alive: ClassVar[float] = 18.3
    teacache: ClassVar[tuple[float, ...]] = (498.651651, -283.781631, 55.8554382, -3.82021401, 0.264230861)
    required: ClassVar[tuple[str, ...]] = ("encoder_hidden_states", "pooled_projections")
    optional: ClassVar[tuple[str, ...]] = ("guidance", "concat", "reference", "reference_ids")
    time_factor: ClassVar[float] = 1000.0
    """What the timestep is multiplied by before it is embedded."""

    @staticmethod
    def _describe(config: Mapping[str, Any]) -> Geometry:
        heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
        double, single = config["num_layers"], config["num_single_layers"]
        channels = (config["out_channels"] or config["in_channels"]) // math.prod(_PATCH)
        return Geometry(
            channels=channels,
            out_channels=channels,
            patch=_PATCH,
            layers=double + single,
            sites=(AttentionKind(streams=(TEXT, IMAGE), heads=heads, head_dim=head_dim, count=double + single),),
            all_reduces=joint_attention.all_reduces(
                (TEXT, IMAGE), heads * head_dim, double=double, single=single, padded_stream=IMAGE
            ),
        )

    @staticmethod
    def _cuts(config: Mapping[str, Any]) -> Cuts:
        heads = (config["num_attention_heads"], config["attention_head_dim"])
        return joint_attention.cuts(heads, (4 * math.prod(heads), 1))

    @staticmethod
    def _extent(config: Mapping[str, Any], geometry: Geometry, shapes: Shapes) -> Extent:
        latent = shapes[LATENT]
        text = check_text(shapes["encoder_hidden_states"], config["joint_attention_dim"])
        check_vector("pooled_projections", shapes["pooled_projections"], config["pooled_projection_dim"])
        joint_attention.check_guidance("Flux", config, shapes)
        extra_channels = config["in_channels"] // math.prod(_PATCH) - geometry.channels
        check_concat(extra_channels, shapes, "InpaintModelConditioning")
        values = geometry.out_channels * math.prod(_PATCH)
        image = math.prod(geometry.grid(latent[2:])) + check_reference(shapes, values, _AXES)
        return Extent(streams={TEXT: text, IMAGE: image}, values=values)

    def blocks_and_sites(self) -> tuple[list[Block], list[AttentionSite]]:
        double, single = self.module.transformer_blocks, self.module.single_transformer_blocks
        blocks = [Block(run=partial(_run, layer), modules=(layer,), parts=2) for layer in double]
        blocks += [Block(run=partial(_run, layer), modules=(layer,)) for layer in single]
        layers = [*double, *single]
        return blocks, [AttentionSite(module=layer.attn, streams=(TEXT, IMAGE)) for layer in layers]

    def image(self, inputs: Mapping[str, Tensor]) -> Tensor:
        tokens: Tensor = self.module.x_embedder(self._tokens(inputs)[0])
        return tokens

    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        """As in ComfyUI, the latent is padded to whole patches, the timestep stays float32, and guidance times 1000 is
        rounded to the model's dtype.
        """
        module, text = self.module, inputs["encoder_hidden_states"].to(self.dtype)
        _, image_ids = self._tokens(inputs)
        times = [inputs[TIMESTEP].float() * self.time_factor]
        if "guidance" in inputs:
            times.append(inputs["guidance"].to(self.dtype) * 1000)
        pooled = inputs["pooled_projections"].to(self.dtype)
        temb = module.time_text_embed(*times, pooled)
        tables = {TEXT: image_ids.new_zeros(text.shape[1], _AXES), IMAGE: image_ids}
        return State(
            streams={TEXT: module.context_embedder(text), IMAGE: self.image(inputs)},
            tables={name: joint_attention.rope(module.pos_embed, ids) for name, ids in tables.items()},
            context={"temb": temb},
        )

    def head(self, state: State) -> Tensor:
        prediction: Tensor = self.module.proj_out(self.module.norm_out(state.streams[IMAGE], state.context["temb"]))
        return prediction

    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        """Drop the tokens after the latent's."""
        latent_tokens = math.prod(self.geometry.grid(size))
        return to_latent(tokens[:, :latent_tokens], size, self.geometry, "c ph pw")

    def stock(self, inputs: Mapping[str, Tensor]) -> Tensor:
        tokens, image_ids = self._tokens(inputs)
        text = inputs["encoder_hidden_states"]
        out: Tensor = self.module(
            hidden_states=tokens,
            encoder_hidden_states=text.to(self.dtype),
            pooled_projections=inputs["pooled_projections"].to(self.dtype),
            timestep=inputs[TIMESTEP] * (self.time_factor / 1000),
            img_ids=image_ids,
            txt_ids=image_ids.new_zeros(text.shape[1], _AXES),
            guidance=inputs.get("guidance"),
            return_dict=False,
        )[0]
        return self.unpatchify(out, inputs[LATENT].shape[2:])

    def _tokens(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return packed tokens ``[B, S, 4C]`` and their positions ``[S, 3]``."""
        latent = inputs[LATENT]
        latents = [inputs[name] for name in (LATENT, "concat") if name in inputs]
        tokens = torch.cat([to_tokens(part.to(self.dtype), _PATCH, "c ph pw") for part in latents], dim=2)
        ids = joint_attention.positions(latent, self.geometry.grid(latent.shape[2:]), _AXES)
        return joint_attention.with_reference(tokens, ids, inputs)

    @staticmethod
    def variants() -> dict[str, Variant]:
        small = {
            "num_layers": 2, "num_single_layers": 2, "num_attention_heads": 24, "attention_head_dim": 16,
            "joint_attention_dim": 64, "pooled_projection_dim": 32, "axes_dims_rope": (4, 6, 6),
        }  # fmt: skip
        text: Inputs = {
            "encoder_hidden_states": ("text", "joint_attention_dim"), "pooled_projections": ("pooled_projection_dim",),
        }  # fmt: skip
        dev: Inputs = {**text, "guidance": ()}
        return {
            "schnell": Variant(config=small, size=(9, 14), text=7, inputs=text),
            "dev": Variant(config={**small, "guidance_embeds": True}, size=(9, 14), text=7, inputs=dev),
            "fill": Variant(
                config={**small, "guidance_embeds": True, "in_channels": 384, "out_channels": 64},
                size=(9, 14), text=7, inputs={**dev, "concat": (80, "size")},
            ),
            "kontext": Variant(
                config={**small, "guidance_embeds": True}, size=(9, 14), text=7,
                inputs={**dev, "reference": (12, 64), "reference_ids": (12, _AXES)},
            ),
        }  # fmt: skip


def _run(layer: nn.Module, state: State) -> State:
    text, image = state.streams[TEXT], state.streams[IMAGE]
    tables = [(state.tables[TEXT][name], at_least_one(state.tables[IMAGE][name])) for name in ("cos", "sin")]
    text, out = layer(
        hidden_states=at_least_one(image),
        encoder_hidden_states=text,
        temb=state.context["temb"],
        image_rotary_emb=tuple(torch.cat(both, dim=1)[0] for both in tables),
    )
    return state.with_streams(**{TEXT: text, IMAGE: out[:, : image.shape[1]]})
