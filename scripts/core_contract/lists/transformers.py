"""Core's own transformers, which ours stand in for: how they are made, and how they are called."""

from scripts.core_contract.entry import Entry, core_module
from scripts.core_contract.kinds import Calls, Has, Mentions, Overrides, Passes, ReadsOnly

BRIDGE, MODEL, FAMILIES = "nodes/bridges/bridge.py", "nodes/remote/transformer.py", "nodes/families"
FLUX, FLUX2, HUNYUAN = f"{FAMILIES}/flux.py", f"{FAMILIES}/flux2.py", f"{FAMILIES}/hunyuan_video.py"
LTX, MOCHI, PIXART, QWEN = (f"{FAMILIES}/{name}.py" for name in ("ltx", "mochi", "pixart", "qwen_image"))
COGVIDEOX = f"{FAMILIES}/cogvideox.py"
STABLE_DIFFUSION, WAN, Z_IMAGE = f"{FAMILIES}/sd3.py", f"{FAMILIES}/wan.py", f"{FAMILIES}/z_image.py"


def transformer(signature: str, by: str, reads: str = "") -> tuple[Entry, ...]:
    """Core's own transformer: made for the names of its weights, and called as ``signature`` of its ``forward``.

    ``reads`` are the arguments of core's call that the bridge reads, separated by spaces.
    """
    name, _, arguments = signature.partition("(")
    everyone = f"{by} {BRIDGE} {MODEL}"
    return (
        Calls(f"{name}(*, device, dtype, operations)", by=f"{by} {BRIDGE}", why="names and shapes of its weights"),
        Calls(
            f"{name}.forward({arguments}",
            by=everyone,
            why="the stand-in is called like it",
            word=f"forward {name} {reads}",
        ),
    )


def skippable(forward: str, by: str, kinds: str = "double_block") -> Entry:
    """Core's transformer lets a node replace blocks of these kinds, separated by spaces, and thereby leave them out."""
    return Mentions(forward, kinds, by=by, why="blocks that a node leaves out")


ENTRIES = (
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
    *core_module(
        "comfy.ldm.lightricks.model",
        *transformer(
            "LTXVModel(x, timestep, *, context, attention_mask, frame_rate, transformer_options, keyframe_idxs, "
            "denoise_mask)",
            LTX,
            "context attention_mask frame_rate keyframe_idxs denoise_mask",
        ),
        Calls(
            "LTXVModel(*, num_layers, attention_head_dim, cross_attention_dim, num_attention_heads, caption_channels, "
            "causal_temporal_positioning)",
            by=LTX,
            why="numbers of the architecture",
        ),
        skippable("LTXVModel._process_transformer_blocks", LTX),
    ),
    *core_module(
        "comfy.ldm.lightricks.symmetric_patchifier",
        Calls(
            "latent_to_pixel_coords(latent_coords, scale_factors, *, causal_fix)", by=LTX, why="positions in the video"
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
    *core_module(
        "comfy.ldm.wan.model",
        *transformer(
            "WanModel(x, timestep, *, context, clip_fea, time_dim_concat, transformer_options)", WAN, "context clip_fea"
        ),
        Calls(
            "WanModel(*, model_type, patch_size, in_dim, out_dim, dim, ffn_dim, freq_dim, num_heads, num_layers, "
            "window_size, qk_norm, cross_attn_norm, eps, flf_pos_embed_token_number, text_dim)",
            by=WAN,
            why="numbers of the architecture",
        ),
        skippable("WanModel.forward_orig", WAN),
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
