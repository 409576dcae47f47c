"""LTX-2's static numbers: what its config and the shapes of its inputs say, before any weight is loaded."""

import math
from collections.abc import Mapping
from typing import Any

from ...errors import InvalidRequest
from ...interfaces.geometry import AUDIO, IMAGE, LATENT, SOUND, AllReduce, AttentionKind, Extent, Geometry, Shapes
from ...interfaces.tensor_cuts import ColumnParallel, Cuts, HeadOutputs, HeadsNorm, RowParallel, attention_cuts
from ..shared.patchify import check_text, second_size

FIXED: Mapping[str, Any] = {
    "patch_size": 1, "patch_size_t": 1, "audio_patch_size": 1, "audio_patch_size_t": 1,
    "activation_fn": "gelu-approximate", "qk_norm": "rms_norm_across_heads", "norm_elementwise_affine": False,
    "attention_bias": True, "attention_out_bias": True,
}  # fmt: skip
"""Config values with only the default supported: no checkpoint has another."""

TEXTS = ("encoder_hidden_states", "audio_encoder_hidden_states")
"""Inputs of the picture's text and of the sound's."""

_TEXT = "text"


def geometry_of(config: Mapping[str, Any]) -> Geometry:
    """Return ``Family.describe`` of a complete config.

    Raises:
        InvalidRequest: the adapter does not support the model.
    """
    _check_config(config)
    layers, width, audio_width = config["num_layers"], _width(config, ""), _width(config, "audio_")
    heads, audio_heads = _heads(config, ""), _heads(config, "audio_")
    norms = ((IMAGE, 5), (AUDIO, 5), (_TEXT, 2))
    return Geometry(
        channels=config["in_channels"],
        out_channels=config["out_channels"] or config["in_channels"],
        patch=(1, 1, 1),
        layers=layers,
        sites=(
            AttentionKind(streams=(IMAGE,), heads=heads[0], head_dim=heads[1], count=layers, biased=True),
            AttentionKind(
                streams=(IMAGE,), queries=(AUDIO,), heads=audio_heads[0], head_dim=audio_heads[1], count=layers
            ),
        ),
        all_reduces=(
            AllReduce(tokens=IMAGE, width=width, count=4 * layers, min_rows=1),
            AllReduce(tokens=AUDIO, width=audio_width, count=4 * layers),
            *(
                AllReduce(tokens=tokens, width=1, count=count * layers, itemsize=4, min_rows=int(tokens == IMAGE))
                for tokens, count in norms
            ),
        ),
    )


def cuts_of(config: Mapping[str, Any]) -> Cuts:
    """Return ``Family.cuts``. Rotary tables hold the features of all heads, with different angles for each."""
    cuts: dict[str, Any] = {}
    attentions = {
        "attn1": "", "attn2": "", "audio_attn1": "audio_", "audio_attn2": "audio_", "audio_to_video_attn": "audio_",
        "video_to_audio_attn": "audio_",
    }  # fmt: skip
    for name, kind in attentions.items():
        (heads, head_dim), prefix = _heads(config, kind), f"transformer_blocks.*.{name}"
        cuts |= attention_cuts(prefix, heads, head_dim)
        cuts |= {f"{prefix}.norm_{x}": HeadsNorm((heads, head_dim)) for x in "qk"}
        if config["gated_attn" if name in _GATED_AS_PICTURE else "audio_gated_attn"]:
            cuts[f"{prefix}.to_gate_logits"] = ColumnParallel(((heads, 1),))
    for kind, ff in (("", "ff"), ("audio_", "audio_ff")):
        hidden = ((4 * _width(config, kind), 1),)
        cuts[f"transformer_blocks.*.{ff}.net.0.proj"] = ColumnParallel(hidden)
        cuts[f"transformer_blocks.*.{ff}.net.2"] = RowParallel(hidden)
    tables = {"rope": "", "audio_rope": "audio_", "cross_attn_rope": "audio_", "cross_attn_audio_rope": "audio_"}
    for name, kind in tables.items():
        heads, head_dim = _heads(config, kind)
        split = config["rope_type"] == "split"
        cuts[name] = HeadOutputs((heads, 1), dim=1) if split else HeadOutputs((heads, head_dim))
    return cuts


