"""MiniMax-H3, whole and pruned, with keyframes, references and noise masks."""

import re
from typing import Any

import torch

from natives.case import Case, Random, Sampling, Weights

CONFIG = {
    "num_attention_heads": 6, "attention_head_dim": 32, "hidden_size": 128, "num_layers": 2, "num_refiner_layers": 1,
    "ffn_dim": 192, "text_dim": 80, "freq_dim": 64, "time_embed_hidden_dim": 96, "time_embed_dim": 48,
    "rope_freq_dim": 4,
}  # fmt: skip
UNET = {
    "image_model": "minimax_h3", "num_layers": 2, "token_refiner_num_layers": 1, "hidden_size": 128, "latents_dim": 24,
    "audio_latents_dim": 32, "attention_head_dim": 32, "num_attention_heads": 6, "ffn_hidden_size": 192, "text_dim": 80,
    "time_embed_dim": 48, "rope_inv_freq_len": 4,
}  # fmt: skip
WHOLE = {"timestep_input_dim": 64, "time_embed_hidden_size": 96}
PRUNED = {"adaln_curve_grid": 65}
NAMES = (
    (r"^token_refiner\.blocks", "token_refiner.refiner_blocks"), (r"^blocks", "transformer_blocks"),
    (r"^video_patch_proj", "proj_in"), (r"^audio_patch_proj", "audio_proj_in"),
    (r"^condition_proj", "context_embedder"), (r"^adaln_t_table", "time_embedder.table"),
    (r"^time_embedder\.proj_in", "time_embedder.linear_1"), (r"^time_embedder\.proj_out", "time_embedder.linear_2"),
    (r"^final_layer\.video_out", "proj_out"), (r"^final_layer\.audio_out", "audio_proj_out"),
    (r"^final_layer\.adaln_proj", "norm_out"), (r"^final_layer", "norm_out"),
    (r"\.attn\.([qk])_norm", r".attn.norm_\1"), (r"\.attn\.out_proj", ".attn.to_out.0"),
    (r"\.mlp\.fc1", ".ff.net.0.proj"), (r"\.mlp\.fc2", ".ff.net.2"),
)  # fmt: skip
"""Regular expressions that turn ComfyUI's names into diffusers'."""

VIDEO, SOUND = (1, 24, 2, 5, 7), (1, 32, 2, 8)
"""Shapes of the latents of 5 frames, whose sides are not whole patches."""
LONG = (1, 24, 7, 4, 6)
"""A latent of 22 frames, whose sides are."""
TEXT = 11


def _converted(weights: Weights) -> Weights:
    """ComfyUI's class has queries, keys and values in one layer, and the gate before the value."""
    converted = {}
    pruned = "adaln_t_table" in weights
    for name, tensor in weights.items():
        for pattern, replacement in NAMES:
            name = re.sub(pattern, replacement, name)
        name = re.sub(r"(adaln_proj|norm_out)\.linear", r"\1.curve" if pruned else r"\1.linear", name)
        if ".qkv_proj." in name:
            for kind, part in zip("qkv", tensor.chunk(3), strict=True):
                converted[name.replace("qkv_proj", f"to_{kind}")] = part.clone()
        elif name.endswith(".ff.net.0.proj.weight"):
            converted[name] = torch.cat(tensor.chunk(2)[::-1])
        elif name != "rope.inv_freq":
            converted[name] = tensor.clone()
    return converted


def _with_published_frequencies(module: Any) -> None:
    """Set the rotary frequencies that every published file has, and that diffusers computes."""
    count = len(module.rope.inv_freq)
    with torch.no_grad():
        module.rope.inv_freq.copy_(10000.0 ** -(torch.arange(count) / count))


def nested(*tensors: torch.Tensor) -> Any:
    """Return a nested latent, or a nested mask."""
    from comfy.nested_tensor import NestedTensor

    return NestedTensor(tensors)


def empty(random: Random, video: tuple[int, ...] = VIDEO) -> dict[str, Any]:
    """Return what *Empty MiniMax H3 AV Latent* gives."""
    return {"samples": nested(torch.zeros(video), torch.zeros(SOUND))}


def _masked(random: Random) -> dict[str, Any]:
    """Return latents of which masks keep some parts, and others partly."""
    video, sound = (torch.ones(shape[0], 1, *shape[2:]) for shape in (VIDEO, SOUND))
    video[:, :, 0], video[:, :, 1, :2], video[:, :, 1, 2:, 3:] = 0.0, 0.4, 0.75
    sound[..., :3], sound[..., 5] = 0.0, 0.3
    return {"samples": nested(random(*VIDEO), random(*SOUND)), "noise_mask": nested(video, sound)}


def _tags() -> dict[str, Any]:
    """Return what the text encoder says of its tokens: some stand for pictures."""
    tags = torch.ones(TEXT, dtype=torch.int64)
    tags[2:6] = 0
    return {"minimax_token_tags": tags}


def _keyframes(random: Random) -> dict[str, Any]:
    """Return what *MiniMax H3 Image to Video* and *Add Guide for MiniMax H3* add: both ends, and a sound."""
    first, last, sound = random(1, 24, 1, 6, 8), random(1, 24, 1, 6, 8), random(1, 32, 2, 3)
    frames = [
        {"resolved_frame_index": 0, "latent": first}, {"resolved_frame_index": 4, "latent": last},
        {"resolved_frame_index": 2, "audio_latent": sound},
    ]  # fmt: skip
    return {**_tags(), "minimax_keyframes": frames}


def _references(random: Random) -> dict[str, Any]:
    """Return what *MiniMax H3 Reference to Video* adds for a picture, a video with sound and a sound."""
    references = [
        {"kind": "image", "latent_h": 4, "latent_w": 6, "latent": random(1, 24, 1, 4, 6)},
        {"kind": "video_audio", "latent_t": 2, "latent_h": 4, "latent_w": 4, "ref_audio_t": 5,
         "latent": random(1, 24, 2, 4, 4), "audio_latent": random(1, 32, 2, 5)},
        {"kind": "audio", "ref_audio_t": 4, "audio_latent": random(1, 32, 2, 4)},
    ]  # fmt: skip
    return {**_tags(), "minimax_refs": references, "minimax_audio_cond_noise_aug": 0.9}


def _case(*, pruned: bool = False, **options: Any) -> Case:
    published = {"adaln_curve_grid": 1025, "time_embed_dim": 8} if pruned else {}
    defaults: dict[str, Any] = {"latent": VIDEO, "latent_entries": empty, "text": (TEXT, 80)}
    return Case(
        unet=UNET | (PRUNED if pruned else WHOLE), transformer="MiniMaxH3Transformer3DModel",
        config=CONFIG | (PRUNED if pruned else {}), published=published, converted=_converted,
        repair=_with_published_frequencies, **{**defaults, **options},
    )  # fmt: skip


SINCE = "MiniMaxH3"
SAMPLING = Sampling(
    node="MiniMaxH3SigmaShift", inputs={"shift_video": 9.0, "shift_audio": 4.0}, module="nodes_minimax_h3"
)
CASES = {
    "t2v": _case(),
    "pruned": _case(pruned=True),
    "tags": _case(extra=lambda random: _tags(), latent_entries=lambda random: empty(random, LONG)),
    "keyframes": _case(extra=_keyframes),
    "references": _case(extra=_references),
    "masked": _case(latent_entries=_masked),
    "turbo": _case(pruned=True, cfg=1.0, latent_entries=lambda random: empty(random, LONG)),
}
