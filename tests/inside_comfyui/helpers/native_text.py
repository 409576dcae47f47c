"""ComfyUI's own text encoder with the weights of the checkpoint ``tiny``."""

from typing import Any

import comfy.sd1_clip
import comfy.text_encoders.t5
import torch
from helpers.inside_fixtures import Loaded

import nodes as core_nodes


def encode(clip: Any, text: str) -> torch.Tensor:
    """Run ComfyUI's CLIPTextEncode node."""
    cond: torch.Tensor = core_nodes.CLIPTextEncode().encode(clip, text)[0][0][0]
    return cond


def core_encoder(loaded: Loaded) -> Any:
    """Return ComfyUI's own UMT5 with the checkpoint's weights."""
    theirs = loaded.client.text_encoder
    config = theirs.config
    model = comfy.sd1_clip.SDClipModel(
        textmodel_json_config={
            "num_layers": config.num_layers, "d_model": config.d_model, "d_kv": config.d_kv, "d_ff": config.d_ff,
            "num_heads": config.num_heads, "vocab_size": config.vocab_size, "dense_act_fn": "gelu_pytorch_tanh",
            "is_gated_act": True, "model_type": "umt5",
        },
        special_tokens={"end": 1, "pad": 0}, model_class=comfy.text_encoders.t5.T5,
        enable_attention_masks=True, zero_out_masked=True, dtype=torch.float32,
    )  # fmt: skip
    missing, unexpected = model.load_sd(theirs.state_dict())
    assert not missing
    assert set(unexpected) <= {"encoder.embed_tokens.weight"}
    return model
