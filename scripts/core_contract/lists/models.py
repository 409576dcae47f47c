"""Model classes, their detection, latent formats and conditioning."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Has, Mentions, Overrides, Passes, ReadsOnly
from scripts.core_contract.model_kinds import Detects, Equals

BRIDGE, OWN_MODEL, LATENTS = "nodes/bridges/bridge.py", "nodes/bridges/own_model.py", "nodes/bridges/latents.py"
MODEL, CORE_MODEL, PATCHER = "nodes/remote/transformer.py", "nodes/remote/model.py", "nodes/remote/patcher.py"
SAMPLER, PREVIEWS, REFUSALS = "nodes/sampler.py", "nodes/remote/previews.py", "nodes/bridges/refusals.py"
FAMILIES = "nodes/families"
FLUX, FLUX2, HUNYUAN = f"{FAMILIES}/flux.py", f"{FAMILIES}/flux2.py", f"{FAMILIES}/hunyuan_video.py"
LTX, MOCHI, PIXART, QWEN = (f"{FAMILIES}/{name}.py" for name in ("ltx", "mochi", "pixart", "qwen_image"))
STABLE_DIFFUSION, WAN, Z_IMAGE = f"{FAMILIES}/sd3.py", f"{FAMILIES}/wan.py", f"{FAMILIES}/z_image.py"
COGVIDEOX, LATTE, CLASSES = f"{FAMILIES}/cogvideox.py", f"{FAMILIES}/latte.py", f"{FAMILIES}/dit.py"

ENTRIES = (
    *core_module(
        "comfy.model_base",
        Has("ModelType", "EPS V_PREDICTION", by=OWN_MODEL, why="what a family of ours predicts"),
        Calls("BaseModel(model_config, *, model_type)", by=OWN_MODEL, why="a model class of ours"),
        Overrides("BaseModel.extra_conds(**kwargs)", by=OWN_MODEL, why="arguments of a call"),
        Calls("BaseModel.concat_cond(**kwargs)", by=f"{OWN_MODEL} {COGVIDEOX}", why="an image beside the noise"),
        Mentions(
            "BaseModel.concat_cond",
            "concat_mask concat_latent_image concat_image mask_inverted noise",
            by=COGVIDEOX,
            why="an image beside the noise",
        ),
        Mentions("BaseModel.extra_conds", "c_concat c_crossattn cross_attn", by=OWN_MODEL, why="arguments of a call"),
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
            "BaseModel.__init__", "disable_unet_model_creation", by=f"{BRIDGE} {OWN_MODEL}", why="no weights here"
        ),
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
            "dtype eval to load_state_dict state_dict",
            by=MODEL,
            why="the stand-in has these",
            word="dtype state_dict",
        ),
        ReadsOnly(
            "Flux", "self.diffusion_model", "patch_size img_in", by=FLUX, why="the stand-in", word="patch_size img_in"
        ),
        ReadsOnly(
            "HunyuanVideo",
            "self.diffusion_model",
            "",
            by=HUNYUAN,
            why="the stand-in has none",
            word="HunyuanVideo",
        ),
        ReadsOnly("LTXV", "self.diffusion_model", "patchifier", by=LTX, why="the stand-in has it", word="patchifier"),
        ReadsOnly(
            "WAN21", "self.diffusion_model", "patch_embedding", by=WAN, why="the stand-in", word="patch_embedding"
        ),
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
        Mentions("Flux.extra_conds", "guidance ref_latents", by=f"{FLUX} {BRIDGE}", why="arguments of a call"),
        Mentions(
            "HunyuanVideo.extra_conds",
            "attention_mask guidance guiding_frame_index",
            by=f"{HUNYUAN} {BRIDGE}",
            why="arguments of a call",
        ),
        Mentions("LTXV.extra_conds", "attention_mask frame_rate denoise_mask keyframe_idxs", by=LTX, why="arguments"),
        Mentions("GenmoMochi.extra_conds", "attention_mask num_tokens", by=MOCHI, why="arguments of a call"),
        Mentions("PixArt.extra_conds", "c_size c_ar", by=PIXART, why="arguments of a call"),
        Mentions("QwenImage.extra_conds", "ref_latents ref_latents_method", by=QWEN, why="arguments of a call"),
        Mentions("WAN21.extra_conds", "clip_fea", by=WAN, why="what an image encoder saw"),
        Mentions("WAN22.extra_conds", "denoise_mask", by=WAN, why="frames that are given"),
        Mentions("Lumina2.extra_conds", "num_tokens clip_text_pooled", by=Z_IMAGE, why="arguments that are ignored"),
        Mentions(
            "",
            "concat_latent_image concat_mask concat_image clip_vision_output reference_latents vace_frames "
            "time_dim_concat camera_conditions audio_embed reference_motion control_video face_video_pixels "
            "pose_video_latent unclip_conditioning",
            by=REFUSALS,
            why="conditioning that models without an input for it refuse",
        ),
    ),
    *core_module(
        "comfy.conds",
        Calls("CONDRegular(cond)", by=f"{OWN_MODEL} {CLASSES}", why="an argument of a call"),
        Calls("CONDNoiseShape(cond)", by=OWN_MODEL, why="an image beside the noise"),
    ),
    *core_module(
        "comfy.ops",
        Has("", "disable_weight_init", by=BRIDGE, why="core's transformer on the meta device"),
    ),
    *core_module(
        "comfy.supported_models_base",
        Calls("BASE(unet_config)", by=OWN_MODEL, why="a family that ComfyUI lacks"),
        Has("BASE", "unet_extra_config sampling_settings latent_format", by=OWN_MODEL, why="what BaseModel reads"),
        Has("BASE", "unet_config", by=f"{BRIDGE} {OWN_MODEL} {MODEL}", why="names and shapes of weights"),
        Has("BASE", "latent_format", by=f"{MODEL} {WAN} {LTX}", why="channels of the latent"),
        Overrides(
            "BASE.get_model(state_dict, prefix, device)", by=OWN_MODEL, why="the model class of a family of ours"
        ),
        Calls("BASE.get_model(state_dict, prefix)", by=CORE_MODEL, why="the model class"),
    ),
    *core_module(
        "comfy.model_detection",
        Calls("model_config_from_unet_config(unet_config)", by=BRIDGE, why="core's class of a checkpoint"),
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
        Detects("Flux2", {"image_model": "flux2"}, "Flux2", "Flux2", "shift", by=FLUX2, why="Flux.2"),
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
        Detects("LTXV", {"image_model": "ltxv"}, "LTXV", "LTXV", "shift", by=LTX, why="LTX-Video"),
        Detects(
            "GenmoMochi",
            {"image_model": "mochi_preview"},
            "GenmoMochi",
            "Mochi",
            "shift multiplier",
            by=MOCHI,
            why="Mochi 1",
        ),
        Detects(
            "PixArtAlpha",
            {"image_model": "pixart_alpha"},
            "PixArt",
            "SD15",
            "beta_schedule linear_start",
            by=PIXART,
            why="PixArt-alpha",
        ),
        Detects(
            "PixArtSigma",
            {"image_model": "pixart_sigma"},
            "PixArt",
            "SDXL",
            "beta_schedule linear_start",
            by=PIXART,
            why="PixArt-Sigma",
        ),
        Detects("QwenImage", {"image_model": "qwen_image"}, "QwenImage", "Wan21", "shift", by=QWEN, why="Qwen-Image"),
        Detects(
            "SD3",
            {"in_channels": 16, "pos_embed_scaling_factor": None},
            "SD3",
            "SD3",
            "shift",
            by=STABLE_DIFFUSION,
            why="Stable Diffusion 3",
        ),
        Detects(
            "WAN21_T2V",
            {"image_model": "wan2.1", "model_type": "t2v"},
            "WAN21",
            "Wan21",
            "shift",
            by=WAN,
            why="text to video",
        ),
        Detects(
            "WAN22_T2V",
            {"image_model": "wan2.1", "model_type": "t2v", "out_dim": 48},
            "WAN22",
            "Wan22",
            "shift",
            by=WAN,
            why="2.2's TI2V",
        ),
        Detects(
            "WAN21_I2V",
            {"image_model": "wan2.1", "model_type": "i2v", "in_dim": 36},
            "WAN21",
            "Wan21",
            "shift",
            by=WAN,
            why="image to video",
        ),
        Detects(
            "ZImage", {"image_model": "lumina2", "dim": 3840}, "Lumina2", "Flux", "shift", by=Z_IMAGE, why="Z-Image"
        ),
    ),
    *core_module(
        "comfy.latent_formats",
        Has("LatentFormat", "scale_factor latent_channels latent_dimensions", by=COGVIDEOX, why="CogVideoX's latents"),
        Has("LatentFormat", "scale_factor", by=LATENTS, why="the checkpoint's own VAE"),
        Has("LatentFormat", "latent_rgb_factors latent_rgb_factors_bias latent_channels", by=PREVIEWS, why="previews"),
        Has("LatentFormat", "latent_dimensions taesd_decoder_name", by=LATTE, why="latents of a video"),
        Calls("LatentFormat()", by=COGVIDEOX, why="CogVideoX's latents"),
        Calls("SD15(scale_factor)", by=f"{LATTE} {CLASSES}", why="latents of Stable Diffusion's VAE"),
        Has("SD3", "shift_factor", by=LATENTS, why="the checkpoint's own VAE"),
        Has("Flux", "shift_factor", by=LATENTS, why="the checkpoint's own VAE"),
        Has("Wan21", "latents_mean latents_std", by=LATENTS, why="the checkpoint's own VAE"),
        Has("Mochi", "latents_mean latents_std", by=LATENTS, why="the checkpoint's own VAE"),
        Equals("Wan21.latent_channels", 16, by=WAN, why="which of Wan's two VAEs"),
        Equals("Wan22.latent_channels", 48, by=WAN, why="which of Wan's two VAEs"),
        Equals("LTXV.latent_channels", 128, by=LTX, why="the only LTX-Video that core has"),
    ),
)
