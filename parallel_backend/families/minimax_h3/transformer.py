"""MiniMax-H3 over diffusers' ``MiniMaxH3Transformer3DModel``, whole and pruned."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from ...interfaces.family import AttentionSite, Block, Family, Inputs, Variant
from ...interfaces.geometry import IMAGE, LATENT, SOUND, TEXT, AttentionKind, Extent, Geometry, Shape, Shapes
from ...interfaces.state import State
from ...interfaces.tensor_cuts import ColumnParallel, Cuts, RowParallel, attention_cuts
from ...protocol.packing import pack
from ..shared import joint_attention
from ..shared.patchify import to_latent, to_tokens
from ..shared.streams import at_least_one
from . import rows, times

_VALUES = "c pt ph pw"
"""The order of the values in a row of the picture."""


class MiniMaxH3(Family):
    """MiniMax-H3 in three parts. One stream of layers sees text, picture and sound.

    The image stream has all rows that are no text: the picture's patches, the sound's times (first all of the left
    channel, then all of the right one), then given rows of pictures, and of sounds. What modulates a row follows from
    its own time and from what it is.

    Inputs, batch first: the latents ``[B, 24, T, H, W]`` and ``[B, 32, 2, N]``, the timestep ``[B]`` in 0..1000, and

    - ``encoder_hidden_states`` ``[B, L, D]``: text, or what the model's own text layers have made of it;
    - ``video_ids`` and ``sound_ids`` ``[B, rows, 3]``: positions in time, height and width;
    - ``text_labels`` ``[B, L]``: what a token is: 1 for text, 0 for a picture's place in it. Without it all are 1;
    - ``video_rows`` ``[B, rows, 96]``, ``sound_rows`` ``[B, rows, 32]``, and their positions ``video_rows_ids`` and
      ``sound_rows_ids``: keyframes and references;
    - ``conditioning_times`` ``[B, 2]``: the least times of both. Without it they are the published ones;
    - ``mask_levels`` ``[B, K]`` and ``mask_labels`` ``[B, rows]``: how much of the noise each row of the picture has,
      a number in 0..1 among the levels, and likewise ``sound_mask_levels`` and ``sound_mask_labels``;
    - ``sigma_shifts`` ``[B, 2]``: shifts of both schedules. Without it they are the published ones;
    - ``sound_scale`` ``[B]``: how the sampler scales the sound, if it does (see ``times.py``).
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_attention_heads": 56,
        "attention_head_dim": 128,
        "hidden_size": 5376,
        "num_layers": 50,
        "ffn_dim": 14336,
        "in_channels": 24,
        "audio_in_channels": 32,
        "patch_size": (1, 2, 2),
        "text_dim": 5120,
    }
    first_layer: ClassVar[str] = "context_embedder"  # the patches' own layers are float32
    values_alive: ClassVar[float] = 16.9
    latents: ClassVar[tuple[str, ...]] = (LATENT, SOUND)
    float16: ClassVar[bool] = False
    required: ClassVar[tuple[str, ...]] = (rows.TEXT, rows.VIDEO_IDS, rows.SOUND_IDS)
    optional: ClassVar[tuple[str, ...]] = rows.OPTIONAL
    levels: ClassVar[Mapping[str, str]] = rows.LEVELS

    @staticmethod
    def _describe(config: Mapping[str, Any]) -> Geometry:
        heads, head_dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
        return Geometry(
            channels=config["in_channels"],
            out_channels=config["in_channels"],
            patch=tuple(config["patch_size"]),
            layers=layers,
            sites=(AttentionKind(streams=(TEXT, IMAGE), heads=heads, head_dim=head_dim, count=layers),),
            all_reduces=joint_attention.all_reduces(
                (TEXT, IMAGE), config["hidden_size"], double=layers, single=0, padded_stream=IMAGE
            ),
        )

    @staticmethod
    def _cuts(config: Mapping[str, Any]) -> Cuts:
        heads, hidden = (config["num_attention_heads"], config["attention_head_dim"]), (config["ffn_dim"], 1)
        return {
            **attention_cuts("transformer_blocks.*.attn", *heads),
            "transformer_blocks.*.ff.net.0.proj": ColumnParallel((hidden, hidden)),
            "transformer_blocks.*.ff.net.2": RowParallel((hidden,)),
        }

    @staticmethod
    def _extent(config: Mapping[str, Any], geometry: Geometry, shapes: Shapes) -> Extent:
        text, image = rows.check(config, geometry, shapes)
        return Extent(streams={TEXT: text, IMAGE: image}, values=_values(config, geometry))

    @staticmethod
    def _embedding_sizes(config: Mapping[str, Any]) -> Mapping[str, int]:
        return {rows.TEXT_LABELS: rows.TAGS}

    def blocks_and_sites(self) -> tuple[list[Block], list[AttentionSite]]:
        layers = self.module.transformer_blocks
        blocks = [Block(run=partial(_run, layer), modules=(layer,)) for layer in layers]
        return blocks, [AttentionSite(module=each.attn, streams=(TEXT, IMAGE)) for each in layers]

    def image(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Patches and sounds are embedded in float32."""
        picture, sound = self._rows(inputs)
        embedded = [_in_own_dtype(self.module.proj_in, picture), _in_own_dtype(self.module.audio_proj_in, sound)]
        predicted, given = [], []
        for tokens, ids in zip(embedded, (rows.VIDEO_IDS, rows.SOUND_IDS), strict=True):
            count = inputs[ids].shape[1]
            predicted.append(tokens[:, :count])
            given.append(tokens[:, count:])
        return torch.cat(predicted + given, dim=1).to(self.dtype)

    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        """As in ComfyUI, the latent is padded to whole patches, and the timestep stays float32."""
        tables = {}
        for name, ids, modulation in zip(
            (TEXT, IMAGE), rows.positions(inputs), rows.modulations(inputs), strict=True
        ):  # fmt: skip
            tables[name] = {**joint_attention.rope(self.module.rope, ids), "modulation": modulation}
        context = {"temb": self._temb(times.times(inputs))}
        return State(streams={TEXT: self._text(inputs), IMAGE: self.image(inputs)}, tables=tables, context=context)

    def head(self, state: State) -> Tensor:
        """Both outputs are computed for every row, in float32."""
        module, table, values = self.module, state.tables[IMAGE], _values(self.config, self.geometry)
        modulation, temb = table["modulation"], state.context["temb"]
        image, time = state.streams[IMAGE], _in_batch(modulation // rows.TAGS, temb.shape[1])
        tokens = module.norm_out(image.flatten(0, 1)[None], temb.flatten(0, 1), time).view(image.shape)
        picture, sound = (
            functional.pad(out, (0, values - out.shape[2]))
            for out in (_in_own_dtype(module.proj_out, tokens), _in_own_dtype(module.audio_proj_out, tokens))
        )
        is_sound = (modulation % rows.TAGS == rows.SOUND_TAG)[..., None]
        return torch.where(is_sound, sound, picture).to(self.dtype)

    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        """Return the picture alone, in ComfyUI's sign."""
        count, width = math.prod(self.geometry.grid(size)), self.geometry.channels * math.prod(self.geometry.patch)
        return -to_latent(tokens[:, :count, :width], size, self.geometry, _VALUES)

    def prediction(self, tokens: Tensor, sizes: Sequence[Shape]) -> Tensor:
        """Drop given rows, and the padding of the sound's values."""
        size, (channels, ears, length) = sizes
        first = math.prod(self.geometry.grid(size))
        sound = tokens[:, first : first + ears * length, :channels]
        return pack([self.unpatchify(tokens, size), -rearrange(sound, "b (e t) c -> b c e t", e=ears)])

    def followed(self, inputs: Mapping[str, Tensor], shapes: Sequence[Shape]) -> tuple[Tensor, Tensor] | None:
        """The sound is followed on the picture's schedule, as ComfyUI's class does around its forward."""
        if times.SOUND_SCALE not in inputs:
            return None
        counts = [math.prod(shape) for shape in shapes]
        factors = zip((1.0, 0.0), times.followed(inputs), strict=True)
        of_out, of_input = (
            torch.cat([sound.new_full((len(sound), counts[0]), picture), sound[:, None].expand(-1, counts[1])], dim=1)
            for picture, sound in factors
        )
        return of_out, of_input

    def stock(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """diffusers' forward takes one sample at a time, whose rows may have any order."""
        samples = range(len(inputs[LATENT]))
        tokens = [self._stock_rows({name: each[i : i + 1] for name, each in inputs.items()}) for i in samples]
        return self.prediction(torch.cat(tokens), [inputs[LATENT].shape[2:], inputs[SOUND].shape[1:]])

    def _stock_rows(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return what diffusers' forward predicts for a sample's picture and sound, ``[1, S, values]``."""
        picture, sound = self._rows(inputs)
        ids, modulation = torch.cat(rows.positions(inputs)), torch.cat(rows.modulations(inputs), dim=1)[0]
        text, predicted = inputs[rows.TEXT], inputs[rows.VIDEO_IDS].shape[1]
        places = torch.arange(len(ids), device=ids.device)
        tags = modulation % rows.TAGS
        is_text = places < text.shape[1]
        is_sound = (tags == rows.SOUND_TAG) & ~is_text
        out, sounds = self.module(
            hidden_states=picture,
            audio_hidden_states=sound,
            encoder_hidden_states=text,
            timestep=times.times(inputs)[0],
            timestep_indices=modulation // rows.TAGS,
            token_tags=tags,
            position_ids=ids,
            video_indices=places[~is_text & ~is_sound],
            audio_indices=places[is_sound],
            text_indices=places[is_text],
            return_dict=False,
        )
        values = _values(self.config, self.geometry)
        both = [functional.pad(each, (0, values - each.shape[2])) for each in (out[:, :predicted], sounds)]
        return torch.cat(both, dim=1).to(self.dtype)

    def _rows(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the picture's rows and the sound's, each followed by given ones, in float32."""
        picture = [to_tokens(inputs[LATENT].float(), self.geometry.patch, _VALUES)]
        sound = [rearrange(times.carried(inputs, inputs[SOUND]).float(), "b c e t -> b (e t) c")]
        for parts, name in ((picture, rows.VIDEO_ROWS), (sound, rows.SOUND_ROWS)):
            parts += [inputs[name].float()] if name in inputs else []
        return torch.cat(picture, dim=1), torch.cat(sound, dim=1)

    def _temb(self, values: Tensor) -> Tensor:
        """Return the embeddings ``[B, T, D]`` of times ``[B, T]``."""
        module = self.module
        embedded = _in_own_dtype(module.time_embedder, module.time_proj(values.flatten()))
        return embedded.view(*values.shape, -1)

    def _text(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Run the model's own text layers, unless ComfyUI has: it takes text of the stream's width for theirs.

        They have 0.8 billion weights and do not depend on time, so a run computes them once.
        """
        text = inputs[rows.TEXT]
        if text.shape[2] == self.config["hidden_size"]:
            return text.to(self.dtype)
        embedder, refiner = self.module.context_embedder, self.module.token_refiner
        refined: Tensor = self.once(TEXT, (text,), lambda: refiner(embedder(text.to(self.dtype))))
        return refined

    @staticmethod
    def variants() -> dict[str, Variant]:
        small = {
            "num_layers": 2, "num_attention_heads": 56, "attention_head_dim": 8, "hidden_size": 96,
            "num_refiner_layers": 1, "ffn_dim": 403, "text_dim": 40, "freq_dim": 32, "time_embed_hidden_dim": 48,
            "time_embed_dim": 24, "rope_freq_dim": 1,
        }  # fmt: skip
        latents: Inputs = {
            rows.TEXT: ("text", "text_dim"), SOUND: (32, 2, 7), rows.VIDEO_IDS: ("tokens", 3), rows.SOUND_IDS: (14, 3),
        }  # fmt: skip
        given: Inputs = {
            rows.VIDEO_ROWS: (12, 96), rows.VIDEO_ROWS_IDS: (12, 3), rows.SOUND_ROWS: (6, 32),
            rows.SOUND_ROWS_IDS: (6, 3),
        }  # fmt: skip
        masks: Inputs = {
            rows.MASK_LABELS: ("tokens",), times.MASK_LEVELS: (10,), rows.SOUND_MASK_LABELS: (14,),
            times.SOUND_MASK_LEVELS: (10,),
        }  # fmt: skip
        shape: dict[str, Any] = {"size": (3, 7, 9), "text": 7}
        return {
            "t2v": Variant(config=small, inputs=latents, **shape),
            "pruned": Variant(config=small | {"adaln_curve_grid": 33}, inputs=latents, **shape),
            "references": Variant(config=small, inputs={**latents, **given}, **shape),
            "masked": Variant(config=small, inputs={**latents, **masks}, **shape),
        }


def _run(layer: nn.Module, state: State) -> State:
    """Run the samples as one sequence: each has its own times."""
    text, image = state.streams[TEXT], at_least_one(state.streams[IMAGE])
    tokens = torch.cat([text, image], dim=1)
    cos, sin, modulation = (
        torch.cat([state.tables[TEXT][name], at_least_one(state.tables[IMAGE][name])], dim=1)
        for name in ("cos", "sin", "modulation")
    )
    temb = state.context["temb"]
    row = _in_batch(modulation, temb.shape[1] * rows.TAGS)
    out = layer(tokens.flatten(0, 1)[None], temb.flatten(0, 1), row, (cos[0], sin[0])).view(tokens.shape)
    start = text.shape[1]
    text, image = out.split([start, tokens.shape[1] - start], dim=1)
    return state.with_streams(**{TEXT: text, IMAGE: image[:, : state.streams[IMAGE].shape[1]]})


def _in_batch(numbers: Tensor, count: int) -> Tensor:
    """Return numbers of rows ``[B, S]``, of which each sample has ``count``, as numbers ``[B * S]`` among all."""
    first = torch.arange(len(numbers), device=numbers.device) * count
    return (numbers + first[:, None]).flatten()


def _values(config: Mapping[str, Any], geometry: Geometry) -> int:
    """Return the values of a predicted row. The narrower of picture and sound is padded."""
    sound: int = config["audio_in_channels"]
    return max(geometry.channels * math.prod(geometry.patch), sound)


def _in_own_dtype(layer: nn.Module, tokens: Tensor) -> Tensor:
    """Return what a layer computes in the dtype of its weights, which may be float32 whatever the activations are."""
    out: Tensor = layer(tokens.to(next(layer.parameters()).dtype))
    return out
