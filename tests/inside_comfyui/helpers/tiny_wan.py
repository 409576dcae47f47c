"""A tiny random pipeline in diffusers layout, and its transformer as ComfyUI's own Wan model."""

import json
from pathlib import Path
from typing import Any

import comfy.ldm.wan.model
import comfy.model_patcher
import comfy.ops
import comfy.supported_models
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from helpers import dynamic_vram
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import UMT5Config, UMT5EncoderModel

TEXT_DIM = 24
UNET = {
    "image_model": "wan2.1", "model_type": "t2v", "in_dim": 16, "out_dim": 16, "dim": 48, "ffn_dim": 64,
    "freq_dim": 32, "text_dim": TEXT_DIM, "num_heads": 3, "num_layers": 2,
}  # fmt: skip
WORDS = [
    "a", "red", "green", "blue", "circle", "square", "on", "background", "moving", "left", "right", "(", ")", ":", "1",
]  # fmt: skip


@dynamic_vram.off()
def native_model() -> comfy.model_patcher.ModelPatcher:
    """Return ComfyUI's own Wan model with random weights, without any code of ours."""
    generator = torch.Generator().manual_seed(0)
    model = comfy.supported_models.WAN21_T2V(dict(UNET)).get_model({})
    weights = {
        name: torch.randn(tensor.shape, generator=generator) * (0.2 if tensor.ndim > 1 else 0.1)
        for name, tensor in model.diffusion_model.state_dict().items()
    }
    model.diffusion_model.load_state_dict(weights)
    model.diffusion_model.float().dtype = torch.float32
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)


def write(folder: Path, native: comfy.model_patcher.ModelPatcher) -> Path:
    """Save the same transformer in diffusers layout, with a random VAE, text encoder and tokenizer."""
    torch.manual_seed(1)
    config: dict[str, Any] = {
        "patch_size": (1, 2, 2), "num_attention_heads": 3, "attention_head_dim": 16, "in_channels": 16,
        "out_channels": 16, "text_dim": TEXT_DIM, "freq_dim": 32, "ffn_dim": 64, "num_layers": 2,
    }  # fmt: skip
    transformer = WanTransformer3DModel(**config)
    weights = {name: tensor.clone() for name, tensor in native.model.diffusion_model.state_dict().items()}
    transformer.load_state_dict(convert_wan_transformer_to_diffusers(weights))
    transformer.save_pretrained(folder / "transformer")
    AutoencoderKLWan(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1).save_pretrained(folder / "vae")
    UMT5EncoderModel(
        UMT5Config(vocab_size=32, d_model=TEXT_DIM, d_kv=8, d_ff=32, num_layers=2, num_heads=3)
    ).save_pretrained(folder / "text_encoder")
    tokenizer().save(str((folder / "tokenizer").joinpath("tokenizer.json")))
    index = {
        "_class_name": "WanPipeline",
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def tokenizer() -> Tokenizer:
    """Return a tokenizer of whole words."""
    vocab = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {word: i + 3 for i, word in enumerate(WORDS)}
    words = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return words
