"""What PixArt's bridge relies on."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Mentions, ReadsOnly
from scripts.core_contract.lists.transformers import transformer
from scripts.core_contract.model_kinds import Detects

PIXART = "nodes/families/pixart.py"

ENTRIES = (
    *core_module(
        "comfy.model_base",
        ReadsOnly("PixArt", "self.diffusion_model", "", by=PIXART, why="the stand-in has none", word="PixArtMS"),
        Mentions("PixArt.extra_conds", "c_size c_ar", by=PIXART, why="arguments of a call"),
    ),
    *core_module(
        "comfy.supported_models",
        Detects(
            "PixArtAlpha",
            {"image_model": "pixart_alpha"},
            "PixArt",
            "SD15",
            "beta_schedule linear_start",
            by=PIXART,
            why="PixArt-alpha",
        ),
        Detects(
            "PixArtSigma",
            {"image_model": "pixart_sigma"},
            "PixArt",
            "SDXL",
            "beta_schedule linear_start",
            by=PIXART,
            why="PixArt-Sigma",
        ),
    ),
    *core_module(
        "comfy.ldm.pixart.pixartms",
        *transformer("PixArtMS(x, timesteps, *, context, c_size, c_ar)", PIXART, "context c_size c_ar"),
        Calls(
            "PixArtMS(*, num_heads, patch_size, hidden_size, in_channels, depth, model_max_length, micro_condition, "
            "caption_channels)",
            by=PIXART,
            why="numbers of the architecture",
        ),
    ),
)
