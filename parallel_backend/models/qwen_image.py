"""Qwen-Image and Qwen-Image-Edit over diffusers' ``QwenImageTransformer2DModel``."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import InvalidRequest
from ..interfaces.family import AttentionSite, Block, Family, Inputs, Variant
from ..interfaces.geometry import IMAGE, LATENT, TEXT, TIMESTEP, Extent, Geometry, Shapes, Site, Sum
from ..interfaces.state import State
from ..interfaces.tensor_cuts import ColumnParallel, Cuts, HeadCounts, RowParallel, attention
from .shared.patchify import check_mask, check_text, fold, unfold
from .shared.streams import MASK, at_least_one

_DEFAULTS: dict[str, Any] = {
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
"""What ``QwenImageTransformer2DModel`` takes for a number that its config leaves out."""

_POSITIONS = 4096
"""Positions to either side of the middle for which ``QwenEmbedRope`` has a table."""

_REFERENCES = tuple(f"reference_{i}" for i in range(1, 9))
_STARTS = "start_ids"


class QwenImage(Family):
    """Inputs, batch first: the latent ``[B, 16, T, H, W]``, T being 1 for pictures, the timestep ``[B]`` in 0..1, and

    - ``encoder_hidden_states`` ``[B, L, D]``, of which ``encoder_hidden_states_mask`` ``[B, L]`` says what counts;
    - ``reference_1`` to ``reference_8`` ``[B, 16, 1, H, W]``: the pictures that Edit changes, each of its own size;
    - ``start_ids`` ``[B, 2 + N, 3]``: positions (picture, row, column) of the text's first token, of the latent's first
      patch and of those of the N references; without it they are diffusers' own.
    """

    required: ClassVar[tuple[str, ...]] = ("encoder_hidden_states",)
    optional: ClassVar[tuple[str, ...]] = (MASK, *_REFERENCES, _STARTS)

    @staticmethod
    def describe(config: Mapping[str, Any]) -> Geometry:
        """See ``Family.describe``."""
        config = _DEFAULTS | dict(config)
        _refuse_variants(config)
        heads, head_dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
        patch = (1, config["patch_size"], config["patch_size"])
        return Geometry(
            channels=config["in_channels"] // math.prod(patch),
            out_channels=config["out_channels"] or config["in_channels"],
            patch=patch,
            layers=layers,
            sites=(Site(streams=(TEXT, IMAGE), heads=heads, head_dim=head_dim, count=layers),),
            sums=tuple(
                Sum(tokens=stream, width=heads * head_dim, count=2 * layers, least=1) for stream in (TEXT, IMAGE)
            ),
            positions=2 * _POSITIONS,
        )

    @staticmethod
    def cuts(config: Mapping[str, Any]) -> Cuts:
        """See ``Family.cuts``."""
        config = _DEFAULTS | dict(config)
        heads = (config["num_attention_heads"], config["attention_head_dim"])
        hidden = ((4 * math.prod(heads), 1),)
        prefix = "transformer_blocks.*"
        cuts = attention(f"{prefix}.attn", *heads, text=True)
        cuts |= {f"{prefix}.attn": HeadCounts({"heads": (heads[0], 1), "inner_dim": heads})}
        cuts |= {f"{prefix}.attn.to_add_out": RowParallel((heads,))}
        for name in ("img_mlp", "txt_mlp"):
            cuts |= {
                f"{prefix}.{name}.net.0.proj": ColumnParallel(hidden),
                f"{prefix}.{name}.net.2": RowParallel(hidden),
            }
        return cuts

    @staticmethod
    def extent(config: Mapping[str, Any], shapes: Shapes) -> Extent:
        """See ``Family.extent``."""
        config = _DEFAULTS | dict(config)
        geometry = QwenImage.describe(config)
        text = check_text(shapes["encoder_hidden_states"], config["joint_attention_dim"])
        check_mask(MASK, shapes, text)
        for name in _REFERENCES:
            _check_reference(name, shapes.get(name), geometry)
        grids = [geometry.grid(shapes[name][2:]) for name in (LATENT, *_REFERENCES) if name in shapes]
        _check_starts(shapes.get(_STARTS), grids, text)
        image = sum(math.prod(grid) for grid in grids)
        return Extent(streams={TEXT: text, IMAGE: image}, values=geometry.out_channels * math.prod(geometry.patch))

    def parts(self) -> tuple[list[Block], list[AttentionSite]]:
        """See ``Family.parts``."""
        layers = self.module.transformer_blocks
        blocks = [Block(run=partial(_run, layer), modules=(layer,)) for layer in layers]
        return blocks, [AttentionSite(module=layer.attn, streams=(TEXT, IMAGE)) for layer in layers]

    @property
    def dtype(self) -> torch.dtype:
        """See ``Family.dtype``."""
        dtype: torch.dtype = self.module.img_in.weight.dtype
        return dtype

    def image(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """See ``Family.image``."""
        tokens: Tensor = self.module.img_in(self._tokens(inputs)[0])
        return tokens

    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        """See ``Family.embed``.

        As in ComfyUI, a latent that is no whole number of patches is padded, and the timestep keeps float32.
        """
        module, text = self.module, inputs["encoder_hidden_states"].to(self.dtype)
        image, shapes = self.image(inputs), self._tokens(inputs)[1]
        image_rope, text_rope = self._rope(inputs, shapes)
        tables, timestep = {"rope": image_rope[None]}, inputs[TIMESTEP].float()
        if module.zero_cond_t:  # the references' modulation is that of timestep 0
            timestep = torch.cat([timestep, timestep * 0])
            places = torch.arange(image.shape[1], device=image.device)
            tables["modulation"] = (places >= math.prod(shapes[0]))[None].int()
        return State(
            streams={TEXT: module.txt_in(module.txt_norm(text)), IMAGE: image},
            tables={TEXT: {"rope": text_rope[None]}, IMAGE: tables},
            masks={TEXT: inputs[MASK].bool()} if MASK in inputs else {},
            context={"temb": module.time_text_embed(timestep, image)},
        )

    def head(self, state: State) -> Tensor:
        """See ``Family.head``."""
        module, temb = self.module, state.context["temb"]
        temb = temb.chunk(2)[0] if module.zero_cond_t else temb
        prediction: Tensor = module.proj_out(module.norm_out(state.streams[IMAGE], temb))
        return prediction

    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        """See ``Family.unpatchify``. What follows the latent's own tokens is left out."""
        own = math.prod(self.geometry.grid(size))
        return unfold(tokens[:, :own], size, self.geometry, channels_last=False)

    def stock(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """See ``Family.stock``."""
        tokens, shapes = self._tokens(inputs)
        out: Tensor = self.module(
            hidden_states=tokens,
            encoder_hidden_states=inputs["encoder_hidden_states"].to(self.dtype),
            encoder_hidden_states_mask=inputs.get(MASK),
            timestep=inputs[TIMESTEP],
            img_shapes=[shapes] * len(tokens),
            return_dict=False,
        )[0]
        return self.unpatchify(out, inputs[LATENT].shape[2:])

    def _tokens(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, list[tuple[int, ...]]]:
        """Packed tokens ``[B, S, 4C]`` of the latent and the references, and the patches of each along its dims."""
        latents = [inputs[name] for name in (LATENT, *_REFERENCES) if name in inputs]
        tokens = torch.cat([fold(latent.to(self.dtype), self.geometry.patch) for latent in latents], dim=1)
        return tokens, [self.geometry.grid(latent.shape[2:]) for latent in latents]

    def _rope(self, inputs: Mapping[str, Tensor], shapes: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Tables ``[S, R]`` of the picture tokens and of the text's."""
        embedder, device = self.module.pos_embed, inputs[LATENT].device
        length = inputs["encoder_hidden_states"].shape[1]
        if _STARTS not in inputs:
            image, text = embedder([shapes], max_txt_seq_len=length, device=device)
            return image, text
        first, *starts = inputs[_STARTS][0].float()
        with torch.device(device):
            steps = [torch.cartesian_prod(*map(torch.arange, shape)) for shape in shapes]
            images = torch.cat([start + step for start, step in zip(starts, steps, strict=True)])
            texts = first + torch.arange(length)[:, None]
            axes = list(enumerate(embedder.axes_dim))
            image, text = (
                torch.cat([embedder.rope_params(ids[:, i], dim, embedder.theta) for i, dim in axes], dim=1)
                for ids in (images, texts)
            )
        return image, text

    @staticmethod
    def variants() -> dict[str, Variant]:
        """See ``Family.variants``."""
        small = {
            "num_layers": 2, "num_attention_heads": 24, "attention_head_dim": 16, "joint_attention_dim": 64,
            "axes_dims_rope": (4, 6, 6),
        }  # fmt: skip
        text: Inputs = {"encoder_hidden_states": ("text", "joint_attention_dim")}
        masked: Inputs = {**text, MASK: ("text",)}
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
    # Rope cannot be computed of no tokens.
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
    own = {stream: tokens.shape[1] for stream, tokens in state.streams.items()}
    return state.with_streams(**{TEXT: text[:, : own[TEXT]], IMAGE: image[:, : own[IMAGE]]})


def _refuse_variants(config: Mapping[str, Any]) -> None:
    works = "Qwen-Image and Qwen-Image-Edit work"
    for name in ("use_layer3d_rope", "use_additional_t_cond"):
        if config[name]:
            raise InvalidRequest(f"{name}={config[name]} in the config: Qwen-Image-Layered is not supported; {works}")
    if config["guidance_embeds"]:
        raise InvalidRequest(f"guidance_embeds=True in the config: diffusers has no layer for it; {works}")
    packed = config["in_channels"] // config["patch_size"] ** 2
    if packed != (config["out_channels"] or config["in_channels"]):
        raise InvalidRequest(
            f"out_channels={config['out_channels']} in the config: the latent has {packed} channels, and a model that "
            f"predicts others is not supported; {works}"
        )


def _check_reference(name: str, shape: tuple[int, ...] | None, geometry: Geometry) -> None:
    if shape is None:
        return
    fits = len(shape) == 5 and shape[1:3] == (geometry.channels, 1) and min(shape[3:]) >= geometry.patch[-1]
    longest = max(geometry.grid(shape[2:])) if fits else 0
    if not fits or longest > 2 * _POSITIONS:
        raise InvalidRequest(
            f"{name} of shape {list(shape)}: it needs to be [batch, {geometry.channels}, 1, height, width] of at most "
            f"{2 * _POSITIONS} patches along a side, the latent of a picture"
        )


def _check_starts(shape: tuple[int, ...] | None, grids: Sequence[tuple[int, ...]], text: int) -> None:
    if shape is None:
        room = _POSITIONS - max(length // 2 for grid in grids for length in grid[1:])
        if text > room:
            raise InvalidRequest(f"the text has {text} tokens, and beside these pictures this model takes {room}")
    elif shape[1:] != (1 + len(grids), 3):
        raise InvalidRequest(f"{_STARTS} of shape {list(shape)}: this model takes [batch, {1 + len(grids)}, 3]")
