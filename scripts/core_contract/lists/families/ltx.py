"""What LTX-Video's bridge relies on."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Mentions, ReadsOnly
from scripts.core_contract.lists.transformers import skippable, transformer
from scripts.core_contract.model_kinds import Detects, Equals

LTX = "nodes/families/ltx.py"

ENTRIES = (
    *core_module(
        "comfy.model_base",
        ReadsOnly("LTXV", "self.diffusion_model", "patchifier", by=LTX, why="the stand-in has it", word="patchifier"),
        Mentions("LTXV.extra_conds", "attention_mask frame_rate denoise_mask keyframe_idxs", by=LTX, why="arguments"),
        Mentions("LTXV.extra_conds", "guide_attention_entries", by=LTX, why="guides of a video", since=(0, 27, 0)),
    ),
    *core_module(
        "comfy.supported_models",
        Detects("LTXV", {"image_model": "ltxv"}, "LTXV", "LTXV", "shift", by=LTX, why="LTX-Video"),
    ),
    *core_module(
        "comfy.latent_formats",
        Equals("LTXV.latent_channels", 128, by=LTX, why="the only LTX-Video that core has"),
    ),
    *core_module(
        "comfy.ldm.lightricks.model",
        *transformer(
            "LTXVModel(x, timestep, *, context, attention_mask, frame_rate, transformer_options, keyframe_idxs, "
            "denoise_mask)",
            LTX,
            "context attention_mask frame_rate keyframe_idxs denoise_mask",
        ),
        Calls(
            "LTXVModel(*, num_layers, attention_head_dim, cross_attention_dim, num_attention_heads, caption_channels, "
            "causal_temporal_positioning)",
            by=LTX,
            why="numbers of the architecture",
        ),
        skippable("LTXVModel._process_transformer_blocks", LTX),
    ),
    *core_module(
        "comfy.ldm.lightricks.symmetric_patchifier",
        Calls(
            "latent_to_pixel_coords(latent_coords, scale_factors, *, causal_fix)", by=LTX, why="positions in the video"
        ),
    ),
)
