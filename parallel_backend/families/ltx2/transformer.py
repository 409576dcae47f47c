"""LTX-2 (2, 2.3 and 2.5: picture and sound together) over diffusers' ``LTX2VideoTransformer3DModel``.

The sound is short (25 tokens a second), so every rank holds it whole. The picture's tokens attend to it locally; its
tokens attend to the picture's, which are split, through ``strategies/whole_queries.py``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn

from ...interfaces.family import AttentionSite, Block, Family, Variant
from ...interfaces.geometry import AUDIO, IMAGE, LATENT, SOUND, TIMESTEP, Extent, Geometry, Shape, Shapes
from ...interfaces.state import State
from ...interfaces.tensor_cuts import Cuts
from ...protocol.packing import pack
from ..shared.patchify import to_latent
from ..shared.streams import at_least_one
from . import guides
from .coords import video_coords
from .guides import KEPT, WEIGHTS
from .layer import CHANGES, Layer
from .numbers import FIXED, TEXTS, cuts_of, extent_of, geometry_of
from .variants import small_models

_TIME_LAYERS = {
    IMAGE: ("time_embed", "av_cross_attn_video_scale_shift", "av_cross_attn_video_a2v_gate"),
    AUDIO: ("audio_time_embed", "av_cross_attn_audio_scale_shift", "av_cross_attn_audio_v2a_gate"),
}
"""By stream, the layers that embed its timesteps for its own layers, for attention across, and for that one's gate."""


