"""What Qwen-Image's bridge relies on."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Mentions, Passes, ReadsOnly
from scripts.core_contract.lists.transformers import skippable, transformer
from scripts.core_contract.model_kinds import Detects

QWEN = "nodes/families/qwen_image.py"

ENTRIES = (
    *core_module(
        "comfy.model_base",
        ReadsOnly(
            "QwenImage",
            "self.diffusion_model",
            "",
            by=QWEN,
            why="the stand-in has none",
            word="QwenImageTransformer2DModel",
        ),
        Mentions("QwenImage.extra_conds", "ref_latents ref_latents_method", by=QWEN, why="arguments of a call"),
    ),
    *core_module(
        "comfy.supported_models",
        Detects("QwenImage", {"image_model": "qwen_image"}, "QwenImage", "Wan21", "shift", by=QWEN, why="Qwen-Image"),
    ),
    *core_module(
        "comfy.ldm.qwen_image.model",
        *transformer(
            "QwenImageTransformer2DModel(x, timestep, *, context, attention_mask, ref_latents, transformer_options)",
            QWEN,
            "context ref_latents",
        ),
        Calls(
            "QwenImageTransformer2DModel(*, in_channels, num_layers, patch_size, out_channels, attention_head_dim, "
            "num_attention_heads, joint_attention_dim, axes_dims_rope, default_ref_method)",
            by=QWEN,
            why="numbers of the architecture",
        ),
        Calls(
            "QwenImageTransformer2DModel._forward(x, timesteps, context, *, transformer_options, ref_latents, "
            "**kwargs)",
            by=QWEN,
            why="finds positions",
            word="_forward transformer_options ref_latents",
        ),
        ReadsOnly(
            "QwenImageTransformer2DModel._forward",
            "self",
            "process_img default_ref_method patch_size pe_embedder img_in txt_norm txt_in time_text_embed "
            "transformer_blocks norm_out proj_out",
            by=QWEN,
            why="a stand-in is self",
            word="process_img default_ref_method patch_size pe_embedder img_in txt_norm txt_in time_text_embed "
            "transformer_blocks norm_out proj_out",
        ),
        Calls("QwenImageTransformer2DModel.process_img(*args, **kwargs)", by=QWEN, why="finds positions"),
        Passes(
            "QwenImageTransformer2DModel._forward", "self.pe_embedder(ids)", by=QWEN, why="a stand-in keeps positions"
        ),
        Mentions(
            "QwenImageTransformer2DModel._forward", "index_timestep_zero", by=QWEN, why="references at timestep 0"
        ),
        skippable("QwenImageTransformer2DModel._forward", QWEN),
    ),
)