def extent_of(config: Mapping[str, Any], geometry: Geometry, shapes: Shapes) -> Extent:
    """Return ``Family.extent`` of a complete config.

    Raises:
        InvalidRequest: an input does not fit.
    """
    batch, _, *size = shapes[LATENT]
    tokens, text = math.prod(size), _text_tokens(config, shapes)
    sound, reference = _sound_tokens(config, shapes), second_size(shapes, "reference_sound", 0)
    _check(shapes, "encoder_attention_mask", (batch, text), f"the text has {text} tokens")
    for name in ("frame_rate", "heard_share"):
        _check(shapes, name, (batch,), "one number per sample is needed")
    _check(shapes, "video_coords", (batch, 3, tokens, 2), f"the latent has {tokens} tokens with 3 coordinates")
    for name in ("token_weights", "keyframes_mask", "guide_weights", "kept_mask"):
        _check(shapes, name, (batch, tokens), f"the latent has {tokens} tokens")
    _check(shapes, "audio_token_weights", (batch, sound), f"the sound has {sound} tokens")
    for name in ("gate_weights", "across_shares"):
        _check(shapes, name, (batch, 2), "one number for the picture and one for the sound is needed")
    layers = config["num_layers"]
    _check(shapes, "attending_layers", (batch, layers), f"the model has {layers} layers")
    _check(shapes, "reference_sound", (batch, reference, config["audio_in_channels"]), "these are tokens of a sound")
    _check(shapes, "reference_seconds", (batch, reference, 2), f"the reference has {reference} tokens")
    if ("reference_sound" in shapes) != ("reference_seconds" in shapes):
        raise InvalidRequest("reference_sound and reference_seconds need each other: give both or none")
    return Extent(
        streams={IMAGE: tokens, AUDIO: sound + reference},
        values=geometry.out_channels,
        context={_TEXT: text},
        whole=frozenset({AUDIO}),
        predicted=(IMAGE, AUDIO),
        biased="guide_weights" in shapes,
    )


def _text_tokens(config: Mapping[str, Any], shapes: Shapes) -> int:
    """Return the number of tokens of the text, which is that of the picture's and of the sound's."""
    text, sound_text = (
        check_text(shapes[name], width, name) for name, width in zip(TEXTS, text_widths(config), strict=True)
    )
    if text != sound_text:
        raise InvalidRequest(
            f"the picture's text has {text} tokens and the sound's {sound_text}: both come from one prompt, so give "
            "equally many"
        )
    return text


def text_widths(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the widths of the picture's and the sound's text."""
    if config["use_prompt_embeddings"]:
        return config["caption_channels"], config["caption_channels"]
    return config["cross_attention_dim"], config["audio_cross_attention_dim"]


_GATED_AS_PICTURE = ("attn1", "attn2", "audio_to_video_attn")
"""Attention whose queries are the picture's tokens, by which diffusers' config says whether it has gates."""


def _check_config(config: Mapping[str, Any]) -> None:
    wanted = {
        **FIXED,
        "audio_num_attention_heads": config["num_attention_heads"],
        "audio_cross_attention_dim": _width(config, "audio_"),
        "cross_attention_dim": _width(config, ""),
        "audio_cross_attn_mod": config["cross_attn_mod"],
        "audio_out_channels": config["out_channels"],
    }
    for name, value in wanted.items():
        if config[name] != value:
            raise InvalidRequest(f"LTX-2 with {name} {config[name]!r} is not supported: {value!r} would work")


def _heads(config: Mapping[str, Any], kind: str) -> tuple[int, int]:
    return config[f"{kind}num_attention_heads"], config[f"{kind}attention_head_dim"]


def _width(config: Mapping[str, Any], kind: str) -> int:
    return math.prod(_heads(config, kind))


def _sound_tokens(config: Mapping[str, Any], shapes: Shapes) -> int:
    shape, values = shapes[SOUND], config["audio_in_channels"]
    if len(shape) != 4 or shape[2] < 1 or shape[1] * shape[3] != values:
        raise InvalidRequest(
            f"{SOUND} of shape {list(shape)} does not fit this model, which takes [batch, channels, tokens, bins] with "
            f"{values} channels times bins, such as [batch, 8, tokens, {values // 8}]"
        )
    return shape[2]


def _check(shapes: Shapes, name: str, wanted: tuple[int, ...], reason: str) -> None:
    """Check that the input ``name``, if there is one, has the shape ``wanted``."""
    shape = shapes.get(name, wanted)
    if tuple(shape) != wanted:
        raise InvalidRequest(f"{name} of shape {list(shape)} does not fit: {reason}, so {list(wanted)} would work")
