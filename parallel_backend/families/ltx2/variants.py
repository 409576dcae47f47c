"""Small models of every kind of LTX-2."""

from ...interfaces.family import Inputs, Variant
from ...interfaces.geometry import SOUND
from .guides import KEPT, WEIGHTS
from .numbers import TEXTS


def small_models() -> dict[str, Variant]:
    """Return ``Family.variants``."""
    small = {
        "num_layers": 2, "num_attention_heads": 32, "attention_head_dim": 8, "cross_attention_dim": 256,
        "audio_num_attention_heads": 32, "audio_attention_head_dim": 4, "audio_cross_attention_dim": 128,
        "caption_channels": 24, "in_channels": 20, "out_channels": 20, "audio_in_channels": 20,
        "audio_out_channels": 20, "rope_type": "split",
    }  # fmt: skip
    newer = {
        **small, "gated_attn": True, "audio_gated_attn": True, "cross_attn_mod": True, "audio_cross_attn_mod": True,
        "use_prompt_embeddings": False, "perturbed_attn": True,
    }  # fmt: skip
    newest = {
        **newer, "ff_bias": False, "use_prompt_adaln_single": False, "use_keyframes_abs_pos_embedding": True,
    }  # fmt: skip
    sound: Inputs = {SOUND: ("audio_in_channels", 11, 1), "encoder_attention_mask": ("text",), "frame_rate": ()}
    of_both: Inputs = {**sound, **dict.fromkeys(TEXTS, ("text", "caption_channels"))}
    widths = zip(TEXTS, ("cross_attention_dim", "audio_cross_attention_dim"), strict=True)
    of_each: Inputs = {**sound, **{name: ("text", width) for name, width in widths}}
    given: Inputs = {"video_coords": (3, "tokens", 2), "token_weights": ("tokens",), "audio_token_weights": (11,)}
    size = (3, 5, 7)
    guided: Inputs = {**given, WEIGHTS: ("tokens",), KEPT: ("tokens",)}
    return {
        "2": Variant(config=small, size=size, text=7, inputs=of_both),
        "2 interleaved": Variant(config={**small, "rope_type": "interleaved"}, size=size, text=7, inputs=of_both),
        "2.3 keyframes": Variant(config=newer, size=size, text=7, inputs={**of_each, **given}),
        "2.3 guides": Variant(config=newer, size=size, text=7, inputs={**of_each, **guided}),
        "2.5": Variant(config=newest, size=size, text=7, inputs={**of_each, "keyframes_mask": ("tokens",)}),
    }
