"""Small random files under the official names of MiniMax-H3 and LTX-2, in the formats that are published.

``shrunk_core.shrink`` has to be in effect, for text encoders and MiniMax-H3's VAEs.
"""

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import av
import comfy.ldm.lightricks.latent_upsampler
import comfy.ldm.lightricks.vae.audio_vae
import comfy.ldm.lightricks.vae.causal_video_autoencoder
import comfy.ldm.lightricks.vae.na_diffusion_decoder
import comfy.ldm.minimax.audio_vae
import comfy.ldm.minimax.vae
import comfy.ldm.moge.model
import comfy.ops
import comfy.text_encoders.gemma4 as gemma4
import comfy.text_encoders.lt
import comfy.text_encoders.minimax
import numpy as np
import PIL.Image
import sentencepiece
import tokenizers
import torch
from helpers import compressed_files, dynamic_vram, loras, shrunk_core
from helpers.inside_fixtures import native_case
from helpers.native_vaes import randomize
from natives import CASES
from natives.case import random_weight, seeded
from safetensors.torch import save_file

Weights = dict[str, torch.Tensor]
Metadata = dict[str, str] | None

DIFFUSION = "model.diffusion_model."
_RES = ["res_x", {"num_layers": 1}]
_DOWN = [f"compress_{kind}_res" for kind in ("space", "time", "all", "all")]
_ENCODER = [block for kind in _DOWN for block in (_RES, [kind, {"multiplier": 2}])] + [_RES]
_DECODER = [block for _ in range(3) for block in (_RES, ["compress_all", {"residual": True, "multiplier": 2}])] + [_RES]
LTX_VAE = {
    "_class_name": "CausalVideoAutoencoder", "dims": 3, "in_channels": 3, "out_channels": 3, "latent_channels": 128,
    "encoder_blocks": _ENCODER, "decoder_blocks": _DECODER, "norm_layer": "pixel_norm", "patch_size": 4,
    "latent_log_var": "uniform", "causal_decoder": False, "timestep_conditioning": False, "encoder_base_channels": 8,
    "decoder_base_channels": 8, "spatial_padding_mode": "zeros",
}  # fmt: skip
LTX_DIFFUSION_VAE = {
    "encoder": {"blocks": _ENCODER, "base_channels": 8, "latent_log_var": "uniform"},
    "decoder": {
        "head_dim": 16, "stage_channels": [64, 32, 32, 32, 16], "stage_depths": [1, 1, 1, 1, 1], "t_emb_dim": 32,
        "stage_kernels": [[3, 3, 3]] * 5, "stage5_kernel": [3, 3, 3],
        "upsamples": [[[1, 2, 2], 2], [[2, 1, 1], 1], [[2, 2, 2], 1], [[2, 2, 2], 2]],
    },
}  # fmt: skip
_MELS = {
    "double_z": True, "mel_bins": 64, "z_channels": 8, "resolution": 256, "downsample_time": False, "in_channels": 2,
    "out_ch": 2, "ch": 8, "ch_mult": [1, 2, 4], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0,
    "mid_block_add_attention": False, "norm_type": "pixel", "causality_axis": "height",
}  # fmt: skip
LTX_SOUND = {
    "audio_vae": {
        "model": {"params": {"ddconfig": _MELS, "sampling_rate": 16000}},
        "preprocessing": {"stft": {"filter_length": 1024, "hop_length": 160}},
    },
    "vocoder": {"upsample_initial_channel": 32, "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3, 5]]},
}
UPSAMPLER = {"in_channels": 128, "mid_channels": 32, "num_blocks_per_stage": 1, "dims": 3}
MOGE = {
    "encoder": {
        "backbone": {
            "hidden_size": 64, "num_attention_heads": 1, "num_hidden_layers": 4, "layer_norm_eps": 1e-6,
            "use_swiglu_ffn": False,
        },
        "intermediate_layers": [0, 1, 2, 3], "dim_out": 32,
    },
    "neck": {
        "dim_in": [34, 2, 2], "dim_res_blocks": [32, 32, 32], "dim_out": [None] * 3, "num_res_blocks": [1, 1, 1],
        "resamplers": ["conv_transpose"] * 2, "res_block_in_norm": "none", "res_block_hidden_norm": "none",
    },
    "scale_head": {"dims": [64, 32, 1]},
}  # fmt: skip
_HEAD = {**MOGE["neck"], "dim_in": [32, 32, 32]}


@dynamic_vram.off()
def _of(create: Callable[[], Any], prefix: str = "") -> Weights:
    """Return random weights of a module."""
    random = seeded(7)
    weights = create().state_dict()
    return {
        f"{prefix}{name}": random_weight(name, tensor.float(), random) if tensor.ndim else torch.ones(())
        for name, tensor in weights.items()
    }


@dynamic_vram.off()
def _statistics(create: Callable[[], Any], prefix: str = "") -> Weights:
    """Return random weights of a module whose buffers are statistics, but for filters that it computes."""
    module = create()
    computed = {name: each.clone() for name, each in module.named_buffers() if name.endswith(_COMPUTED)}
    weights = randomize(module).state_dict() | computed
    return {f"{prefix}{name}": tensor.clone().contiguous() for name, tensor in weights.items()}


_COMPUTED = ("filter", "window", "basis", "inv_freq", "mel_basis", "image_mean", "image_std")
"""Ends of the names of buffers that are no statistics."""


def _compressed(weights: Mapping[str, torch.Tensor], kind: str, only: str = "") -> Weights:
    """Return weights of which matrices are compressed, where their names begin so."""
    block, compress = compressed_files.FORMATS[kind]
    found: Weights = {}
    for name, tensor in weights.items():
        layer, fits = name.removesuffix(".weight"), tensor.ndim == 2 and tensor.shape[1] % block == 0
        if not (fits and name.startswith(only) and name.endswith(".weight")):
            found[name] = tensor.clone().contiguous()
            continue
        result = compress(tensor)
        found |= {f"{layer}.{end}": each.contiguous() for end, each in result.stored.items()}
        found[f"{layer}.comfy_quant"] = _bytes(json.dumps(result.description).encode())
    return found


def _bytes(content: bytes) -> torch.Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)


