"""Z-Image over diffusers' ``ZImageTransformer2DModel``."""

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
from ...interfaces.tensor_cuts import ColumnParallel, Cuts, RowParallel, attention_cuts
from ..shared.patchify import check_mask, check_text, pad_to_patch, to_latent
from ..shared.streams import TEXT_MASK, at_least_one

_MULTIPLE = 32
"""The module pads each stream with learned tokens to a multiple of this. They are attended to like all others."""


class ZImage(Family):
    """Z-Image in three parts.

    Inputs, batch first: the latent ``[B, 16, H, W]``, the timestep ``[B]`` in 0..1 (1 is noise), and

    - ``encoder_hidden_states`` ``[B, L, D]``: text;
    - ``encoder_hidden_states_mask`` ``[B, L]``: True for text tokens that count. Without it all tokens count.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
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
    first_layer: ClassVar[str] = "all_x_embedder"
    values_alive: ClassVar[float] = 17.0
    float16: ClassVar[bool] = False
    required: ClassVar[tuple[str, ...]] = ("encoder_hidden_states",)
    optional: ClassVar[tuple[str, ...]] = (TEXT_MASK,)

    @staticmethod
    def _describe(config: Mapping[str, Any]) -> Geometry:
        _check_supported(config)
        dim, heads, layers = config["dim"], config["n_heads"], config["n_layers"]
        refiners, patch = config["n_refiner_layers"], config["all_patch_size"][0]
        return Geometry(
            channels=config["in_channels"],
            out_channels=config["in_channels"],
            patch=(patch, patch),
            layers=refiners + layers,
            sites=(
                AttentionKind(streams=(IMAGE,), heads=heads, head_dim=dim // heads, count=refiners),
                AttentionKind(streams=(IMAGE, TEXT), heads=heads, head_dim=dim // heads, count=layers),
            ),
            all_reduces=(
                AllReduce(tokens=IMAGE, width=dim, count=2 * (refiners + layers)),
                AllReduce(tokens=TEXT, width=dim, count=2 * layers),
            ),
            positions=min(config["axes_lens"][1:]),
        )

    @staticmethod
    def _cuts(config: Mapping[str, Any]) -> Cuts:
        heads, hidden = config["n_heads"], ((int(config["dim"] / 3 * 8), 1),)
        cuts: dict[str, Any] = {}
        for prefix in ("noise_refiner.*", "layers.*"):
            cuts |= attention_cuts(f"{prefix}.attention", heads, config["dim"] // heads)
            cuts |= {f"{prefix}.feed_forward.{name}": ColumnParallel(hidden) for name in ("w1", "w3")}
            cuts |= {f"{prefix}.feed_forward.w2": RowParallel(hidden)}
        return cuts

    @staticmethod
    def _extent(config: Mapping[str, Any], geometry: Geometry, shapes: Shapes) -> Extent:
        text = check_text(shapes["encoder_hidden_states"], config["cap_feat_dim"])
        check_mask(TEXT_MASK, shapes, text)
        # Text positions start at 1, and the image takes the one after the text.
        most = (config["axes_lens"][0] - 2) // _MULTIPLE * _MULTIPLE
        if text > most:
            raise InvalidRequest(f"the text has {text} tokens, and this model has positions for at most {most}")
        image = math.prod(geometry.grid(shapes[LATENT][2:]))
        values = geometry.out_channels * math.prod(geometry.patch)
        return Extent(streams={TEXT: _padded_length(text), IMAGE: _padded_length(image)}, values=values)

    def blocks_and_sites(self) -> tuple[list[Block], list[AttentionSite]]:
        blocks, sites = [], []
        for layers, streams in ((self.module.noise_refiner, (IMAGE,)), (self.module.layers, (IMAGE, TEXT))):
            blocks += [Block(run=partial(_run, layer, streams), modules=(layer,)) for layer in layers]
            sites += [AttentionSite(module=layer.attention, streams=streams) for layer in layers]
        return blocks, sites

    def image(self, inputs: Mapping[str, Tensor]) -> Tensor:
        anywhere = [1] * len(inputs[LATENT])  # the text's length is the place of the image, and not in its tokens
        return self._image(inputs, anywhere)[0]

    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        """Pad the latent to whole patches, as ComfyUI does."""
        text, mask = inputs["encoder_hidden_states"], inputs.get(TEXT_MASK)
        lengths, tokens, rope, own = self.once(TEXT, (text, mask), lambda: self._text(inputs))
        image, image_rope = self._image(inputs, lengths)
        temb = self.module.t_embedder(self._time(inputs) * self.module.t_scale).type_as(image)
        return State(
            streams={TEXT: tokens, IMAGE: image},
            tables={TEXT: {"rope": rope}, IMAGE: {"rope": image_rope}},
            masks={} if mask is None else {TEXT: own},
            context={"temb": temb},
        )

    def _text(self, inputs: Mapping[str, Tensor]) -> tuple[list[int], Tensor, Tensor, Tensor]:
        """Run the text's own layers, which do not depend on time.

        Returns:
            The number of tokens of each sample with the learned ones, all tokens ``[B, S, D]``, their rope
            ``[B, S, R]``, and which of them are the sample's, ``[B, S]``.
        """
        images, captions = self._samples(inputs)
        _, samples, _, _, ids, _, padding = self.module.patchify_and_embed(images, captions, *self._patch)
        text, rope, mask = self._stream(self.module.cap_embedder, samples, ids, padding, self.module.cap_pad_token)
        for layer in self.module.context_refiner:
            text = layer(text, mask, rope)
        lengths, length = list(map(len, samples)), _padded_length(inputs["encoder_hidden_states"].shape[1])
        places = torch.arange(length, device=text.device)
        attended = torch.stack([places < each for each in lengths])
        return lengths, _pad_rows(text, length), _pad_rows(rope, length), attended

    def head(self, state: State) -> Tensor:
        prediction: Tensor = self.module.all_final_layer[self._key](state.streams[IMAGE], c=state.context["temb"])
        return prediction

    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        """Drop the stream's padding tokens; the sign is ComfyUI's."""
        latent_tokens = math.prod(self.geometry.grid(size))
        return -to_latent(tokens[:, :latent_tokens], size, self.geometry, "ph pw c")

    def stock(self, inputs: Mapping[str, Tensor]) -> Tensor:
        images, captions = self._samples(inputs)
        patch, frames = self._patch
        out = self.module(
            images, self._time(inputs), captions, return_dict=False, patch_size=patch, f_patch_size=frames
        )[0]
        height, width = inputs[LATENT].shape[2:]
        return -torch.stack(out)[:, :, 0, :height, :width]

    @property
    def _patch(self) -> tuple[int, int]:
        """Patch size in height and width, and in frames."""
        return self.geometry.patch[0], 1

    @property
    def _key(self) -> str:
        """The name of the module's layers for this patch size."""
        return "{}-{}".format(*self._patch)

    @staticmethod
    def _time(inputs: Mapping[str, Tensor]) -> Tensor:
        """Return Z-Image's own time, which runs from noise at 0 to the image at 1."""
        return 1 - inputs[TIMESTEP].float()

    def _images(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the padded latent of each sample, ``[C, 1, H, W]``."""
        return list(pad_to_patch(inputs[LATENT].to(self.dtype), self.geometry.patch)[:, :, None])

    def _samples(self, inputs: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return, per sample, the padded latent and the text tokens that count, ``[L', D]``."""
        captions = inputs["encoder_hidden_states"].to(self.dtype)
        if TEXT_MASK not in inputs:
            return self._images(inputs), list(captions)
        counted = zip(captions, inputs[TEXT_MASK], strict=True)
        return self._images(inputs), [text[mask.bool()] for text, mask in counted]

    def _image(self, inputs: Mapping[str, Tensor], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the image's tokens and their rope behind texts of these lengths."""
        images = self._images(inputs)
        texts = [images[0].new_empty(length, 0) for length in lengths]
        patches, _, _, ids, _, padding, _ = self.module.patchify_and_embed(images, texts, *self._patch)
        embedder = self.module.all_x_embedder[self._key]
        return self._stream(embedder, patches, ids, padding, self.module.x_pad_token)[:2]

    def _stream(
        self, embedder: nn.Module, samples: list[Tensor], ids: list[Tensor], padding: list[Tensor], pad_token: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return tokens ``[B, S, D]``, their rope ``[B, S, R]``, and a mask ``[B, S]`` if samples differ in length."""
        tokens = embedder(torch.cat(samples)).split([len(sample) for sample in samples])
        padded, rope, mask, _, _ = self.module._prepare_sequence(
            list(tokens), ids, padding, pad_token, None, tokens[0].device
        )
        return padded, rope, mask

    @staticmethod
    def variants() -> dict[str, Variant]:
        small = {
            "dim": 360, "n_layers": 2, "n_refiner_layers": 2, "n_heads": 30, "n_kv_heads": 30, "cap_feat_dim": 64,
            "axes_dims": (4, 4, 4), "axes_lens": (128, 64, 64),
        }  # fmt: skip
        text: Inputs = {"encoder_hidden_states": ("text", "cap_feat_dim")}
        return {
            "image": Variant(config=small, size=(9, 13), text=7, inputs=text),
            "masked": Variant(config=small, size=(9, 13), text=34, inputs={**text, TEXT_MASK: ("text",)}),
        }


def _run(layer: nn.Module, streams: tuple[str, ...], state: State) -> State:
    parts = [state.streams[stream] for stream in streams]
    tokens = torch.cat(parts, dim=1)
    # diffusers cannot rotate 0 tokens.
    rope = torch.cat([state.tables[stream]["rope"] for stream in streams], dim=1)
    out = layer(at_least_one(tokens), None, at_least_one(rope), state.context["temb"])
    sizes = [part.shape[1] for part in parts]
    return state.with_streams(**dict(zip(streams, out[:, : tokens.shape[1]].split(sizes, dim=1), strict=True)))


def _padded_length(tokens: int) -> int:
    return -(-tokens // _MULTIPLE) * _MULTIPLE


def _pad_rows(rows: Tensor, length: int) -> Tensor:
    """Pad ``[B, S, ...]`` with zeros to ``[B, length, ...]``, a length that does not depend on the values of masks."""
    return torch.cat([rows, rows.new_zeros(len(rows), length - rows.shape[1], *rows.shape[2:])], dim=1)


def _check_supported(config: Mapping[str, Any]) -> None:
    if config["siglip_feat_dim"] is not None:
        raise InvalidRequest(
            f"Z-Image-Omni (a config with siglip_feat_dim {config['siglip_feat_dim']}) is not supported: Z-Image and "
            "Z-Image-Turbo would work"
        )
    if len(config["all_patch_size"]) != 1 or tuple(config["all_f_patch_size"]) != (1,):
        raise InvalidRequest(
            f"Z-Image with all_patch_size {list(config['all_patch_size'])} and all_f_patch_size "
            f"{list(config['all_f_patch_size'])} is not supported: one patch size for single frames, [2] and [1], "
            "would work"
        )
