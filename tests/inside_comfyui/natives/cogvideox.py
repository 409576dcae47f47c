"""CogVideoX 1.5: text and image to video, and inpainting (VOID)."""

from typing import Any

import torch

from natives.case import Case, Random, Sampling, Weights

CONFIG = {
    "num_layers": 2, "num_attention_heads": 3, "attention_head_dim": 64, "text_embed_dim": 24, "time_embed_dim": 32,
    "patch_size_t": 2, "patch_bias": False, "use_rotary_positional_embeddings": True, "sample_height": 300,
    "sample_width": 300,
}  # fmt: skip
UNET = {
    "image_model": "cogvideox", "num_attention_heads": 3, "attention_head_dim": 64, "time_embed_dim": 32,
    "num_layers": 2, "patch_size": 2, "patch_size_t": 2, "text_embed_dim": 24,
    "use_learned_positional_embeddings": False, "use_rotary_positional_embeddings": True,
}  # fmt: skip
PUBLISHED = {
    "patch_size_t": 2, "use_rotary_positional_embeddings": True, "num_attention_heads": 48, "num_layers": 42,
    "sample_height": 300, "sample_width": 300, "sample_frames": 81, "max_text_seq_length": 224,
}  # fmt: skip
NAMES = {
    "blocks.": "transformer_blocks.", ".q.": ".attn1.to_q.", ".k.": ".attn1.to_k.", ".v.": ".attn1.to_v.",
    "norm_q.": "attn1.norm_q.", "norm_k.": "attn1.norm_k.", "attn_out.": "attn1.to_out.0.",
    "ff_proj.": "ff.net.0.proj.", "ff_out.": "ff.net.2.", "embedding_linear_": "embedding.linear_",
}  # fmt: skip
"""diffusers' names by ComfyUI's."""


def _converted(weights: Weights) -> Weights:
    converted = {}
    for name, tensor in weights.items():
        for native, theirs in NAMES.items():
            name = name.replace(native, theirs)
        converted[name] = tensor
    return converted


def sampled_by_sigmas(model: Any) -> Any:
    """Return what *ModelSamplingDiscrete* makes of the model, with v_prediction and zsnr.

    Without it ComfyUI's class takes latents of unit variance, which only *VOIDSampler* gives it.
    """
    from comfy_extras.nodes_model_advanced import ModelSamplingDiscrete

    return ModelSamplingDiscrete().patch(model, "v_prediction", True)[0]


def _image(random: Random) -> dict[str, Any]:
    """Return what *InstructPixToPixConditioning* adds."""
    return {"concat_latent_image": random(1, 16, 1, 6, 10)}


def _masked_video(random: Random) -> dict[str, Any]:
    """Return what *VOIDInpaintConditioning* adds."""
    return {"concat_latent_image": random(1, 32, 4, 6, 10)}


def _known_frame(random: Random) -> dict[str, Any]:
    mask = torch.ones(1, 1, 4, 6, 10)
    mask[:, :, :1] = 0
    return {"samples": random(1, 16, 4, 6, 10), "noise_mask": mask}


def _case(channels: int = 16, *, ofs: bool = False, **options: Any) -> Case:
    kind = {"in_channels": channels, **({"ofs_embed_dim": 32} if ofs else {})}
    published = PUBLISHED | {"in_channels": channels, **({"ofs_embed_dim": 512} if ofs else {})}
    return Case(
        unet=UNET | kind, transformer="CogVideoXTransformer3DModel", config=CONFIG | kind, published=published,
        converted=_converted, text=(11, 24), patch=sampled_by_sigmas,
        **{"latent": (2, 16, 4, 6, 10), **options},
    )  # fmt: skip


SINCE = "CogVideoX_T2V"
SAMPLING = Sampling(node="ModelSamplingDiscrete", inputs={"sampling": "v_prediction", "zsnr": True}, needed=True)
CASES = {
    "1.5": _case(),
    "1.5 odd": _case(latent=(1, 16, 3, 5, 9)),
    "1.5 i2v": _case(32, ofs=True, extra=_image),
    "1.5 i2v without image": _case(32, ofs=True),
    "1.5 inpaint": _case(48, extra=_masked_video, latent_entries=_known_frame, latent=(1, 16, 4, 6, 10)),
}
