"""Chroma over diffusers' ``ChromaTransformer2DModel``."""

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
from ..shared.patchify import check_text, to_latent, to_tokens
from ..shared.streams import at_least_one

_PATCH = (2, 2)
"""Chroma packs patches into channels before its module, whose own ``patch_size`` is 1."""

_AXES = 3
"""Numbers in a position: image, row, column."""

_SINGLE, _DOUBLE = 3, 6
"""Modulation vectors of a single block, and of each stream of a double block: shifts, scales and gates."""


class Chroma(Family):
    """Chroma in three parts. A small network makes the modulation of all blocks from time and guidance.

    Inputs, batch first: the latent ``[B, 16, H, W]``, the timestep ``[B]`` in 0..1, and

    - ``encoder_hidden_states`` ``[B, L, D]``: text from T5. All tokens count, also padding;
    - ``guidance`` ``[B]``: ComfyUI's second input of the network, beside the time; 0 by default, as in diffusers.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 64,
        "out_channels": None,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
    }
    first_layer: ClassVar[str] = "x_embedder"
    values_alive: ClassVar[float] = 18.5
    required: ClassVar[tuple[str, ...]] = ("encoder_hidden_states",)
    optional: ClassVar[tuple[str, ...]] = ("guidance",)

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
        text = check_text(shapes["encoder_hidden_states"], config["joint_attention_dim"])
        if len(shapes.get("guidance", (1,))) != 1:
            raise InvalidRequest(f"guidance of shape {list(shapes['guidance'])}: [batch] is needed")
        image = math.prod(geometry.grid(shapes[LATENT][2:]))
        return Extent(streams={TEXT: text, IMAGE: image}, values=geometry.out_channels * math.prod(_PATCH))

    def blocks_and_sites(self) -> tuple[list[Block], list[AttentionSite]]:
        """The order of the vectors: single blocks, then all images, then all texts."""
        double, single = self.module.transformer_blocks, self.module.single_transformer_blocks
        images = _SINGLE * len(single)
        texts = images + _DOUBLE * len(double)
        blocks = []
        for i, layer in enumerate(double):
            spans = (_span(images + _DOUBLE * i, _DOUBLE), _span(texts + _DOUBLE * i, _DOUBLE))
            blocks.append(Block(run=partial(_run_double, layer, spans), modules=(layer,), parts=2))
        for i, layer in enumerate(single):
            span = _span(_SINGLE * i, _SINGLE)
            blocks.append(Block(run=partial(_run_single, layer, span), modules=(layer,)))
        return blocks, [AttentionSite(module=layer.attn, streams=(TEXT, IMAGE)) for layer in [*double, *single]]

    def image(self, inputs: Mapping[str, Tensor]) -> Tensor:
        tokens: Tensor = self.module.x_embedder(to_tokens(inputs[LATENT].to(self.dtype), _PATCH, "c ph pw"))
        return tokens

    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        """As in ComfyUI, the latent is padded to whole patches, and the timestep stays float32."""
        module, text = self.module, inputs["encoder_hidden_states"].to(self.dtype)
        image_ids = self._image_ids(inputs)
        tables = {TEXT: image_ids.new_zeros(text.shape[1], _AXES), IMAGE: image_ids}
        return State(
            streams={TEXT: module.context_embedder(text), IMAGE: self.image(inputs)},
            tables={name: joint_attention.rope(module.pos_embed, ids) for name, ids in tables.items()},
            context={"modulation": self._modulation(inputs)},
        )

    def head(self, state: State) -> Tensor:
        modulation = state.context["modulation"][:, -2:]
        prediction: Tensor = self.module.proj_out(self.module.norm_out(state.streams[IMAGE], modulation))
        return prediction

    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        return to_latent(tokens, size, self.geometry, "c ph pw")

    def stock(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """diffusers' own forward knows no guidance."""
        image_ids, text = self._image_ids(inputs), inputs["encoder_hidden_states"]
        out: Tensor = self.module(
            hidden_states=to_tokens(inputs[LATENT].to(self.dtype), _PATCH, "c ph pw"),
            encoder_hidden_states=text.to(self.dtype),
            timestep=inputs[TIMESTEP],
            img_ids=image_ids,
            txt_ids=image_ids.new_zeros(text.shape[1], _AXES),
            return_dict=False,
        )[0]
        return self.unpatchify(out, inputs[LATENT].shape[2:])

    def _modulation(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the modulation vectors of all blocks, and the head's two at the end, ``[B, vectors, D]``."""
        times, embedding = inputs[TIMESTEP].float(), self.module.time_text_embed
        guidance = inputs.get("guidance", torch.zeros_like(times)).float()
        scalars = [embedding.time_proj(times * 1000), embedding.guidance_proj(guidance * 1000)]
        numbers = embedding.mod_proj.to(self.dtype).expand(len(times), -1, -1)
        both = torch.cat(scalars, dim=1).to(self.dtype)[:, None].expand(-1, numbers.shape[1], -1)
        vectors: Tensor = self.module.distilled_guidance_layer(torch.cat([both, numbers], dim=2))
        return vectors

    def _image_ids(self, inputs: Mapping[str, Tensor]) -> Tensor:
        latent = inputs[LATENT]
        return joint_attention.positions(latent, self.geometry.grid(latent.shape[2:]), _AXES)

    @staticmethod
    def variants() -> dict[str, Variant]:
        small = {
            "num_layers": 2, "num_single_layers": 2, "num_attention_heads": 24, "attention_head_dim": 16,
            "joint_attention_dim": 64, "axes_dims_rope": (4, 6, 6), "approximator_num_channels": 64,
            "approximator_hidden_dim": 48, "approximator_layers": 2,
        }  # fmt: skip
        text: Inputs = {"encoder_hidden_states": ("text", "joint_attention_dim")}
        return {"image": Variant(config=small, size=(9, 14), text=7, inputs=text)}


def _span(start: int, length: int) -> slice:
    return slice(start, start + length)


def _tables(state: State) -> tuple[Tensor, ...]:
    tables = [(state.tables[TEXT][name], at_least_one(state.tables[IMAGE][name])) for name in ("cos", "sin")]
    return tuple(torch.cat(both, dim=1)[0] for both in tables)


def _run_double(layer: nn.Module, spans: tuple[slice, ...], state: State) -> State:
    text, image = state.streams[TEXT], state.streams[IMAGE]
    text, out = layer(
        hidden_states=at_least_one(image),
        encoder_hidden_states=text,
        temb=torch.cat([state.context["modulation"][:, span] for span in spans], dim=1),
        image_rotary_emb=_tables(state),
    )
    return state.with_streams(**{TEXT: text, IMAGE: out[:, : image.shape[1]]})


def _run_single(layer: nn.Module, span: slice, state: State) -> State:
    text, image = state.streams[TEXT], state.streams[IMAGE]
    out = layer(
        hidden_states=torch.cat([text, at_least_one(image)], dim=1),
        temb=state.context["modulation"][:, span],
        image_rotary_emb=_tables(state),
    )
    start = text.shape[1]
    return state.with_streams(**{TEXT: out[:, :start], IMAGE: out[:, start : start + image.shape[1]]})
