"""What Stable Diffusion 3's bridge relies on."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, ReadsOnly
from scripts.core_contract.lists.transformers import skippable, transformer
from scripts.core_contract.model_kinds import Detects

STABLE_DIFFUSION = "nodes/families/sd3.py"

ENTRIES = (
    *core_module(
        "comfy.model_base",
        ReadsOnly(
            "SD3",
            "self.diffusion_model",
            "",
            by=STABLE_DIFFUSION,
            why="the stand-in has none",
            word="OpenAISignatureMMDITWrapper",
        ),
    ),
    *core_module(
        "comfy.supported_models",
        Detects(
            "SD3",
            {"in_channels": 16, "pos_embed_scaling_factor": None},
            "SD3",
            "SD3",
            "shift",
            by=STABLE_DIFFUSION,
            why="Stable Diffusion 3",
        ),
    ),
    *core_module(
        "comfy.ldm.modules.diffusionmodules.mmdit",
        *transformer(
            "OpenAISignatureMMDITWrapper(x, timesteps, *, context, y, control, transformer_options)",
            STABLE_DIFFUSION,
            "context y",
        ),
        Calls(
            "OpenAISignatureMMDITWrapper(*, in_channels, patch_size, out_channels, depth, input_size, adm_in_channels, "
            "context_embedder_config, num_patches, pos_embed_max_size, pos_embed_scaling_factor, "
            "x_block_self_attn_layers, qk_norm)",
            by=STABLE_DIFFUSION,
            why="numbers of the architecture",
        ),
        skippable("MMDiT.forward_core_with_concat", STABLE_DIFFUSION),
    ),
)
