"""ComfyUI 0.33.0 with small text encoders and a small VAE of MiniMax-H3, which it builds at their published sizes.

It takes the depth of these from a file, and their widths from its own code.
"""

import dataclasses
from typing import Any

import comfy.ldm.minimax.audio_vae
import comfy.ldm.minimax.vae
import comfy.text_encoders.gemma4 as gemma4
import comfy.text_encoders.llama as llama
import comfy.text_encoders.qwen3vl as qwen3vl
import pytest
import torch
import torchaudio

TEXT = 80
"""The width of all text encoders, which is that of the texts that the tests' small MiniMax-H3 takes."""
VOCABULARY = 1024
"""The number of tokens that Gemma knows."""
_GEMMA = {
    "hidden_size": TEXT, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "vocab_size": VOCABULARY,
}  # fmt: skip
_GEMMA3_VISION = {
    **llama.GEMMA3_VISION_CONFIG, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
    "num_hidden_layers": 2,
}  # fmt: skip
_UNIFIED_VISION = {**gemma4.GEMMA4_UNIFIED_VISION_CONFIG, "mm_embed_dim": 32, "output_proj_dims": 32}
_VISION = {
    **gemma4.GEMMA4_VISION_CONFIG, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
    "num_hidden_layers": 2, "head_dim": 16,
}  # fmt: skip
_SOUND = {
    **gemma4.GEMMA4_AUDIO_CONFIG, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 48, "output_proj_dims": 32,
}  # fmt: skip


def smaller(cls: type, **values: Any) -> type:
    """Return a subclass of a dataclass with other values, some of which are fields and others attributes."""
    fields = {field.name: field.type for field in dataclasses.fields(cls)}
    of_fields = [(name, fields[name], value) for name, value in values.items() if name in fields]
    made = dataclasses.make_dataclass(cls.__name__, of_fields, bases=(cls,))
    for name in values.keys() - fields.keys():
        setattr(made, name, values[name])
    return made


def other_defaults(patch: pytest.MonkeyPatch, function: Any, **values: Any) -> None:
    """Set other defaults of a function's arguments."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount][-len(function.__defaults__) :]
    defaults = dict(zip(names, function.__defaults__, strict=True)) | values
    patch.setattr(function, "__defaults__", tuple(defaults.values()))


def shrink(patch: pytest.MonkeyPatch) -> None:
    """Let ComfyUI build small ones."""
    _shrink_qwen(patch)
    _shrink_gemma(patch)
    vae = comfy.ldm.minimax.vae
    other_defaults(patch, vae.ViT3DDecoder.__init__, num_layers=2, heads=2)
    small = {"ch": 32, "ch_mult": (1, 2, 1, 1, 1, 2), "num_res_blocks": 1, "tile_size": 64, "tile_overlap_min": 16}
    other_defaults(patch, vae.MiniMaxH3VideoVAE.__init__, **small)
    sound = comfy.ldm.minimax.audio_vae.MiniMaxH3AudioVAE
    other_defaults(patch, sound.__init__, encoder_dim=4, latent_dim=64, decoder_dim=128)
    _replace_torchaudio(patch)


def _shrink_qwen(patch: pytest.MonkeyPatch) -> None:
    config = smaller(
        llama.Qwen3VL_32BConfig, hidden_size=TEXT, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1
    )
    vision = {"hidden_size": 32, "intermediate_size": 48, "depth": 3, "deepstack_visual_indexes": [0, 1, 2]}
    patch.setitem(qwen3vl.QWEN3VL_CONFIGS, "qwen3vl_32b", config)
    patch.setitem(qwen3vl.QWEN3VL_VISION, "qwen3vl_32b", vision)
    patch.setitem(qwen3vl.QWEN3VL_VISION_COMMON, "num_heads", 2)


def _shrink_gemma(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(llama, "Gemma3_12B_Config", smaller(llama.Gemma3_12B_Config, **_GEMMA, vision_config=_GEMMA3_VISION))
    unified = smaller(
        gemma4.Gemma4_12B_Config, **_GEMMA, global_head_dim=16, num_global_key_value_heads=1, suppress_tokens=[],
        vision_config=_UNIFIED_VISION,
    )  # fmt: skip
    patch.setattr(gemma4, "Gemma4_12B_Config", unified)
    small = smaller(
        gemma4.Gemma4_E2B_Config, **_GEMMA, global_head_dim=16, hidden_size_per_layer_input=16, vision_config=_VISION,
        audio_config=_SOUND,
    )  # fmt: skip
    patch.setattr(gemma4, "Gemma4_E2B", gemma4._make_variant(small))
    for tokenizer in (gemma4.Gemma4SDTokenizer, gemma4.Gemma4UnifiedSDTokenizer):
        patch.setattr(tokenizer, "embedding_size", TEXT)


def _replace_torchaudio(patch: pytest.MonkeyPatch) -> None:
    """torchaudio is not built for every torch; what encoding a sound needs of it is here instead."""
    if not hasattr(torchaudio.functional, "resample"):
        patch.setattr(torchaudio.functional, "resample", _resample, raising=False)
        patch.setattr(torchaudio.transforms, "MelSpectrogram", _Spectrogram, raising=False)


def _resample(sound: torch.Tensor, rate: int, wanted: int, **options: Any) -> torch.Tensor:
    flat = sound.reshape(-1, 1, sound.shape[-1])
    found = torch.nn.functional.interpolate(flat, size=round(sound.shape[-1] * wanted / rate), mode="linear")
    return found.reshape(*sound.shape[:-1], -1)


class _Spectrogram(torch.nn.Module):
    """Means of neighbouring frequencies' magnitudes: not mel, but of the same shape."""

    def __init__(self, *, n_fft: int, hop_length: int, n_mels: int, **options: Any) -> None:
        super().__init__()
        self.n_fft, self.hop_length, self.n_mels = n_fft, hop_length, n_mels

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        """Return ``[..., n_mels, time]``."""
        flat = sound.reshape(-1, sound.shape[-1])
        window = torch.hann_window(self.n_fft)
        found = torch.stft(flat, self.n_fft, self.hop_length, window=window, return_complex=True).abs()
        means = torch.nn.functional.adaptive_avg_pool1d(found.movedim(1, 2), self.n_mels).movedim(1, 2)
        return means.reshape(*sound.shape[:-1], *means.shape[1:])
