"""Z-Image over diffusers' ``ZImageTransformer2DModel``."""

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
from ..interfaces.tensor_cuts import ColumnParallel, Cuts, RowParallel, attention
from .shared.patchify import check_mask, check_text, pad_to_patch, unfold
from .shared.streams import MASK, at_least_one

_DEFAULTS: dict[str, Any] = {
    "all_patch_size": (2,),
    "all_f_patch_size": (1,),
    "in_channels": 16,
    "dim": 3840,
    "n_layers": 30,
    "n_refiner_layers": 2,
    "n_heads": 30,
    "cap_feat_dim": 2560,
    "siglip_feat_dim": None,
    "axes_lens": (1024, 512, 512),
}
"""What ``ZImageTransformer2DModel`` takes for a number that its config leaves out."""

_MULTIPLE = 32
"""Each stream is filled up to a multiple of it with learned tokens, which are attended like all others."""


class ZImage(Family):
    """Inputs, batch first: the latent ``[B, 16, H, W]``, the timestep ``[B]`` in 0..1 (1 is noise), and

    - ``encoder_hidden_states`` ``[B, L, D]``, of which ``encoder_hidden_states_mask`` ``[B, L]`` says what counts.
    """

    required: ClassVar[tuple[str, ...]] = ("encoder_hidden_states",)
    optional: ClassVar[tuple[str, ...]] = (MASK,)

    @staticmethod
    def describe(config: Mapping[str, Any]) -> Geometry:
        """See ``Family.describe``."""
        config = _DEFAULTS | dict(config)
        _refuse_variants(config)
        dim, heads, layers = config["dim"], config["n_heads"], config["n_layers"]
        refiners, patch = config["n_refiner_layers"], config["all_patch_size"][0]
        return Geometry(
            channels=config["in_channels"],
            out_channels=config["in_channels"],
            patch=(patch, patch),
            layers=refiners + layers,
            sites=(
                Site(streams=(IMAGE,), heads=heads, head_dim=dim // heads, count=refiners),
                Site(streams=(IMAGE, TEXT), heads=heads, head_dim=dim // heads, count=layers),
            ),
            sums=(
                Sum(tokens=IMAGE, width=dim, count=2 * (refiners + layers)),
                Sum(tokens=TEXT, width=dim, count=2 * layers),
            ),
            positions=min(config["axes_lens"][1:]),
        )

    @staticmethod
    def cuts(config: Mapping[str, Any]) -> Cuts:
        """See ``Family.cuts``."""
        config = _DEFAULTS | dict(config)
        heads, hidden = config["n_heads"], ((int(config["dim"] / 3 * 8), 1),)
        cuts: dict[str, Any] = {}
        for prefix in ("noise_refiner.*", "layers.*"):
            cuts |= attention(f"{prefix}.attention", heads, config["dim"] // heads)
            cuts |= {f"{prefix}.feed_forward.{name}": ColumnParallel(hidden) for name in ("w1", "w3")}
            cuts |= {f"{prefix}.feed_forward.w2": RowParallel(hidden)}
        return cuts

    @staticmethod
    def extent(config: Mapping[str, Any], shapes: Shapes) -> Extent:
        """See ``Family.extent``."""
        config = _DEFAULTS | dict(config)
        geometry = ZImage.describe(config)
        text = check_text(shapes["encoder_hidden_states"], config["cap_feat_dim"])
        check_mask(MASK, shapes, text)
        room = (
            (config["axes_lens"][0] - 2) // _MULTIPLE * _MULTIPLE
        )  # positions count from 1, the picture's is one more
        if text > room:
            raise InvalidRequest(f"the text has {text} tokens, and this model has positions for {room}")
        image = math.prod(geometry.grid(shapes[LATENT][2:]))
        values = geometry.out_channels * math.prod(geometry.patch)
        return Extent(streams={TEXT: _filled(text), IMAGE: _filled(image)}, values=values)

    def parts(self) -> tuple[list[Block], list[AttentionSite]]:
        """See ``Family.parts``."""
        blocks, attending = [], []
        for layers, streams in ((self.module.noise_refiner, (IMAGE,)), (self.module.layers, (IMAGE, TEXT))):
            blocks += [Block(run=partial(_run, layer, streams), modules=(layer,)) for layer in layers]
            attending += [AttentionSite(module=layer.attention, streams=streams) for layer in layers]
        return blocks, attending

    @property
    def dtype(self) -> torch.dtype:
        """See ``Family.dtype``."""
        dtype: torch.dtype = self.module.all_x_embedder[self._key].weight.dtype
        return dtype

    def image(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """See ``Family.image``."""
        return self._image(self.module.patchify_and_embed(*self._samples(inputs), *self._patch))[0]

    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        """See ``Family.embed``. A latent that is no whole number of patches is padded as in ComfyUI."""
        module = self.module
        pictures, captions = self._samples(inputs)
        prepared = module.patchify_and_embed(pictures, captions, *self._patch)
        image, image_rope, _ = self._image(prepared)
        _, captions, _, _, text_places, _, text_fill = prepared
        text, text_rope, kept = self._stream(
            module.cap_embedder, captions, text_places, text_fill, module.cap_pad_token
        )
        for layer in module.context_refiner:
            text = layer(text, kept, text_rope)
        length = _filled(inputs["encoder_hidden_states"].shape[1])
        lengths = torch.tensor([len(caption) for caption in captions], device=text.device)
        masks = {TEXT: torch.arange(length, device=text.device) < lengths[:, None]} if MASK in inputs else {}
        temb = module.t_embedder(self._time(inputs) * module.t_scale).type_as(image)
        return State(
            streams={TEXT: _extended(text, length), IMAGE: image},
            tables={TEXT: {"rope": _extended(text_rope, length)}, IMAGE: {"rope": image_rope}},
            masks=masks,
            context={"temb": temb},
        )

    def head(self, state: State) -> Tensor:
        """See ``Family.head``."""
        prediction: Tensor = self.module.all_final_layer[self._key](state.streams[IMAGE], c=state.context["temb"])
        return prediction

    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        """See ``Family.unpatchify``. The stream's fill is left out, and the sign is ComfyUI's."""
        own = math.prod(self.geometry.grid(size))
        return -unfold(tokens[:, :own], size, self.geometry, channels_last=True)

    def stock(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """See ``Family.stock``."""
        pictures, captions = self._samples(inputs)
        patch, frames = self._patch
        out = self.module(
            pictures, self._time(inputs), captions, return_dict=False, patch_size=patch, f_patch_size=frames
        )[0]
        height, width = inputs[LATENT].shape[2:]
        return -torch.stack(out)[:, :, 0, :height, :width]

    @property
    def _patch(self) -> tuple[int, int]:
        """Sizes of a patch, of the picture and of frames."""
        return self.geometry.patch[0], 1

    @property
    def _key(self) -> str:
        """The name of the layers that are there for this size of a patch."""
        return "{}-{}".format(*self._patch)

    @staticmethod
    def _time(inputs: Mapping[str, Tensor]) -> Tensor:
        """Z-Image's own time runs from noise at 0 to the picture at 1."""
        return 1 - inputs[TIMESTEP].float()

    def _samples(self, inputs: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The pictures ``[C, 1, H, W]``, padded, and the captions ``[own length, D]``."""
        pictures = pad_to_patch(inputs[LATENT].to(self.dtype), self.geometry.patch)[:, :, None]
        captions = inputs["encoder_hidden_states"].to(self.dtype)
        if MASK not in inputs:
            return list(pictures), list(captions)
        return list(pictures), [text[mask.bool()] for text, mask in zip(captions, inputs[MASK], strict=True)]

    def _image(self, prepared: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor | None]:
        """The image's stream, of what the module prepares."""
        patches, _, _, places, _, fill, _ = prepared
        return self._stream(self.module.all_x_embedder[self._key], patches, places, fill, self.module.x_pad_token)

    def _stream(
        self, embedder: nn.Module, rows: list[Tensor], places: list[Tensor], fill: list[Tensor], token: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens ``[B, S, D]``, their rope ``[B, S, R]``, and which are kept ``[B, S]`` where samples differ."""
        tokens = embedder(torch.cat(rows)).split([len(row) for row in rows])
        filled, rope, kept, _, _ = self.module._prepare_sequence(
            list(tokens), places, fill, token, None, tokens[0].device
        )
        return filled, rope, kept

    @staticmethod
    def variants() -> dict[str, Variant]:
        """See ``Family.variants``."""
        small = {
            "dim": 360, "n_layers": 2, "n_refiner_layers": 2, "n_heads": 30, "n_kv_heads": 30, "cap_feat_dim": 64,
            "axes_dims": (4, 4, 4), "axes_lens": (128, 64, 64),
        }  # fmt: skip
        text: Inputs = {"encoder_hidden_states": ("text", "cap_feat_dim")}
        return {
            "image": Variant(config=small, size=(9, 13), text=7, inputs=text),
            "masked": Variant(config=small, size=(9, 13), text=34, inputs={**text, MASK: ("text",)}),
        }


def _run(layer: nn.Module, streams: tuple[str, ...], state: State) -> State:
    parts = [state.streams[stream] for stream in streams]
    tokens = torch.cat(parts, dim=1)
    # Rope cannot be computed of no tokens.
    rope = torch.cat([state.tables[stream]["rope"] for stream in streams], dim=1)
    out = layer(at_least_one(tokens), None, at_least_one(rope), state.context["temb"])
    sizes = [part.shape[1] for part in parts]
    return state.with_streams(**dict(zip(streams, out[:, : tokens.shape[1]].split(sizes, dim=1), strict=True)))


def _filled(tokens: int) -> int:
    return -(-tokens // _MULTIPLE) * _MULTIPLE


def _extended(rows: Tensor, length: int) -> Tensor:
    """``[B, S, ...]`` with zeros up to a length, which is known before the values of the masks are."""
    return torch.cat([rows, rows.new_zeros(len(rows), length - rows.shape[1], *rows.shape[2:])], dim=1)


def _refuse_variants(config: Mapping[str, Any]) -> None:
    if config["siglip_feat_dim"] is not None:
        raise InvalidRequest(
            f"siglip_feat_dim={config['siglip_feat_dim']} in the config: Z-Image-Omni is not supported; Z-Image and "
            "Z-Image-Turbo work"
        )
    if len(config["all_patch_size"]) != 1 or tuple(config["all_f_patch_size"]) != (1,):
        raise InvalidRequest(
            f"all_patch_size={list(config['all_patch_size'])} and all_f_patch_size={list(config['all_f_patch_size'])} "
            "in the config: one size of patches for single frames is supported, [2] and [1]"
        )
