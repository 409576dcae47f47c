"""Krea-2 (Raw and Turbo) over diffusers' ``Krea2Transformer2DModel``."""

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
from ...interfaces.tensor_cuts import ColumnParallel, Cuts, HeadCounts, RowParallel, attention_cuts
from ..shared import joint_attention
from ..shared.patchify import check_mask, check_reference, to_latent, to_tokens
from ..shared.streams import TEXT_MASK, at_least_one

_PATCH = (1, 2, 2)
"""Krea-2 packs patches into channels before its module."""

_AXES = 3
"""Numbers in a position: image, row, column."""

_REFERENCE_TIMESTEP = "reference_timestep"


class Krea2(Family):
    """Krea-2 in three parts. One stream of layers sees text and image; layers for the text alone come before them.

    Inputs, batch first: the latent ``[B, 16, 1, H, W]``, the timestep ``[B]`` in 0..1, and

    - ``encoder_hidden_states`` ``[B, L, N, D]``: the text, from N layers of its encoder;
    - ``encoder_hidden_states_mask`` ``[B, L]``: True for text tokens that count. Without it all tokens count;
    - ``reference`` ``[B, R, 64]`` and ``reference_ids`` ``[B, R, 3]``: packed tokens of reference images and their
      positions;
    - ``reference_timestep`` ``[B]``: the references' own timestep. Without it they have that of the latent.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 64,
        "num_layers": 28,
        "attention_head_dim": 128,
        "num_attention_heads": 48,
        "num_key_value_heads": 12,
        "intermediate_size": 16384,
        "text_hidden_dim": 2560,
        "num_text_layers": 12,
    }
    first_layer: ClassVar[str] = "img_in"
    values_alive: ClassVar[float] = 14.2
    required: ClassVar[tuple[str, ...]] = ("encoder_hidden_states",)
    optional: ClassVar[tuple[str, ...]] = (TEXT_MASK, "reference", "reference_ids", _REFERENCE_TIMESTEP)

    @staticmethod
    def _describe(config: Mapping[str, Any]) -> Geometry:
        heads, head_dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
        channels = config["in_channels"] // math.prod(_PATCH)
        attention = AttentionKind(
            streams=(TEXT, IMAGE), heads=heads, head_dim=head_dim, count=layers, key_heads=_key_heads(config)
        )
        return Geometry(
            channels=channels,
            out_channels=channels,
            patch=_PATCH,
            layers=layers,
            sites=(attention,),
            all_reduces=joint_attention.all_reduces(
                (TEXT, IMAGE), heads * head_dim, double=layers, single=0, padded_stream=IMAGE
            ),
        )

    @staticmethod
    def _cuts(config: Mapping[str, Any]) -> Cuts:
        heads, head_dim, groups = config["num_attention_heads"], config["attention_head_dim"], _key_heads(config)
        shared_by, hidden = heads // groups, ((config["intermediate_size"], 1),)
        attention, ff = "transformer_blocks.*.attn", "transformer_blocks.*.ff"
        return {
            **attention_cuts(attention, heads, head_dim, key_heads=groups),
            attention: HeadCounts({"num_heads": (groups, shared_by), "num_kv_heads": (groups, 1)}),
            f"{attention}.to_gate": ColumnParallel(((groups, shared_by * head_dim),)),
            f"{ff}.gate": ColumnParallel(hidden),
            f"{ff}.up": ColumnParallel(hidden),
            f"{ff}.down": RowParallel(hidden),
        }

    @staticmethod
    def _extent(config: Mapping[str, Any], geometry: Geometry, shapes: Shapes) -> Extent:
        text = _check_text(shapes["encoder_hidden_states"], config)
        check_mask(TEXT_MASK, shapes, text)
        frames = shapes[LATENT][2]
        if frames != 1:
            raise InvalidRequest(f"a latent of {frames} frames: Krea-2 makes single images, so 1 frame would work")
        references = check_reference(shapes, config["in_channels"], _AXES)
        _check_reference_timestep(shapes, references)
        image = math.prod(geometry.grid(shapes[LATENT][2:])) + references
        return Extent(streams={TEXT: text, IMAGE: image}, values=config["in_channels"])

    def blocks_and_sites(self) -> tuple[list[Block], list[AttentionSite]]:
        layers = self.module.transformer_blocks
        repeats = self.config["num_attention_heads"] // _key_heads(self.config)
        blocks = [Block(run=partial(_run, layer), modules=(layer,)) for layer in layers]
        return blocks, [AttentionSite(module=each.attn, streams=(TEXT, IMAGE), repeats=repeats) for each in layers]

    def image(self, inputs: Mapping[str, Tensor]) -> Tensor:
        tokens: Tensor = self.module.img_in(self._tokens(inputs)[0])
        return tokens

    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        """As in ComfyUI, the latent is padded to whole patches, and the timestep stays float32."""
        image, (_, ids) = self.image(inputs), self._tokens(inputs)
        text, mask = inputs["encoder_hidden_states"], inputs.get(TEXT_MASK)
        tables = {
            TEXT: joint_attention.rope(self.module.rotary_emb, ids.new_zeros(text.shape[1], _AXES)),
            IMAGE: joint_attention.rope(self.module.rotary_emb, ids),
        }
        temb, modulation = self._modulation(inputs[TIMESTEP])
        context = {"temb": temb, "modulation": modulation}
        if _REFERENCE_TIMESTEP in inputs:
            context["reference_modulation"] = self._modulation(inputs[_REFERENCE_TIMESTEP])[1]
            places = torch.arange(image.shape[1], device=image.device)
            tables[IMAGE]["is_reference"] = (places >= image.shape[1] - inputs["reference"].shape[1])[None]
        return State(
            streams={TEXT: self._fused(text, mask), IMAGE: image},
            tables=tables,
            masks={} if mask is None else {TEXT: mask.bool()},
            context=context,
        )

    def _fused(self, text: Tensor, mask: Tensor | None) -> Tensor:
        """Run the text's own layers, which do not depend on time, so a run computes them once."""

        def compute() -> Tensor:
            keys = None if mask is None else mask.bool()[:, None, None]
            out: Tensor = self.module.txt_in(self.module.text_fusion(text.to(self.dtype), attention_mask=keys))
            return out

        return self.once(TEXT, (text, mask), compute)

    def head(self, state: State) -> Tensor:
        prediction: Tensor = self.module.final_layer(state.streams[IMAGE], state.context["temb"])
        return prediction

    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        """Drop the tokens after the latent's."""
        latent_tokens = math.prod(self.geometry.grid(size))
        return to_latent(tokens[:, :latent_tokens], size, self.geometry, "c pt ph pw")

    def stock(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """diffusers' own forward knows no other timestep for references."""
        (tokens, ids), text = self._tokens(inputs), inputs["encoder_hidden_states"].to(self.dtype)
        out: Tensor = self.module(
            hidden_states=tokens,
            encoder_hidden_states=text,
            timestep=inputs[TIMESTEP],
            position_ids=torch.cat([ids.new_zeros(text.shape[1], _AXES), ids]),
            encoder_attention_mask=inputs[TEXT_MASK].bool() if TEXT_MASK in inputs else None,
            return_dict=False,
        )[0]
        return self.unpatchify(out, inputs[LATENT].shape[2:])

    def _tokens(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return packed tokens ``[B, S, 64]`` of the latent and the references, and their positions ``[S, 3]``."""
        latent = inputs[LATENT]
        tokens = to_tokens(latent.to(self.dtype), _PATCH, "c pt ph pw")
        ids = joint_attention.positions(latent, self.geometry.grid(latent.shape[2:])[1:], _AXES)
        return joint_attention.with_reference(tokens, ids, inputs)

    def _modulation(self, timestep: Tensor) -> tuple[Tensor, Tensor]:
        """Return a timestep's embedding ``[B, 1, D]`` and the modulation of all blocks ``[B, 1, 6 * D]``."""
        temb = self.module.time_embed(timestep.float(), dtype=self.dtype)
        return temb, self.module.time_mod_proj(nn.functional.gelu(temb, approximate="tanh"))

    @staticmethod
    def variants() -> dict[str, Variant]:
        small = {
            "num_layers": 2, "num_attention_heads": 48, "num_key_value_heads": 12, "attention_head_dim": 8,
            "intermediate_size": 403, "axes_dims_rope": (4, 2, 2), "text_hidden_dim": 40, "num_text_layers": 3,
            "text_intermediate_size": 56, "timestep_embed_dim": 32,
        }  # fmt: skip
        text: Inputs = {"encoder_hidden_states": ("text", "num_text_layers", "text_hidden_dim")}
        references: Inputs = {"reference": (12, 64), "reference_ids": (12, _AXES)}
        return {
            "image": Variant(config=small, size=(1, 9, 13), text=7, inputs=text),
            "masked": Variant(config=small, size=(1, 9, 13), text=7, inputs={**text, TEXT_MASK: ("text",)}),
            "references": Variant(config=small, size=(1, 9, 13), text=7, inputs={**text, **references}),
        }  # fmt: skip


def _run(layer: nn.Module, state: State) -> State:
    text, image = state.streams[TEXT], state.streams[IMAGE]
    tables = [(state.tables[TEXT][name], at_least_one(state.tables[IMAGE][name])) for name in ("cos", "sin")]
    out = layer(
        torch.cat([text, at_least_one(image)], dim=1),
        _modulation_of_tokens(state),
        tuple(torch.cat(both, dim=1)[0] for both in tables),
    )
    start = text.shape[1]
    return state.with_streams(**{TEXT: out[:, :start], IMAGE: out[:, start : start + image.shape[1]]})


def _modulation_of_tokens(state: State) -> Tensor:
    """Return the modulation of all tokens ``[B, 1, 6 * D]``, or where references have another, ``[B, S, 6 * D]``."""
    modulation = state.context["modulation"]
    if "reference_modulation" not in state.context:
        return modulation
    is_reference = at_least_one(state.tables[IMAGE]["is_reference"])
    of_text = is_reference.new_zeros(1, state.streams[TEXT].shape[1])
    places = torch.cat([of_text, is_reference], dim=1)[..., None]
    return torch.where(places, state.context["reference_modulation"], modulation)


def _key_heads(config: Mapping[str, Any]) -> int:
    key_heads: int | None = config["num_key_value_heads"]
    return config["num_attention_heads"] if key_heads is None else key_heads


def _check_text(shape: tuple[int, ...], config: Mapping[str, Any]) -> int:
    """Check the shape of a text and return the number of its tokens."""
    layers = (config["num_text_layers"], config["text_hidden_dim"])
    if len(shape) != 4 or shape[1] < 1 or shape[2:] != layers:
        raise InvalidRequest(
            f"conditioning of shape {list(shape)} does not fit this model, which takes {layers[0]} layers of its text "
            f"encoder, [batch, tokens, {layers[0]}, {layers[1]}]"
        )
    return shape[1]


def _check_reference_timestep(shapes: Shapes, references: int) -> None:
    shape = shapes.get(_REFERENCE_TIMESTEP)
    if shape is not None and (len(shape) != 1 or not references):
        raise InvalidRequest(
            f"{_REFERENCE_TIMESTEP} of shape {list(shape)} beside {references} tokens of references does not fit: "
            "[batch] beside a reference would work"
        )