class LTX2(Family):
    """LTX-2 in three parts.

    Inputs, batch first: the picture's latent ``[B, 128, T, H, W]``, the sound's ``[B, C, N, F]`` with ``C * F`` = 128,
    the timestep ``[B]`` in 0..1, and

    - ``encoder_hidden_states`` and ``audio_encoder_hidden_states`` ``[B, L, D]``: the picture's text and the sound's,
      as the text connectors give them;
    - ``encoder_attention_mask`` ``[B, L]``: True for text tokens that are not padding;
    - ``frame_rate`` ``[B]``: frames per second, 25 by default;
    - ``video_coords`` ``[B, 3, S, 2]``: frame, row and column of the video at which each of the ``T * H * W`` tokens
      starts and ends. Keyframes have positions of their own;
    - ``token_weights`` ``[B, S]`` and ``audio_token_weights`` ``[B, N]``: factors on the timestep of each token of the
      picture and of the sound; 0 for clean ones;
    - ``gate_weights`` ``[B, 2]``: factors on the timestep of the gates: the picture's and the sound's largest weight.
      ComfyUI gates what comes from the other one by the other one's. Without it, as in diffusers, by its own;
    - ``heard_share`` ``[B]``: 1 if the sound attends to the picture after the picture has attended to the sound, as in
      newer versions of ComfyUI; 0, as without it, if both attend to what the other one was;
    - ``keyframes_mask`` ``[B, S]``: True for tokens of a single video frame, which LTX-2.5 marks;
    - ``guide_weights`` ``[B, S]``: -1 for tokens of no guide. For those of a guide the factor on their attention to
      tokens of no guide, and on these tokens' attention to them;
    - ``kept_mask`` ``[B, S]``: False for places of the latent that are no tokens: gaps of a guide of a coarser grid.
      Their prediction is 0;
    - ``attending_layers`` ``[B, layers]``: 1 for layers whose self-attention attends, 0 for those in which it passes on
      its values, as spatio-temporal guidance needs it;
    - ``across_shares`` ``[B, 2]``: factors on what the picture hears, and on what the sound sees;
    - ``reference_sound`` ``[B, R, 128]`` and ``reference_seconds`` ``[B, R, 2]``: tokens of a voice to imitate, and
      when each starts and ends.
    """

    defaults: ClassVar = {
        "in_channels": 128, "out_channels": 128, "num_attention_heads": 32, "attention_head_dim": 128,
        "cross_attention_dim": 4096, "vae_scale_factors": (8, 32, 32), "cross_attn_mod": False,
        "audio_in_channels": 128, "audio_out_channels": 128, "audio_num_attention_heads": 32,
        "audio_attention_head_dim": 64, "audio_cross_attention_dim": 2048, "audio_cross_attn_mod": False,
        "gated_attn": False, "audio_gated_attn": False, "num_layers": 48, "caption_channels": 3840,
        "causal_offset": 1, "timestep_scale_multiplier": 1000, "cross_attn_timestep_scale_multiplier": 1000,
        "rope_type": "interleaved", "use_prompt_embeddings": True, "use_keyframes_abs_pos_embedding": False,
        **FIXED,
    }  # fmt: skip
    first_layer: ClassVar = "proj_in"
    values_alive: ClassVar[float] = 22.0
    latents: ClassVar = (LATENT, SOUND)
    float16: ClassVar = False
    required: ClassVar = ("encoder_hidden_states", "audio_encoder_hidden_states")
    optional: ClassVar = (
        "encoder_attention_mask", "frame_rate", "video_coords", "token_weights", "audio_token_weights", "gate_weights",
        "heard_share", "keyframes_mask", "reference_sound", "reference_seconds", WEIGHTS, KEPT, "attending_layers",
        "across_shares",
    )  # fmt: skip

    @staticmethod
    def _describe(config: Mapping[str, Any]) -> Geometry:
        return geometry_of(config)

    @staticmethod
    def _cuts(config: Mapping[str, Any]) -> Cuts:
        return cuts_of(config)

    @staticmethod
    def _extent(config: Mapping[str, Any], geometry: Geometry, shapes: Shapes) -> Extent:
        return extent_of(config, geometry, shapes)

    def blocks_and_sites(self) -> tuple[list[Block], list[AttentionSite]]:
        layers = self.module.transformer_blocks
        blocks = [Block(run=self._modulate)]
        blocks += [Block(run=Layer(layer, i, self.arguments).run, modules=(layer,)) for i, layer in enumerate(layers)]
        sites = [
            AttentionSite(module=layer.attn1, streams=(IMAGE,), biased=True, keeps_values=True) for layer in layers
        ]
        across = [AttentionSite(module=each.video_to_audio_attn, streams=(IMAGE,), queries=(AUDIO,)) for each in layers]
        return blocks, [*sites, *across]

    def image(self, inputs: Mapping[str, Tensor]) -> Tensor:
        tokens: Tensor = self.module.proj_in(self._tokens(inputs))
        if "keyframes_mask" in inputs and self.config["use_keyframes_abs_pos_embedding"]:
            marked = inputs["keyframes_mask"].to(tokens.dtype)[:, :, None]
            tokens = tokens + marked * self.module.keyframes_abs_pos_embedding.to(tokens.dtype)
        return tokens

    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        module, seconds, sound = self.module, self._seconds(inputs), self._sound(inputs)
        video = video_coords(inputs, self.config)
        tables = {
            IMAGE: self._rotary(module.rope, video, "") | self._rotary(module.cross_attn_rope, video[:, :1], "cross_"),
            AUDIO: self._rotary(module.audio_rope, seconds, "")
            | self._rotary(module.cross_attn_audio_rope, seconds, "cross_"),
        }
        times_by_stream = self._times(inputs)
        context = self._text(inputs) | self._prompt(times_by_stream)
        context |= {name: inputs[name] for name in CHANGES if name in inputs}
        for stream, times in times_by_stream.items():
            for name, time in times.items():
                if time.shape[1] == 1:
                    context[f"{stream}.{name}"] = time
                else:
                    tables[stream][name] = time
        masks = {}
        if WEIGHTS in inputs:
            tables[IMAGE] |= guides.biases(inputs[WEIGHTS])
        if KEPT in inputs:
            masks[IMAGE] = inputs[KEPT]
            tables[IMAGE][KEPT] = inputs[KEPT]
        streams = {IMAGE: self.image(inputs), AUDIO: module.audio_proj_in(sound)}
        return State(streams=streams, tables=tables, masks=masks, context=context)

    def head(self, state: State) -> Tensor:
        module = self.module
        ends = {
            IMAGE: (module.scale_shift_table, module.norm_out, module.proj_out),
            AUDIO: (module.audio_scale_shift_table, module.audio_norm_out, module.audio_proj_out),
        }
        predicted = []
        for stream, (table, norm, project) in ends.items():
            shift, scale = (table + _rows(state, stream, "embedded")[:, :, None]).unbind(2)
            predicted.append(project(norm(state.streams[stream]) * (1 + scale) + shift))
        if KEPT in state.tables[IMAGE]:
            predicted[0] = predicted[0] * state.tables[IMAGE][KEPT][:, :, None]
        return torch.cat(predicted, dim=1)

    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        return to_latent(tokens, size, self.geometry, "pt ph pw c")

    def prediction(self, tokens: Tensor, sizes: Sequence[Shape]) -> Tensor:
        size, (channels, frames, _) = sizes
        count = math.prod(size)
        sound = tokens[:, count : count + frames]
        return pack([self.unpatchify(tokens[:, :count], size), rearrange(sound, "b t (c f) -> b c t f", c=channels)])

    def stock(self, inputs: Mapping[str, Tensor]) -> Tensor:
        picture_text, sound_text = self._texts(inputs)
        times = self._times(inputs)
        mask = inputs.get("keyframes_mask")
        sigma = {stream: each["timestep"].amax(dim=1) for stream, each in times.items()}
        with guides.masked(self.module, inputs):
            predicted = self.module(
                hidden_states=self._tokens(inputs),
                audio_hidden_states=self._sound(inputs),
                encoder_hidden_states=picture_text,
                audio_encoder_hidden_states=sound_text,
                timestep=times[IMAGE]["timestep"],
                audio_timestep=times[AUDIO]["timestep"],
                sigma=sigma[IMAGE],
                audio_sigma=sigma[AUDIO],
                encoder_attention_mask=inputs.get("encoder_attention_mask"),
                audio_encoder_attention_mask=inputs.get("encoder_attention_mask"),
                video_coords=video_coords(inputs, self.config),
                audio_coords=self._seconds(inputs),
                video_keyframes_mask=None if mask is None else mask[:, :, None],
                return_dict=False,
            )
        sizes = inputs[LATENT].shape[2:], inputs[SOUND].shape[1:]
        picture, sound = predicted
        kept = picture * inputs[KEPT][:, :, None] if KEPT in inputs else picture
        return self.prediction(torch.cat([kept, sound], dim=1), sizes)

    def _tokens(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return rearrange(inputs[LATENT].to(self.dtype), "b c t h w -> b (t h w) c")

    def _sound(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the sound's tokens ``[B, N, 128]``, and a reference's after them."""
        tokens = rearrange(inputs[SOUND].to(self.dtype), "b c t f -> b t (c f)")
        reference = inputs.get("reference_sound")
        return tokens if reference is None else torch.cat([tokens, reference.to(self.dtype)], dim=1)

    def _seconds(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return when each token of ``_sound`` starts and ends, ``[B, 1, N, 2]``."""
        batch, _, frames, _ = inputs[SOUND].shape
        seconds: Tensor = self.module.audio_rope.prepare_audio_coords(batch, frames, inputs[SOUND].device)
        reference = inputs.get("reference_seconds")
        return seconds if reference is None else torch.cat([seconds, reference.float()[:, None]], dim=2)

    def _texts(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return tuple(inputs[name].to(self.dtype) for name in TEXTS)

    def _text(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the entries of the context that hold text."""
        module, (picture, sound) = self.module, self._texts(inputs)
        if self.config["use_prompt_embeddings"]:
            picture, sound = module.caption_projection(picture), module.audio_caption_projection(sound)
        context = {f"{IMAGE}.text": picture, f"{AUDIO}.text": sound}
        if "encoder_attention_mask" in inputs:
            context["mask"] = ((1 - inputs["encoder_attention_mask"].to(self.dtype)) * -10000.0).unsqueeze(1)
        return context

    def _prompt(self, times: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the modulation of the text (2.3), by the largest timestep of the stream that attends to it."""
        layers = {IMAGE: "prompt_adaln", AUDIO: "audio_prompt_adaln"}
        return {
            f"{stream}.prompt": self._time(name, times[stream]["timestep"].amax(dim=1, keepdim=True))[0]
            for stream, name in layers.items()
            if hasattr(self.module, name)
        }

    def _rotary(self, layer: nn.Module, coords: Tensor, prefix: str) -> dict[str, Tensor]:
        """Return a rotary table ``[B, S, D]``, or ``[B, S, heads, D]`` where halves of a head rotate."""
        split = self.config["rope_type"] == "split"
        tables = zip(("cos", "sin"), layer(coords), strict=True)
        return {prefix + name: table.transpose(1, 2) if split else table for name, table in tables}

    def _times(self, inputs: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Return by stream its timesteps in 0..1000 and those of its gate: ``[B, 1]``, or ``[B, S]`` for each token."""
        time, scale = inputs[TIMESTEP].float()[:, None], self.config["timestep_scale_multiplier"]
        gates = inputs.get("gate_weights")
        found = {}
        for i, (stream, name) in enumerate(((IMAGE, "token_weights"), (AUDIO, "audio_token_weights"))):
            times = time * inputs[name].float() if name in inputs else time
            if stream == AUDIO and "reference_sound" in inputs:
                tokens, clean = inputs[SOUND].shape[2], inputs["reference_sound"].shape[1]
                times = torch.cat([times.expand(-1, tokens), times.new_zeros(len(times), clean)], dim=1)
            gate = times if gates is None else time * gates.float()[:, 1 - i : 2 - i]
            found[stream] = {"timestep": times * scale, "gate_timestep": gate * scale}
        return found

    def _modulate(self, state: State) -> State:
        """Embed the timesteps: of all tokens at once, or of this rank's where each token has its own."""
        tables, context = {name: dict(entries) for name, entries in state.tables.items()}, dict(state.context)
        factor = self.config["cross_attn_timestep_scale_multiplier"] / self.config["timestep_scale_multiplier"]
        for stream, (own, across, gate) in _TIME_LAYERS.items():
            time, gate_time = (_rows(state, stream, name) for name in ("timestep", "gate_timestep"))
            temb, embedded = self._time(own, time)
            found = {"temb": temb, "embedded": embedded, "across": self._time(across, time)[0]}
            found["gate"], _ = self._time(gate, gate_time * factor)
            for name, rows in found.items():
                if f"{stream}.{'gate_' if name == 'gate' else ''}timestep" in context:
                    context[f"{stream}.{name}"] = rows
                else:
                    tables[stream][name] = rows
        return replace(state, tables=tables, context=context)

    def _time(self, layer: str, time: Tensor) -> tuple[Tensor, Tensor]:
        """Embed timesteps ``[B, N]``: the modulation ``[B, N, values]`` and the embedding ``[B, N, D]``."""
        found = getattr(self.module, layer)(time.flatten(), batch_size=len(time), hidden_dtype=self.dtype)
        modulation, embedded = (rearrange(rows, "(b n) d -> b n d", b=len(time)) for rows in found)
        return modulation, embedded

    def arguments(self, state: State) -> dict[str, Any]:
        """Return the arguments of a layer. A rank without tokens of the picture gives it a row that nothing reads."""
        context, arguments = state.context, dict[str, Any]()
        for stream, prefix, across in ((IMAGE, "", "video"), (AUDIO, "audio_", "audio")):
            rows = partial(_padded_rows, state, stream)
            kind = f"_{prefix}".rstrip("_")
            arguments |= {
                f"{prefix}hidden_states": at_least_one(state.streams[stream]),
                f"{prefix}encoder_hidden_states": context[f"{stream}.text"],
                f"{prefix}encoder_attention_mask": context.get("mask"),
                f"temb{kind}": rows("temb"),
                f"temb_ca{kind}_scale_shift": rows("across"),
                f"temb_ca{kind}_gate": rows("gate"),
                f"temb_prompt{kind}": context.get(f"{stream}.prompt"),
                f"{across}_rotary_emb": self._pair(rows, ""),
                f"ca_{across}_rotary_emb": self._pair(rows, "cross_"),
            }
        return arguments

    def _pair(self, rows: Callable[[str], Tensor], prefix: str) -> tuple[Tensor, ...]:
        """Return a stream's rotary table as layers take it."""
        pair = rows(f"{prefix}cos"), rows(f"{prefix}sin")
        return tuple(each.transpose(1, 2) for each in pair) if self.config["rope_type"] == "split" else pair

    @staticmethod
    def variants() -> dict[str, Variant]:
        return small_models()


def _rows(state: State, stream: str, name: str) -> Tensor:
    """Return a tensor of a stream: ``[B, 1, ...]`` of the context, or ``[B, S, ...]`` of its tables."""
    found = state.context.get(f"{stream}.{name}")
    return state.tables[stream][name] if found is None else found


def _padded_rows(state: State, stream: str, name: str) -> Tensor:
    return at_least_one(_rows(state, stream, name))
