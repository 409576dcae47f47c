"""What Z-Image's bridge relies on."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Mentions, ReadsOnly
from scripts.core_contract.lists.transformers import transformer
from scripts.core_contract.model_kinds import Detects

Z_IMAGE = "nodes/families/z_image.py"

ENTRIES = (
    *core_module(
        "comfy.model_base",
        ReadsOnly("Lumina2", "self.diffusion_model", "", by=Z_IMAGE, why="the stand-in has none", word="NextDiT"),
        Mentions("Lumina2.extra_conds", "num_tokens clip_text_pooled", by=Z_IMAGE, why="arguments that are ignored"),
    ),
    *core_module(
        "comfy.supported_models",
        Detects(
            "ZImage", {"image_model": "lumina2", "dim": 3840}, "Lumina2", "Flux", "shift", by=Z_IMAGE, why="Z-Image"
        ),
    ),
    *core_module(
        "comfy.ldm.lumina.model",
        *transformer("NextDiT(x, timesteps, *, context, num_tokens, attention_mask)", Z_IMAGE, "context num_tokens"),
        Calls(
            "NextDiT(*, patch_size, in_channels, dim, cap_feat_dim, n_layers, qk_norm, n_heads, n_kv_heads, axes_dims, "
            "axes_lens, rope_theta, ffn_dim_multiplier, z_image_modulation, time_scale, pad_tokens_multiple, "
            "n_refiner_layers)",
            by=Z_IMAGE,
            why="numbers of the architecture",
        ),
    ),
)
