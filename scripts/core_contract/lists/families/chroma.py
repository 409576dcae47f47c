"""What Chroma's bridge relies on."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Has, Mentions, ReadsOnly
from scripts.core_contract.lists.transformers import BRIDGE, skippable, transformer
from scripts.core_contract.model_kinds import Detects

CHROMA, FLUX = "nodes/families/chroma.py", "nodes/families/flux.py"

ENTRIES = (
    *core_module(
        "comfy.model_base",
        ReadsOnly("Chroma", "self.diffusion_model", "", by=CHROMA, why="the stand-in has none", word="Chroma"),
        Mentions("Chroma.extra_conds", "guidance", by=BRIDGE, why="an argument of a call"),
    ),
    *core_module(
        "comfy.supported_models",
        Detects("Chroma", {"image_model": "chroma"}, "Chroma", "Flux", "multiplier", by=CHROMA, why="Chroma"),
    ),
    *core_module("comfy.sd", Has("CLIPType", "CHROMA", by=CHROMA, why="the family's text encoders")),
    *core_module(
        "comfy.ldm.chroma.model",
        *transformer("Chroma(x, timestep, *, context, guidance, control, transformer_options)", CHROMA, "guidance"),
        Calls(
            "ChromaParams(*, in_channels, out_channels, context_in_dim, hidden_size, mlp_ratio, num_heads, depth, "
            "depth_single_blocks, axes_dim, theta, patch_size, qkv_bias, in_dim, out_dim, hidden_dim, n_layers, "
            "txt_ids_dims, vec_in_dim)",
            by=CHROMA,
            why="numbers of the architecture",
            word="in_channels hidden_dim n_layers",
        ),
        skippable("Chroma.forward_orig", FLUX, "double_block single_block"),
    ),
)
