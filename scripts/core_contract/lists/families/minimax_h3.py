"""What MiniMax-H3's bridge relies on."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Has, Mentions, ReadsOnly
from scripts.core_contract.lists.transformers import BRIDGE, MODEL
from scripts.core_contract.model_kinds import Detects

H3, CLIP = "nodes/families/minimax_h3.py", "nodes/remote/clip.py"
SINCE = (0, 33, 0)
"""The first tested release that has the family."""

ENTRIES = (
    *core_module(
        "comfy.model_base",
        ReadsOnly(
            "MiniMaxH3",
            "self.diffusion_model",
            "preprocess_text_embeds patch_size",
            by=H3,
            why="the stand-in has these",
            word="preprocess_text_embeds patch_size",
            since=SINCE,
        ),
        Mentions(
            "MiniMaxH3.extra_conds",
            "minimax_payload text_token_tags keyframes refs visual_cond_noise_aug audio_cond_noise_aug layout",
            by=H3,
            why="arguments of a call",
            since=SINCE,
        ),
        Mentions(
            "MiniMaxH3._denoise_mask_values",
            "denoise_mask audio_denoise_mask",
            by=H3,
            why="arguments of a call",
            since=SINCE,
        ),
        Calls("MiniMaxH3.audio_scale()", by=H3, why="how the sampler scales the sound", since=SINCE),
    ),
    *core_module(
        "comfy.supported_models",
        Detects(
            "MiniMaxH3",
            {"image_model": "minimax_h3"},
            "MiniMaxH3",
            "MiniMaxH3AV",
            "shift audio_shift",
            by=H3,
            why="MiniMax-H3",
            since=SINCE,
        ),
    ),
    *core_module(
        "comfy.sd",
        Has("CLIPType", "MINIMAX", by=H3, why="the family's text encoder", since=SINCE),
        Mentions(
            "detect_te_model",
            "visual.deepstack_merger_list.0.norm.weight model.layers.49.self_attn.q_proj.weight",
            by=CLIP,
            why="how its Qwen3-VL is named, of which it takes 50 layers",
            word="visual.deepstack_merger_list.",
            since=SINCE,
        ),
    ),
    *core_module(
        "comfy_extras.nodes_minimax_h3",
        Mentions(
            "MiniMaxH3SigmaShift",
            "minimax_h3_sigma_shift_video minimax_h3_sigma_shift_audio",
            by=H3,
            why="options of a sampling",
            word="minimax_h3_",
            since=SINCE,
        ),
    ),
    *core_module(
        "comfy.ldm.minimax.model",
        Has(
            "",
            "MiniMaxH3Model PackedLayout mask_row_values VISUAL_COND_TIMESTEP AUDIO_COND_TIMESTEP",
            by=H3,
            why="where ComfyUI has it",
            since=SINCE,
        ),
        Calls(
            "MiniMaxH3Model(*, device, dtype, operations)",
            by=f"{H3} {BRIDGE}",
            why="names and shapes of its weights",
            since=SINCE,
        ),
        Calls(
            "MiniMaxH3Model.forward(x, timestep, context, *, transformer_options)",
            by=f"{H3} {BRIDGE} {MODEL}",
            why="the stand-in is called like it",
            word="forward MiniMaxH3Model context",
            since=SINCE,
        ),
        Calls(
            "MiniMaxH3Model(*, num_layers, token_refiner_num_layers, hidden_size, latents_dim, audio_latents_dim, "
            "attention_head_dim, num_attention_heads, ffn_hidden_size, text_dim, time_embed_dim, rope_inv_freq_len, "
            "adaln_curve_grid, timestep_input_dim, time_embed_hidden_size, norm_eps, qk_norm_eps, final_norm_eps, "
            "sigma_shift_video, sigma_shift_audio)",
            by=H3,
            why="numbers of the architecture",
            since=SINCE,
        ),
        ReadsOnly(
            "MiniMaxH3Model.forward",
            "self",
            "sigma_shift_video sigma_shift_audio _forward",
            by=f"{H3} {MODEL}",
            why="the stand-in is self",
            word="sigma_shift_video sigma_shift_audio _forward",
            since=SINCE,
        ),
        Calls(
            "MiniMaxH3Model._cond_video_rows(payload, device)",
            by=H3,
            why="rows of keyframes and references",
            since=SINCE,
        ),
        Calls(
            "MiniMaxH3Model._cond_audio_rows(payload, device)",
            by=H3,
            why="rows of given sounds",
            since=SINCE,
        ),
        ReadsOnly(
            "MiniMaxH3Model._cond_video_rows",
            "self",
            "patch_size",
            by=H3,
            why="a stub is self",
            word="patch_size",
            since=SINCE,
        ),
        ReadsOnly(
            "MiniMaxH3Model._cond_audio_rows",
            "self",
            "",
            by=H3,
            why="a stub is self",
            word="_cond_audio_rows",
            since=SINCE,
        ),
        Calls(
            "PackedLayout(text_len, latent_t, latent_h, latent_w, audio_t, *, keyframes, refs)",
            by=H3,
            why="positions and kinds of rows",
            word="PackedLayout keyframes refs",
            since=SINCE,
        ),
        Has(
            "PackedLayout",
            "signature segments position_ids",
            by=H3,
            why="positions and kinds of rows",
            since=SINCE,
        ),
        Mentions(
            "PackedLayout",
            "cond cond_audio ref_img ref_audio audio video",
            by=H3,
            why="kinds of rows",
            since=SINCE,
        ),
        Calls(
            "mask_row_values(mask, latent_t, lat_h, lat_w)",
            by=H3,
            why="how much of the noise a row has",
            since=SINCE,
        ),
    ),
)
