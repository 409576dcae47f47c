"""What HunyuanVideo's bridge relies on."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Mentions, ReadsOnly
from scripts.core_contract.lists.transformers import BRIDGE, skippable, transformer
from scripts.core_contract.model_kinds import Detects

HUNYUAN = "nodes/families/hunyuan_video.py"

ENTRIES = (
    *core_module(
        "comfy.model_base",
        ReadsOnly(
            "HunyuanVideo",
            "self.diffusion_model",
            "",
            by=HUNYUAN,
            why="the stand-in has none",
            word="HunyuanVideo",
        ),
        Mentions(
            "HunyuanVideo.extra_conds",
            "attention_mask guidance guiding_frame_index",
            by=f"{HUNYUAN} {BRIDGE}",
            why="arguments of a call",
        ),
    ),
    *core_module(
        "comfy.supported_models",
        Detects(
            "HunyuanVideo",
            {"image_model": "hunyuan_video", "in_channels": 16},
            "HunyuanVideo",
            "HunyuanVideo",
            "shift",
            by=HUNYUAN,
            why="text to video, and the first frame's replacement",
        ),
        Detects(
            "HunyuanVideoI2V",
            {"image_model": "hunyuan_video", "in_channels": 33},
            "HunyuanVideoI2V",
            "HunyuanVideo",
            "shift",
            by=HUNYUAN,
            why="image to video",
        ),
        Detects(
            "HunyuanVideoSkyreelsI2V",
            {"image_model": "hunyuan_video", "in_channels": 32},
            "HunyuanVideoSkyreelsI2V",
            "HunyuanVideo",
            "shift",
            by=HUNYUAN,
            why="image to video",
        ),
    ),
    *core_module(
        "comfy.ldm.hunyuan_video.model",
        *transformer(
            "HunyuanVideo(x, timestep, *, context, y, guidance, attention_mask, guiding_frame_index, "
            "disable_time_r, control, transformer_options)",
            HUNYUAN,
            "context y guidance attention_mask guiding_frame_index disable_time_r",
        ),
        Calls(
            "HunyuanVideoParams(*, in_channels, patch_size, out_channels, vec_in_dim, axes_dim, meanflow, "
            "context_in_dim, hidden_size, mlp_ratio, num_heads, depth, depth_single_blocks, theta, qkv_bias, byt5, "
            "guidance_embed, use_cond_type_embedding, vision_in_dim, meanflow_sum)",
            by=HUNYUAN,
            why="numbers of the architecture",
            word="hidden_size use_cond_type_embedding meanflow_sum",
        ),
        skippable("HunyuanVideo.forward_orig", HUNYUAN, "double_block single_block"),
    ),
)
