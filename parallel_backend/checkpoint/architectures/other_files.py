"""Files that hold no transformer and no VAE, or one of a kind that cannot run in parallel, named in words."""

from collections.abc import Iterable

from ...errors import InvalidRequest
from ...families.architecture import is_of_lora

_UNET = ("input_blocks.0.", "input_blocks.1.", "down_blocks.0.attentions.", "down_blocks.1.attentions.")
_TEXT_ENCODER = (
    "encoder.block.0.layer.0.SelfAttention.", "text_model.encoder.layers.", "text_model.embeddings.",
    "model.embed_tokens.", "layers.0.self_attn.q_proj.",
)  # fmt: skip
"""Parts of the names of T5, of CLIP, and of language models."""

_KINDS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        _UNET,
        "a UNet, as Stable Diffusion 1.5 and SDXL have",
        "only diffusion transformers can run in parallel; load it with ComfyUI's own loader",
    ),
    (_TEXT_ENCODER, "a text encoder", "load it with ComfyUI's Load CLIP"),
    (
        ("pre_block.attn.zero_k_bias",),
        "MiniMax-H3's VAE of sound",
        "ComfyUI itself runs it; load it with Load VAE, without Parallel VAE behind it",
    ),
    (
        ("decoder.conv_in_x_t.",),
        "LTX-2.5's VAE, whose decoder is a diffusion model of its own",
        "ComfyUI itself runs it; load it with Load VAE, without Parallel VAE behind it",
    ),
    (
        ("vocoder.",),
        "LTX-2's VAE of sound",
        "ComfyUI itself runs it; load it with LTXV Audio VAE Loader, without Parallel VAE behind it",
    ),
)
"""Parts of names, one of which every such file has, what it holds, and what would work."""


def refuse_lora(names: Iterable[str]) -> None:
    """Refuse a LoRA, whose names contain those of its model.

    Raises:
        InvalidRequest: the file holds one.
    """
    name = next(filter(is_of_lora, names), None)
    if name is not None:
        raise _holds(
            name,
            "a LoRA",
            "choose the model's own file, and apply this one with ComfyUI's LoraLoaderModelOnly and Parallel Model "
            "behind it",
        )


def refuse_other_kinds(names: Iterable[str]) -> None:
    """Refuse what is neither a transformer nor a VAE.

    Raises:
        InvalidRequest: the file holds a UNet or a text encoder.
    """
    names = tuple(names)
    for parts, what, advice in _KINDS:
        name = next((name for name in names if any(part in name for part in parts)), None)
        if name is not None:
            raise _holds(name, what, advice)


def _holds(name: str, what: str, advice: str) -> InvalidRequest:
    return InvalidRequest(f"the file holds {what} (it has {name}): {advice}")