def _diffusion(case: str) -> Weights:
    return {name: each.clone() for name, each in native_case(case).model.diffusion_model.state_dict().items()}


def _lora(case: str) -> Weights:
    found = loras.plain(native_case(case), "diffusion_model.", rank=4, seed=3, form=1)
    return {name: tensor.to(torch.bfloat16) for name, tensor in found.items() if _is_in_block(name)}


def _is_in_block(name: str) -> bool:
    return name.removeprefix("diffusion_model.").startswith(("blocks.", "transformer_blocks."))


def _trained(unused: int) -> bytes:
    """Return a model of sentencepiece that knows single bytes, and tokens that no text has."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a video of a small cat and a large dog in a house by the sea"] * 20),
        model_writer=model, vocab_size=300 + unused, byte_fallback=True, hard_vocab_limit=False, pad_id=0, eos_id=1,
        bos_id=2, unk_id=3, minloglevel=2, user_defined_symbols=[f"<unused{number}>" for number in range(unused)],
    )  # fmt: skip
    return model.getvalue()


def _pieces() -> torch.Tensor:
    """Return a model with a token for each number that the small Gemma generates."""
    known = sentencepiece.SentencePieceProcessor(model_proto=_trained(0)).get_piece_size()
    return _bytes(_trained(shrunk_core.VOCABULARY - known))


def _tokenizer() -> torch.Tensor:
    """Return a tokenizer of single letters with Gemma 4's placeholders."""
    letters = {f"{chr(code)}": number for number, code in enumerate(range(32, 127), start=4)}
    marks = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<|turn>": 105, "<turn|>": 106, "<|image>": 200}
    marks |= {"<image|>": 201, "<|channel>": 202, "<channel|>": 203, "<|think|>": 204, "\n": 205, "<|image|>": 258880}
    found = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters | marks, unk_token="<unk>"))
    found.add_special_tokens([mark for mark in marks if len(mark) > 1])
    found.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    return _bytes(found.to_str().encode())


def _text_encoder(model: Any) -> Weights:
    return _of(lambda: model(device="cpu", dtype=torch.float32).transformer)


