"""Qwen-Image and Qwen-Image-Edit over diffusers' ``QwenImageTransformer2DModel``."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...errors import InvalidRequest
from ...interfaces.family import AttentionSite, Block, Family, Inputs, Variant
from ...interfaces.geometry import IMAGE, LATENT, TEXT, TIMESTEP, AllReduce, AttentionKind, Extent, Geometry, Shapes
from ...interfaces.state import State
from ...interfaces.tensor_cuts import ColumnParallel, Cuts, HeadCounts, RowParallel, attention_cuts
from ..shared.patchify import check_mask, check_text, to_latent, to_tokens
from ..shared.streams import TEXT_MASK, at_least_one

_POSITIONS = 4096
"""Positions on either side of the centre for which ``QwenEmbedRope`` has a table."""

_REFERENCES = tuple(f"reference_{i}" for i in range(1, 9))
_START_IDS = "start_ids"


class QwenImage(Family):
    """Qwen-Image in three parts.

    Inputs, batch first: the latent ``[B, 16, T, H, W]``, where T is 1 for images, the timestep ``[B]`` in 0..1, and

    - ``encoder_hidden_states`` ``[B, L, D]``: text;
    - ``encoder_hidden_states_mask`` ``[B, L]``: True for text tokens that count. Without it all tokens count;
    - ``reference_1`` to ``reference_8`` ``[B, 16, 1, H, W]``: latents of the images that Edit changes, of any sizes;
    - ``start_ids`` ``[B, 2 + N, 3]``: positions (image, row, column) of the first text token, of the first patch of the
      latent and of the first patch of each of the N references. By default they are diffusers' own.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "patch_size": 2,
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 60,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 3584,
        "guidance_embeds": False,
        "zero_cond_t": False,
        "use_additional_t_cond": False,
        "use_layer3d_rope": False,
    }
    first_layer: ClassVar[str] = "img_in"
    values_alive: ClassVar[float] = 16.1
    float16: ClassVar[bool] = False
    required: ClassVar[tuple[str, ...]] = ("encoder_hidden_states",)
    optional: ClassVar[tuple[str, ...]] = (TEXT_MASK, *_REFERENCES, _START_IDS)

    @staticmethod
    def _describe(config: Mapping[str, Any]) -> Geometry:
        _check_supported(config)
        heads, head_dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
        patch = (1, config["patch_size"], config["patch_size"])
        return Geometry(
            channels=config["in_channels"] // math.prod(patch),
            out_channels=config["out_channels"] or config["in_channels"],
            patch=patch,
            layers=layers,
            sites=(AttentionKind(streams=(TEXT, IMAGE), heads=heads, head_dim=head_dim, count=layers),),
            all_reduces=tuple(
                AllReduce(tokens=stream, width=heads * head_dim, count=2 * layers, min_rows=1)
                for stream in (TEXT, IMAGE)
            ),
            positions=2 * _POSITIONS,
        )

    @staticmethod
    def _cuts(config: Mapping[str, Any]) -> Cuts:
        heads = (config["num_attention_heads"], config["attention_head_dim"])
        hidden = ((4 * math.prod(heads), 1),)
        prefix = "transformer_blocks.*"
        cuts = attention_cuts(f"{prefix}.attn", *heads, text=True)
        cuts |= {f"{prefix}.attn": HeadCounts({"heads": (heads[0], 1), "inner_dim": heads})}
        cuts |= {f"{prefix}.attn.to_add_out": RowParallel((heads,))}
        for name in ("img_mlp", "txt_mlp"):
            cuts |= {
                f"{prefix}.{name}.net.0.proj": ColumnParallel(hidden),
                f"{prefix}.{name}.net.2": RowParallel(hidden),
            }
        return cuts

    @staticmethod
    def _extent(config: Mapping[str, Any], geometry: Geometry, shapes: Shapes) -> Extent:
        text = check_text(shapes["encoder_hidden_states"], config["joint_attention_dim"])
        check_mask(TEXT_MASK, shapes, text)
        for name in _REFERENCES:
            _check_reference(name, shapes.get(name), geometry)
        grids = [geometry.grid(shapes[name][2:]) for name in (LATENT, *_REFERENCES) if name in shapes]
        _check_positions(shapes.get(_START_IDS), grids, text)
        image = sum(math.prod(grid) for grid in grids)
        return Extent(streams={TEXT: text, IMAGE: image}, values=geometry.out_channels * math.prod(geometry.patch))

    def blocks_and_sites(self) -> tuple[list[Block], list[AttentionSite]]:
        layers = self.module.transformer_blocks
        blocks = [Block(run=partial(_run, layer), modules=(layer,)) for layer in layers]
        return blocks, [AttentionSite(module=layer.attn, streams=(TEXT, IMAGE)) for layer in layers]

    def image(self, inputs: Mapping[str, Tensor]) -> Tensor:
        tokens: Tensor = self.module.img_in(self._tokens(inputs)[0])
        return tokens

    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        """As in ComfyUI, the latent is padded to whole patches, and the timestep stays float32."""
        module, text = self.module, inputs["encoder_hidden_states"].to(self.dtype)
        image, grids = self.image(inputs), self._tokens(inputs)[1]
        image_rope, text_rope = self._rope(inputs, grids)
        tables, timestep = {"rope": image_rope[None]}, inputs[TIMESTEP].float()
        if module.zero_cond_t:  # references are modulated as at timestep 0
            timestep = torch.cat([timestep, timestep * 0])
            tokens = torch.arange(image.shape[1], device=image.device)
            tables["modulation"] = (tokens >= math.prod(grids[0]))[None].int()
        return State(
            streams={TEXT: module.txt_in(module.txt_norm(text)), IMAGE: image},
            tables={TEXT: {"rope": text_rope[None]}, IMAGE: tables},
            masks={TEXT: inputs[TEXT_MASK].bool()} if TEXT_MASK in inputs else {},
            context={"temb": module.time_text_embed(timestep, image)},
        )

    def head(self, state: State) -> Tensor:
        module, temb = self.module, state.context["temb"]
        temb = temb.chunk(2)[0] if module.zero_cond_t else temb
        prediction: Tensor = module.proj_out(module.norm_out(state.streams[IMAGE], temb))
        return prediction

    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        """Drop the tokens after the latent's."""
        latent_tokens = math.prod(self.geometry.grid(size))
        return to_latent(tokens[:, :latent_tokens], size, self.geometry, "c pt ph pw")

    def stock(self, inputs: Mapping[str, Tensor]) -> Tensor:
        tokens, grids = self._tokens(inputs)
        out: Tensor = self.module(
            hidden_states=tokens,
            encoder_hidden_states=inputs["encoder_hidden_states"].to(self.dtype),
            encoder_hidden_states_mask=inputs.get(TEXT_MASK),
            timestep=inputs[TIMESTEP],
            img_shapes=[grids] * len(tokens),
            return_dict=False,
        )[0]
        return self.unpatchify(out, inputs[LATENT].shape[2:])

    def _tokens(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, list[tuple[int, ...]]]:
        """Return packed tokens ``[B, S, 4C]`` of the latent and the references, and the grid of patches of each."""
        latents = [inputs[name].to(self.dtype) for name in (LATENT, *_REFERENCES) if name in inputs]
        tokens = [to_tokens(latent, self.geometry.patch, "c pt ph pw") for latent in latents]
        return torch.cat(tokens, dim=1), [self.geometry.grid(latent.shape[2:]) for latent in latents]

    def _rope(self, inputs: Mapping[str, Tensor], grids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return rotary tables ``[S, R]`` of the image tokens and ``[L, R]`` of the text tokens."""
        embedder, device = self.module.pos_embed, inputs[LATENT].device
        length = inputs["encoder_hidden_states"].shape[1]
        if _START_IDS not in inputs:
            image, text = embedder([grids], max_txt_seq_len=length, device=device)
            return image, text
        with torch.device(device):
            axes = list(enumerate(embedder.axes_dim))
            image, text = (
                torch.cat([embedder.rope_params(ids[:, i], dim, embedder.theta) for i, dim in axes], dim=1)
                for ids in _position_ids(inputs[_START_IDS][0].float(), grids, length)
            )
        return image, text

    @staticmethod
    def variants() -> dict[str, Variant]:
        small = {
            "num_layers": 2, "num_attention_heads": 24, "attention_head_dim": 16, "joint_attention_dim": 64,
            "axes_dims_rope": (4, 6, 6),
        }  # fmt: skip
        text: Inputs = {"encoder_hidden_states": ("text", "joint_attention_dim")}
        masked: Inputs = {**text, TEXT_MASK: ("text",)}
        first: Inputs = {"reference_1": (16, 1, 7, 10)}
        second: Inputs = {"reference_2": (16, 1, 6, 15)}
        return {
            "image": Variant(config=small, size=(1, 9, 13), text=7, inputs=text),
            "masked": Variant(config=small, size=(1, 9, 13), text=7, inputs=masked),
            "edit": Variant(config=small, size=(1, 9, 13), text=7, inputs={**text, **first, **second}),
            "edit 2511": Variant(
                config={**small, "zero_cond_t": True}, size=(1, 9, 13), text=7, inputs={**masked, **first}
            ),
        }  # fmt: skip


def _run(layer: nn.Module, state: State) -> State:
    # diffusers cannot rotate 0 tokens.
    text, image = (at_least_one(state.streams[stream]) for stream in (TEXT, IMAGE))
    text_rope, image_rope = (at_least_one(state.tables[stream]["rope"])[0] for stream in (TEXT, IMAGE))
    modulation = state.tables[IMAGE].get("modulation")
    text, image = layer(
        hidden_states=image,
        encoder_hidden_states=text,
        encoder_hidden_states_mask=None,
        temb=state.context["temb"],
        image_rotary_emb=(image_rope, text_rope),
        modulate_index=None if modulation is None else at_least_one(modulation),
    )
    lengths = {stream: tokens.shape[1] for stream, tokens in state.streams.items()}
    return state.with_streams(**{TEXT: text[:, : lengths[TEXT]], IMAGE: image[:, : lengths[IMAGE]]})


def _check_supported(config: Mapping[str, Any]) -> None:
    works = "Qwen-Image and Qwen-Image-Edit would work"
    for name in ("use_layer3d_rope", "use_additional_t_cond"):
        if config[name]:
            raise InvalidRequest(f"Qwen-Image-Layered (a config with {name} {config[name]}) is not supported: {works}")
    if config["guidance_embeds"]:
        raise InvalidRequest(
            f"Qwen-Image with guidance_embeds True is not supported, because diffusers has no layer for it: {works}"
        )
    channels = config["in_channels"] // config["patch_size"] ** 2
    if channels != (config["out_channels"] or config["in_channels"]):
        raise InvalidRequest(
            f"Qwen-Image with out_channels {config['out_channels']} is not supported, because its latent has "
            f"{channels} channels: {works}"
        )


def _check_reference(name: str, shape: tuple[int, ...] | None, geometry: Geometry) -> None:
    if shape is None:
        return
    fits = len(shape) == 5 and shape[1:3] == (geometry.channels, 1) and min(shape[3:]) >= geometry.patch[-1]
    longest = max(geometry.grid(shape[2:])) if fits else 0
    if not fits or longest > 2 * _POSITIONS:
        raise InvalidRequest(
            f"{name} of shape {list(shape)} does not fit this model: the latent of one image, [batch, "
            f"{geometry.channels}, 1, height, width], of at most {2 * _POSITIONS} patches along a side would work"
        )


def _check_positions(start_ids: tuple[int, ...] | None, grids: Sequence[tuple[int, ...]], text: int) -> None:
    """Check the shape of ``start_ids``, or without it that diffusers has positions for the text behind the images."""
    if start_ids is None:
        most = _POSITIONS - max(length // 2 for grid in grids for length in grid[1:])
        if text > most:
            raise InvalidRequest(
                f"the text has {text} tokens, and beside images of this size this model takes at most {most}"
            )
    elif start_ids[1:] != (1 + len(grids), 3):
        raise InvalidRequest(
            f"{_START_IDS} of shape {list(start_ids)} does not fit: this model takes [batch, {1 + len(grids)}, 3]"
        )


def _position_ids(starts: Tensor, grids: Sequence[Sequence[int]], length: int) -> tuple[Tensor, Tensor]:
    """Return ids ``[S, 3]`` of the image tokens and ``[L, 3]`` of the text tokens, which begin at ``starts``.

    Call it under ``torch.device``: it creates tensors on the default device.
    """
    text_start, *image_starts = starts
    offsets = [torch.cartesian_prod(*map(torch.arange, grid)) for grid in grids]
    image_ids = torch.cat([start + offset for start, offset in zip(image_starts, offsets, strict=True)])
    return image_ids, text_start + torch.arange(length)[:, None]
