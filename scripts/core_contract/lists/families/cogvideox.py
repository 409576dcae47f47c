"""What CogVideoX's bridge relies on."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Has, Mentions, ReadsOnly
from scripts.core_contract.lists.transformers import BRIDGE, MODEL
from scripts.core_contract.model_kinds import Detects

COGVIDEOX = "nodes/families/cogvideox.py"

ENTRIES = (
    *core_module(
        "comfy.model_base",
        Mentions(
            "BaseModel.concat_cond",
            "concat_mask concat_latent_image concat_image mask_inverted noise",
            by=COGVIDEOX,
            why="an image beside the noise",
        ),
        Has("BaseModel", "model_config concat_keys", by=COGVIDEOX, why="an image beside the noise"),
        ReadsOnly(
            "CogVideoX",
            "self.diffusion_model",
            "in_channels ofs_proj_dim",
            by=COGVIDEOX,
            why="the stand-in has these",
            word="in_channels ofs_proj_dim",
            since=(0, 27, 0),
        ),
        Mentions("CogVideoX.concat_cond", "concat_latent_image", by=COGVIDEOX, why="an image", since=(0, 27, 0)),
        Mentions("CogVideoX.extra_conds", "ofs", by=COGVIDEOX, why="an argument of a call", since=(0, 27, 0)),
    ),
    *core_module(
        "comfy.supported_models",
        Detects(
            "CogVideoX_T2V",
            {"image_model": "cogvideox"},
            "CogVideoX",
            "CogVideoX",
            "beta_schedule zsnr",
            by=COGVIDEOX,
            why="CogVideoX 1.5, where ComfyUI has it",
            since=(0, 27, 0),
        ),
        Detects(
            "CogVideoX_I2V",
            {"image_model": "cogvideox", "in_channels": 32},
            "CogVideoX",
            "CogVideoX",
            by=COGVIDEOX,
            why="image to video of 1.5, where ComfyUI has it",
            since=(0, 27, 0),
        ),
    ),
    *core_module(
        "comfy.ldm.cogvideo.model",
        Has("", "CogVideoXTransformer3DModel", by=COGVIDEOX, why="where ComfyUI has it", since=(0, 27, 0)),
        Calls(
            "CogVideoXTransformer3DModel.forward(x, timestep, *, context, ofs, transformer_options)",
            by=f"{COGVIDEOX} {BRIDGE} {MODEL}",
            why="the stand-in is called like it",
            word="forward context ofs",
            since=(0, 27, 0),
        ),
        Calls(
            "CogVideoXTransformer3DModel(*, num_attention_heads, attention_head_dim, time_embed_dim, num_layers, "
            "patch_size, patch_size_t, in_channels, text_embed_dim, use_learned_positional_embeddings, "
            "use_rotary_positional_embeddings, ofs_embed_dim, out_channels, flip_sin_to_cos, freq_shift)",
            by=COGVIDEOX,
            why="numbers of the architecture",
            since=(0, 27, 0),
        ),
    ),
)