def _projection(case: str, prefix: str = "") -> Weights:
    """Return the layers behind Gemma, which LTX-2 has in the transformer's file and LTX-2.5 in the encoder's."""
    unet, width, random = CASES[case].unet, 80 * 49, seeded(8)
    if case == "ltx2 2":
        name, rows = "text_embedding_projection.aggregate_embed.weight", unet["caption_channels"]
        return {f"{prefix}{name}": random(rows, width) * width**-0.5}
    rows = {"video": unet["cross_attention_dim"], "audio": unet["audio_cross_attention_dim"]}
    found: Weights = {}
    for kind, count in rows.items():
        layer = f"{prefix}text_embedding_projection.{kind}_aggregate_embed"
        found |= {f"{layer}.weight": random(count, width) * width**-0.5, f"{layer}.bias": random(count) * 0.1}
    return found


def _config(case: str, **more: Any) -> Metadata:
    return {"config": json.dumps({"transformer": dict(CASES[case].unet), **more})}


def _ltx_vae(prefix: str = "") -> Weights:
    lightricks = comfy.ldm.lightricks.vae.causal_video_autoencoder
    return _statistics(lambda: lightricks.VideoVAE(config=LTX_VAE), prefix)


def _ltx_sound(**prefixes: str) -> Weights:
    metadata = {"config": json.dumps(LTX_SOUND)}
    weights = _statistics(lambda: comfy.ldm.lightricks.vae.audio_vae.AudioVAE(metadata=metadata))
    parts = {name.partition(".")[0] for name in weights}
    assert parts <= prefixes.keys(), parts
    return {prefixes[name.partition(".")[0]] + name.partition(".")[2]: tensor for name, tensor in weights.items()}


def _checkpoint(case: str, kind: str | None) -> tuple[Weights, Metadata]:
    """Return a whole checkpoint of LTX-2 or 2.3: transformer, both VAEs, vocoder and text projection."""
    weights = {f"{DIFFUSION}{name}": each for name, each in _diffusion(case).items()}
    weights |= _projection(case) | _ltx_vae("vae.")
    weights |= _ltx_sound(autoencoder="audio_vae.", vocoder="vocoder.")
    found = _compressed(weights, kind, only=f"{DIFFUSION}transformer_blocks") if kind else weights
    return found, _config(case, vae=LTX_VAE, **LTX_SOUND)


def _gemma4_with_projection() -> Weights:
    variant = gemma4.gemma4_text_encoder_model(gemma4.Gemma4_12B)
    return _text_encoder(variant) | _projection("ltx2 2.5") | {"tokenizer_json": _tokenizer()}


def _moge() -> Weights:
    create = comfy.ldm.moge.model.MoGeModelV2
    heads = {name: {**_HEAD, "dim_out": [None, None, rows]} for name, rows in (("points_head", 3), ("mask_head", 1))}
    return _statistics(lambda: create(**MOGE, **heads, normal_head=heads["points_head"]))


def contents(name: str) -> tuple[Weights, Metadata]:
    """Return what a file of an official name holds.

    Raises:
        KeyError: nothing is known of the name.
    """
    if "lora" in name or name.startswith(("ltx2.3-transition", "ltx2-squish")) or "turbo" in name:
        return _named_lora(name)
    return next(create for marks, create in _FILES.items() if all(mark in name for mark in marks.split()))()


def _named_lora(name: str) -> tuple[Weights, Metadata]:
    if name.startswith("gemma"):
        random = seeded(4)
        layer = "text_encoders.gemma3_12b.transformer.model.layers.3.self_attn.q_proj"
        return {f"{layer}.lora_A.weight": random(2, 80), f"{layer}.lora_B.weight": random(32, 2)}, None
    if "minimax" in name:
        return _lora("minimax_h3 pruned"), None
    newer = name.startswith(("ltx-2.3", "ltx_2.3", "ltx2.3"))
    metadata = {"reference_downscale_factor": "2"} if "ref0.5" in name else None
    return _lora("ltx2 2.3" if newer else "ltx2 2"), metadata


