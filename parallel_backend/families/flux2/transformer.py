"""Flux.2 (dev, klein) over diffusers' ``Flux2Transformer2DModel``."""

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
from ..shared.patchify import check_reference, check_text, to_latent, to_tokens
from ..shared.streams import at_least_one

_PATCH = (1, 1)
"""A token is one pixel of the latent: the VAE already packs patches into the latent's channels."""

_POSITION_AXES = 4
"""Numbers in a position: image, row, column, index in the text."""


class Flux2(Family):
    """Flux.2 in three parts.

    Inputs, batch first: the latent ``[B, 128, H, W]``, the timestep ``[B]`` in 0..1, and

    - ``encoder_hidden_states`` ``[B, L, D]``: text. ComfyUI pads it with zeros at the front, and these count as tokens;
    - ``guidance`` ``[B]``: for models distilled with guidance;
    - ``reference`` ``[B, N, 128]`` and ``reference_ids`` ``[B, N, 4]``: the tokens of reference images and their
      positions. They follow the latent's tokens.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "patch_size": 1,
        "in_channels": 128,
        "out_channels": None,
        "num_layers": 8,
        "num_single_layers": 48,
        "attention_head_dim": 128,
        "num_attention_heads": 48,
        "joint_attention_dim": 15360,
        "mlp_ratio": 3.0,
        "guidance_embeds": True,
    }
    first_layer: ClassVar[str] = "x_embedder"
    values_alive: ClassVar[float] = 23.2
    required: ClassVar[tuple[str, ...]] = ("encoder_hidden_states",)
    optional: ClassVar[tuple[str, ...]] = ("guidance", "reference", "reference_ids")

    @staticmethod
    def _describe(config: Mapping[str, Any]) -> Geometry:
        channels, out_channels = config["in_channels"], config["out_channels"] or config["in_channels"]
        if config["patch_size"] != 1 or channels != out_channels:
            raise InvalidRequest(
                f"a Flux.2 transformer with patch_size {config['patch_size']}, in_channels {channels} and out_channels "
                f"{out_channels} is not supported: patch_size 1 with out_channels equal to in_channels would work"
            )
        heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
        double, single = config["num_layers"], config["num_single_layers"]
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
        hidden = (int(math.prod(heads) * config["mlp_ratio"]), 1)
        cuts = attention_cuts("transformer_blocks.*.attn", *heads, text=True)
        cuts |= {"transformer_blocks.*.attn.to_add_out": RowParallel((heads,))}
        for name in ("ff", "ff_context"):
            cuts |= {f"transformer_blocks.*.{name}.linear_in": ColumnParallel((hidden, hidden))}
            cuts |= {f"transformer_blocks.*.{name}.linear_out": RowParallel((hidden,))}
        single = "single_transformer_blocks.*.attn"
        cuts |= {single: HeadCounts({"heads": (heads[0], 1), "inner_dim": heads, "mlp_hidden_dim": hidden})}
        cuts |= {f"{single}.to_qkv_mlp_proj": ColumnParallel((heads, heads, heads, hidden, hidden))}
        return cuts | {f"{single}.to_out": RowParallel((heads, hidden))}

    @staticmethod
    def _extent(config: Mapping[str, Any], geometry: Geometry, shapes: Shapes) -> Extent:
        latent = shapes[LATENT]
        text = check_text(shapes["encoder_hidden_states"], config["joint_attention_dim"])
        joint_attention.check_guidance("Flux.2", config, shapes)
        reference = check_reference(shapes, geometry.channels, _POSITION_AXES)
        image = math.prod(geometry.grid(latent[2:])) + reference
        return Extent(streams={TEXT: text, IMAGE: image}, values=geometry.out_channels)

    def blocks_and_sites(self) -> tuple[list[Block], list[AttentionSite]]:
        double, single = self.module.transformer_blocks, self.module.single_transformer_blocks
        blocks = [Block(run=partial(_run_double, layer), modules=(layer,), parts=2) for layer in double]
        blocks += [Block(run=partial(_run_single, layer), modules=(layer,)) for layer in single]
        return blocks, [AttentionSite(module=layer.attn, streams=(TEXT, IMAGE)) for layer in (*double, *single)]

    def image(self, inputs: Mapping[str, Tensor]) -> Tensor:
        tokens: Tensor = self.module.x_embedder(self._tokens(inputs)[0])
        return tokens

    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        """All double blocks share one modulation, and so do all single blocks."""
        module, text = self.module, inputs["encoder_hidden_states"].to(self.dtype)
        _, image_ids = self._tokens(inputs)
        temb, tables = self._time(inputs), {TEXT: _text_ids(text), IMAGE: image_ids}
        return State(
            streams={TEXT: module.context_embedder(text), IMAGE: self.image(inputs)},
            tables={name: joint_attention.rope(module.pos_embed, ids) for name, ids in tables.items()},
            context={
                "temb": temb,
                "double image": module.double_stream_modulation_img(temb),
                "double text": module.double_stream_modulation_txt(temb),
                "single": module.single_stream_modulation(temb),
            },
        )

    def _time(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Run ``time_guidance_embed`` as ComfyUI does.

        The timestep stays float32, and guidance times 1000 is cast to the model's dtype.
        """
        embedder = self.module.time_guidance_embed
        embedders = {TIMESTEP: embedder.timestep_embedder, "guidance": embedder.guidance_embedder}
        dtypes = {TIMESTEP: torch.float32, "guidance": self.dtype}
        names = [name for name in embedders if name in inputs]
        waves = {name: embedder.time_proj(inputs[name].to(dtypes[name]) * 1000) for name in names}
        return torch.stack([embedders[name](wave.to(self.dtype)) for name, wave in waves.items()]).sum(0)

    def head(self, state: State) -> Tensor:
        prediction: Tensor = self.module.proj_out(self.module.norm_out(state.streams[IMAGE], state.context["temb"]))
        return prediction

    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        """Drop the tokens after the latent's."""
        latent_tokens = math.prod(self.geometry.grid(size))
        return to_latent(tokens[:, :latent_tokens], size, self.geometry, "c ph pw")

    def stock(self, inputs: Mapping[str, Tensor]) -> Tensor:
        tokens, image_ids = self._tokens(inputs)
        text = inputs["encoder_hidden_states"].to(self.dtype)
        out: Tensor = self.module(
            hidden_states=tokens,
            encoder_hidden_states=text,
            timestep=inputs[TIMESTEP],
            img_ids=image_ids,
            txt_ids=_text_ids(text),
            guidance=inputs.get("guidance"),
            return_dict=False,
        )[0]
        return self.unpatchify(out, inputs[LATENT].shape[2:])

    def _tokens(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the tokens ``[B, S, C]`` of the latent and the reference images, and their positions ``[S, 4]``."""
        latent = inputs[LATENT]
        tokens = to_tokens(latent.to(self.dtype), _PATCH, "c ph pw")
        ids = joint_attention.positions(latent, self.geometry.grid(latent.shape[2:]), _POSITION_AXES)
        return joint_attention.with_reference(tokens, ids, inputs)

    @staticmethod
    def variants() -> dict[str, Variant]:
        dev = {
            "num_layers": 2, "num_single_layers": 2, "num_attention_heads": 48, "attention_head_dim": 8,
            "joint_attention_dim": 64, "axes_dims_rope": (2, 2, 2, 2), "in_channels": 16,
        }  # fmt: skip
        klein = {**dev, "guidance_embeds": False, "num_attention_heads": 24}
        text: Inputs = {"encoder_hidden_states": ("text", "joint_attention_dim")}
        guided: Inputs = {**text, "guidance": ()}
        reference: Inputs = {"reference": (12, "in_channels"), "reference_ids": (12, _POSITION_AXES)}
        return {
            "dev": Variant(config=dev, size=(5, 7), text=7, inputs=guided),
            "dev, reference": Variant(config=dev, size=(5, 7), text=7, inputs={**guided, **reference}),
            "klein 4b": Variant(config=klein, size=(5, 7), text=7, inputs=text),
            "klein 9b": Variant(config={**klein, "num_attention_heads": 32}, size=(5, 7), text=7, inputs=text),
        }  # fmt: skip


def _text_ids(text: Tensor) -> Tensor:
    """Return the positions ``[L, 4]`` of text ``[B, L, D]``."""
    ids = torch.zeros(text.shape[1], _POSITION_AXES, device=text.device)
    ids[:, 3] = torch.arange(text.shape[1], device=text.device)
    return ids


def _run_double(layer: nn.Module, state: State) -> State:
    context = state.context
    return _run(layer, state, temb_mod_img=context["double image"], temb_mod_txt=context["double text"])


def _run_single(layer: nn.Module, state: State) -> State:
    return _run(layer, state, temb_mod=state.context["single"], split_hidden_states=True)


def _run(layer: nn.Module, state: State, **options: Any) -> State:
    image = state.streams[IMAGE]
    tables = [(state.tables[TEXT][name], at_least_one(state.tables[IMAGE][name])) for name in ("cos", "sin")]
    text, out = layer(
        hidden_states=at_least_one(image),
        encoder_hidden_states=state.streams[TEXT],
        image_rotary_emb=tuple(torch.cat(both, dim=1)[0] for both in tables),
        **options,
    )
    return state.with_streams(**{TEXT: text, IMAGE: out[:, : image.shape[1]]})
