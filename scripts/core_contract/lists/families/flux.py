"""What Flux.1's bridge relies on."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Mentions, Overrides, Passes, ReadsOnly
from scripts.core_contract.lists.transformers import BRIDGE, skippable, transformer
from scripts.core_contract.model_kinds import Detects

FLUX = "nodes/families/flux.py"
FLUX2 = "nodes/families/flux2.py"

ENTRIES = (
    *core_module(
        "comfy.model_base",
        ReadsOnly("Flux", "self.diffusion_model", "patch_size img_in", by=FLUX, why="the stand-in", word="patch_size"),
        Mentions("Flux.extra_conds", "guidance ref_latents", by=f"{FLUX} {BRIDGE}", why="arguments of a call"),
    ),
    *core_module(
        "comfy.supported_models",
        Detects("Flux", {"image_model": "flux", "guidance_embed": True}, "Flux", "Flux", by=FLUX, why="Flux.1 dev"),
        Detects(
            "FluxSchnell",
            {"image_model": "flux", "guidance_embed": False},
            "Flux",
            "Flux",
            "shift multiplier",
            by=FLUX,
            why="Flux.1 schnell",
        ),
        Detects(
            "FluxInpaint",
            {"image_model": "flux", "guidance_embed": True, "in_channels": 96},
            "Flux",
            "Flux",
            by=FLUX,
            why="Flux.1 Fill",
        ),
    ),
    *core_module(
        "comfy.ldm.flux.model",
        *transformer(
            "Flux(x, timestep, *, context, y, guidance, ref_latents, control, transformer_options)",
            FLUX,
            "context y guidance ref_latents",
        ),
        Calls(
            "FluxParams(*, in_channels, out_channels, patch_size, vec_in_dim, context_in_dim, hidden_size, mlp_ratio, "
            "num_heads, depth, depth_single_blocks, axes_dim, theta, qkv_bias, guidance_embed, txt_ids_dims, yak_mlp, "
            "txt_norm, global_modulation, mlp_silu_act, ops_bias, default_ref_method, ref_index_scale)",
            by=f"{FLUX} {FLUX2}",
            why="numbers of the architecture",
        ),
        Calls("Flux._forward(x, timestep, context, *, ref_latents, **kwargs)", by=FLUX, why="packs reference images"),
        Passes(
            "Flux._forward",
            "self.forward_orig(*args, timestep_zero_index=timestep_zero_index, **kwargs)",
            by=FLUX,
            why="refused: reference images at timestep 0",
            word="timestep_zero_index",
            since=(0, 27, 0),
        ),
        ReadsOnly(
            "Flux._forward",
            "self",
            "patch_size process_img params forward_orig",
            by=FLUX,
            why="a stand-in is self",
            word="patch_size process_img params forward_orig",
        ),
        ReadsOnly(
            "Flux.process_img", "self", "patch_size params", by=FLUX, why="a stand-in is self", word="patch_size params"
        ),
        Overrides(
            "Flux.forward_orig(img, img_ids, *args, **kwargs)",
            by=FLUX,
            why="a stand-in keeps tokens and positions",
            word="forward_orig",
        ),
        skippable("Flux.forward_orig", FLUX, "double_block single_block"),
    ),
)