_FILES: dict[str, Callable[[], tuple[Weights, Metadata]]] = {
    "qwen3vl_32b": lambda: (_text_encoder(comfy.text_encoders.minimax.MiniMaxH3ClipModel), None),
    "minimax_h3_video_vae int8": lambda: (
        _compressed(_statistics(comfy.ldm.minimax.vae.MiniMaxH3VideoVAE), "int8 rotated", "decoder.transformer_blocks"),
        None,
    ),
    # In 32 bits: ComfyUI alone cannot decode with 16 of them on a CPU.
    "minimax_h3_video_vae fp16": lambda: (_statistics(comfy.ldm.minimax.vae.MiniMaxH3VideoVAE), None),
    "minimax_h3_audio_vae": lambda: (_statistics(comfy.ldm.minimax.audio_vae.MiniMaxH3AudioVAE), None),
    "minimax_h3_ int8_convrot": lambda: (_compressed(_diffusion("minimax_h3 pruned"), "int8 rotated", "blocks."), None),
    "gemma_3_12B": lambda: (
        _text_encoder(comfy.text_encoders.lt.Gemma3_12BModel) | {"spiece_model": _pieces()}, None,
    ),
    "gemma4-12b-with-proj": lambda: (_gemma4_with_projection(), None),
    "gemma4_e2b": lambda: (
        _text_encoder(gemma4.gemma4_clip_model(gemma4.Gemma4_E2B)) | {"tokenizer_json": _tokenizer()}, None,
    ),
    "ltx-2.5 transformer": lambda: (
        _compressed({DIFFUSION + name: each for name, each in _diffusion("ltx2 2.5").items()}, "int8 rotated",
                    f"{DIFFUSION}transformer_blocks"), _config("ltx2 2.5"),
    ),
    "ltx-2.5-video-vae": lambda: (
        _statistics(lambda: comfy.ldm.lightricks.vae.na_diffusion_decoder.CausalDiffusionVAE(config=LTX_DIFFUSION_VAE)),
        {"config": json.dumps({"vae": LTX_DIFFUSION_VAE})},
    ),
    "ltx-2.5-audio-vae": lambda: (
        _ltx_sound(autoencoder="audio_vae.", vocoder="vocoder."), {"config": json.dumps(LTX_SOUND)},
    ),
    "upscaler": lambda: (
        _of(lambda: comfy.ldm.lightricks.latent_upsampler.LatentUpsampler.from_config(
            UPSAMPLER, operations=comfy.ops.disable_weight_init)), {"config": json.dumps(UPSAMPLER)},
    ),
    "moge": lambda: (_moge(), None),
    "ltx-2.3 fp8": lambda: _checkpoint("ltx2 2.3", "fp8 e4m3"),
    "ltx-2-19b fp8": lambda: _checkpoint("ltx2 2", "fp8 e4m3"),
    "ltx-2-19b": lambda: _checkpoint("ltx2 2", None),
}  # fmt: skip
"""What makes a file, by words in its name; the first whose words are all there."""


def write(path: Path) -> None:
    """Write a model file."""
    weights, metadata = contents(path.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path, metadata)


def write_media(path: Path) -> None:
    """Write a small picture, video or sound: what a template's example is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in (".png", ".jpg", ".webp", ".jpeg"):
        _picture(1).save(path)
        return
    with av.open(str(path), "w") as container:
        if path.suffix == ".mp4":
            video = container.add_stream("h264", rate=24)
            video.width, video.height, video.pix_fmt = 192, 128, "yuv420p"
            for number in range(33):
                container.mux(video.encode(av.VideoFrame.from_image(_picture(number))))
            container.mux(video.encode())
            return
        sound = container.add_stream("mp3", rate=44100, layout="stereo")
        random = np.random.default_rng(1).normal(size=(2, 44100)).astype(np.float32) * 0.1
        for start in range(0, 44100, 1152):
            frame = av.AudioFrame.from_ndarray(random[:, start : start + 1152], format="fltp", layout="stereo")
            frame.sample_rate = 44100
            container.mux(sound.encode(frame))
        container.mux(sound.encode())


def _picture(number: int) -> PIL.Image.Image:
    rows, columns = np.mgrid[0:128, 0:192]
    waves = [np.sin(rows / (7 + each) + columns / 11 + number / 9) for each in range(3)]
    return PIL.Image.fromarray(((np.stack(waves, -1) + 1) * 127).astype(np.uint8))
