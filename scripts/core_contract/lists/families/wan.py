"""What Wan's bridge relies on."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Mentions, ReadsOnly
from scripts.core_contract.lists.transformers import skippable, transformer
from scripts.core_contract.model_kinds import Detects, Equals

WAN = "nodes/families/wan.py"

ENTRIES = (
    *core_module(
        "comfy.model_base",
        ReadsOnly("WAN21", "self.diffusion_model", "patch_embedding", by=WAN, why="the stand-in", word="WanModel"),
        ReadsOnly("WAN22", "self.diffusion_model", "", by=WAN, why="the stand-in has none", word="WanModel"),
        Mentions("WAN21.extra_conds", "clip_fea", by=WAN, why="what an image encoder saw"),
        Mentions("WAN22.extra_conds", "denoise_mask", by=WAN, why="frames that are given"),
    ),
    *core_module(
        "comfy.supported_models",
        Detects(
            "WAN21_T2V",
            {"image_model": "wan2.1", "model_type": "t2v"},
            "WAN21",
            "Wan21",
            "shift",
            by=WAN,
            why="text to video",
        ),
        Detects(
            "WAN22_T2V",
            {"image_model": "wan2.1", "model_type": "t2v", "out_dim": 48},
            "WAN22",
            "Wan22",
            "shift",
            by=WAN,
            why="2.2's TI2V",
        ),
        Detects(
            "WAN21_I2V",
            {"image_model": "wan2.1", "model_type": "i2v", "in_dim": 36},
            "WAN21",
            "Wan21",
            "shift",
            by=WAN,
            why="image to video",
        ),
    ),
    *core_module(
        "comfy.latent_formats",
        Equals("Wan21.latent_channels", 16, by=WAN, why="which of Wan's two VAEs"),
        Equals("Wan22.latent_channels", 48, by=WAN, why="which of Wan's two VAEs"),
    ),
    *core_module(
        "comfy.ldm.wan.model",
        *transformer(
            "WanModel(x, timestep, *, context, clip_fea, time_dim_concat, transformer_options)", WAN, "context clip_fea"
        ),
        Calls(
            "WanModel(*, model_type, patch_size, in_dim, out_dim, dim, ffn_dim, freq_dim, num_heads, num_layers, "
            "window_size, qk_norm, cross_attn_norm, eps, flf_pos_embed_token_number, text_dim)",
            by=WAN,
            why="numbers of the architecture",
        ),
        skippable("WanModel.forward_orig", WAN),
    ),
)
