"""What Mochi's bridge relies on."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Mentions, ReadsOnly
from scripts.core_contract.lists.transformers import skippable, transformer
from scripts.core_contract.model_kinds import Detects

MOCHI = "nodes/families/mochi.py"

ENTRIES = (
    *core_module(
        "comfy.model_base",
        ReadsOnly(
            "GenmoMochi", "self.diffusion_model", "", by=MOCHI, why="the stand-in has none", word="AsymmDiTJoint"
        ),
        Mentions("GenmoMochi.extra_conds", "attention_mask num_tokens", by=MOCHI, why="arguments of a call"),
    ),
    *core_module(
        "comfy.supported_models",
        Detects(
            "GenmoMochi",
            {"image_model": "mochi_preview"},
            "GenmoMochi",
            "Mochi",
            "shift multiplier",
            by=MOCHI,
            why="Mochi 1",
        ),
    ),
    *core_module(
        "comfy.ldm.genmo.joint_model.asymm_models_joint",
        *transformer(
            "AsymmDiTJoint(x, timestep, *, context, attention_mask, num_tokens, control, transformer_options)",
            MOCHI,
            "context attention_mask num_tokens",
        ),
        Calls(
            "AsymmDiTJoint(*, depth, patch_size, num_heads, hidden_size_x, hidden_size_y, mlp_ratio_x, mlp_ratio_y, "
            "learn_sigma, in_channels, patch_embed_bias, posenc_preserve_area, timestep_mlp_bias, attend_to_padding, "
            "timestep_scale, use_t5, t5_feat_dim, t5_token_length, rope_theta)",
            by=MOCHI,
            why="numbers of the architecture",
        ),
        skippable("AsymmDiTJoint.forward", MOCHI),
    ),
)
