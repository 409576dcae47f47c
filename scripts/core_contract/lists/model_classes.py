"""Core's model classes and conditioning: what a MODEL is made of, and what it reads from our stand-in."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Has, Mentions, Passes, ReadsOnly

BRIDGE, CUSTOM_MODEL, REFUSALS = "nodes/bridges/bridge.py", "nodes/bridges/custom_model.py", "nodes/bridges/refusals.py"
MODEL, CORE_MODEL, PATCHER = "nodes/remote/transformer.py", "nodes/remote/model.py", "nodes/remote/patcher.py"
SAMPLER, FAMILIES = "nodes/remote/backend_sampler.py", "nodes/families"
FLUX, HUNYUAN, LTX = f"{FAMILIES}/flux.py", f"{FAMILIES}/hunyuan_video.py", f"{FAMILIES}/ltx.py"
MOCHI, PIXART, QWEN = f"{FAMILIES}/mochi.py", f"{FAMILIES}/pixart.py", f"{FAMILIES}/qwen_image.py"
STABLE_DIFFUSION, WAN, Z_IMAGE = f"{FAMILIES}/sd3.py", f"{FAMILIES}/wan.py", f"{FAMILIES}/z_image.py"
COGVIDEOX = f"{FAMILIES}/cogvideox.py"

ENTRIES = (
    *core_module(
        "comfy.model_base",
        Mentions(
            "BaseModel.concat_cond",
            "concat_mask concat_latent_image concat_image mask_inverted noise",
            by=COGVIDEOX,
            why="an image beside the noise",
        ),
        Mentions(
            "BaseModel.extra_conds", "c_concat c_crossattn cross_attn", by=CUSTOM_MODEL, why="arguments of a call"
        ),
        Has("BaseModel", "model_config concat_keys", by=COGVIDEOX, why="an image beside the noise"),
        Has("BaseModel", "diffusion_model latent_format", by=CORE_MODEL, why="where our stand-in goes"),
        Has("BaseModel", "diffusion_model", by=f"{PATCHER} {SAMPLER}", why="finds our stand-in"),
        Has("BaseModel", "model_sampling", by=SAMPLER, why="noise and timesteps"),
        Has(
            "BaseModel",
            "memory_usage_factor state_dict_for_saving",
            by=PATCHER,
            why="weighs nothing, saving is refused",
        ),
        Calls("BaseModel.scale_latent_inpaint(*, sigma, noise, latent_image, x)", by=SAMPLER, why="what a mask keeps"),
        Mentions(
            "BaseModel.__init__", "disable_unet_model_creation", by=f"{BRIDGE} {CUSTOM_MODEL}", why="no weights here"
        ),
        Has("BaseModel", "_apply_model", by="nodes/remote/recorded_step.py", why="runs past wrappers"),
        Passes(
            "BaseModel._apply_model",
            "self.diffusion_model(xc, t, context=context, control=control, transformer_options=transformer_options, "
            "**extra_conds)",
            by=MODEL,
            why="how the stand-in is called",
            word="forward transformer_options",
        ),
        ReadsOnly(
            "BaseModel",
            "self.diffusion_model",
            "dtype eval to load_state_dict requires_grad_ state_dict",
            by=MODEL,
            why="the stand-in has these",
            word="dtype state_dict",
        ),
        ReadsOnly("Flux", "self.diffusion_model", "patch_size img_in", by=FLUX, why="the stand-in", word="patch_size"),
        ReadsOnly(
            "HunyuanVideo",
            "self.diffusion_model",
            "",
            by=HUNYUAN,
            why="the stand-in has none",
            word="HunyuanVideo",
        ),
        ReadsOnly("LTXV", "self.diffusion_model", "patchifier", by=LTX, why="the stand-in has it", word="patchifier"),
        ReadsOnly("WAN21", "self.diffusion_model", "patch_embedding", by=WAN, why="the stand-in", word="WanModel"),
        ReadsOnly("WAN22", "self.diffusion_model", "", by=WAN, why="the stand-in has none", word="WanModel"),
        ReadsOnly(
            "GenmoMochi", "self.diffusion_model", "", by=MOCHI, why="the stand-in has none", word="AsymmDiTJoint"
        ),
        ReadsOnly("PixArt", "self.diffusion_model", "", by=PIXART, why="the stand-in has none", word="PixArtMS"),
        ReadsOnly(
            "QwenImage",
            "self.diffusion_model",
            "",
            by=QWEN,
            why="the stand-in has none",
            word="QwenImageTransformer2DModel",
        ),
        ReadsOnly(
            "SD3",
            "self.diffusion_model",
            "",
            by=STABLE_DIFFUSION,
            why="the stand-in has none",
            word="OpenAISignatureMMDITWrapper",
        ),
        ReadsOnly("Lumina2", "self.diffusion_model", "", by=Z_IMAGE, why="the stand-in has none", word="NextDiT"),
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
        Mentions("Flux.extra_conds", "guidance ref_latents", by=f"{FLUX} {BRIDGE}", why="arguments of a call"),
        Mentions(
            "HunyuanVideo.extra_conds",
            "attention_mask guidance guiding_frame_index",
            by=f"{HUNYUAN} {BRIDGE}",
            why="arguments of a call",
        ),
        Mentions("LTXV.extra_conds", "attention_mask frame_rate denoise_mask keyframe_idxs", by=LTX, why="arguments"),
        Mentions("LTXV.extra_conds", "guide_attention_entries", by=LTX, why="guides of a video", since=(0, 27, 0)),
        Mentions("GenmoMochi.extra_conds", "attention_mask num_tokens", by=MOCHI, why="arguments of a call"),
        Mentions("PixArt.extra_conds", "c_size c_ar", by=PIXART, why="arguments of a call"),
        Mentions("QwenImage.extra_conds", "ref_latents ref_latents_method", by=QWEN, why="arguments of a call"),
        Mentions("WAN21.extra_conds", "clip_fea", by=WAN, why="what an image encoder saw"),
        Mentions("WAN22.extra_conds", "denoise_mask", by=WAN, why="frames that are given"),
        Mentions("Lumina2.extra_conds", "num_tokens clip_text_pooled", by=Z_IMAGE, why="arguments that are ignored"),
        Mentions(
            "",
            "concat_latent_image concat_mask concat_image noise_concat clip_vision_output reference_latents "
            "vace_frames time_dim_concat camera_conditions audio_embed reference_motion control_video "
            "face_video_pixels pose_video_latent unclip_conditioning ref_latent",
            by=REFUSALS,
            why="conditioning that models without an input for it refuse",
        ),
        Mentions(
            "",
            "clip_vision_outputs reference_latents_text_embeds context_latents",
            by=REFUSALS,
            why="conditioning that is refused",
            since=(0, 27, 0),
        ),
        Mentions("BaseModel.extra_conds", "crossattn_controlnet", by=MODEL, why="only ControlNets use it"),
    ),
)
