"""Supported models: their detection, what core's model classes read from them, and their latent formats."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Has, Overrides
from scripts.core_contract.model_kinds import Detects, Equals

BRIDGE, CUSTOM_MODEL, LATENTS = "nodes/bridges/bridge.py", "nodes/bridges/custom_model.py", "nodes/bridges/latents.py"
MODEL, CORE_MODEL, PREVIEWS = "nodes/remote/transformer.py", "nodes/remote/model.py", "nodes/remote/previews.py"
LEFT_OVER, FAMILIES = "nodes/bridges/left_over.py", "nodes/families"
FLUX, FLUX2, HUNYUAN = f"{FAMILIES}/flux.py", f"{FAMILIES}/flux2.py", f"{FAMILIES}/hunyuan_video.py"
LTX, MOCHI, PIXART, QWEN = (f"{FAMILIES}/{name}.py" for name in ("ltx", "mochi", "pixart", "qwen_image"))
STABLE_DIFFUSION, WAN, Z_IMAGE = f"{FAMILIES}/sd3.py", f"{FAMILIES}/wan.py", f"{FAMILIES}/z_image.py"
COGVIDEOX, LATTE = f"{FAMILIES}/cogvideox.py", f"{FAMILIES}/latte.py"

ENTRIES = (
    *core_module(
        "comfy.supported_models_base",
        Has("BASE", "unet_extra_config sampling_settings latent_format", by=CUSTOM_MODEL, why="what BaseModel reads"),
        Has("BASE", "unet_config", by=f"{BRIDGE} {CUSTOM_MODEL} {MODEL}", why="names and shapes of weights"),
        Has("BASE", "latent_format", by=f"{MODEL} {WAN} {LTX}", why="channels of the latent"),
        Overrides("BASE.get_model(state_dict, prefix, device)", by=CUSTOM_MODEL, why="a custom model class"),
        Calls("BASE.get_model(state_dict, prefix)", by=CORE_MODEL, why="the model class"),
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
        Has("LatentFormat", "latent_rgb_factors latent_rgb_factors_bias", by=PREVIEWS, why="previews"),
        Has("LatentFormat", "taesd_decoder_name", by=LATTE, why="latents of a video"),
        Has("SD3", "shift_factor", by=LATENTS, why="the checkpoint's own VAE"),
        Has("Flux", "shift_factor", by=LATENTS, why="the checkpoint's own VAE"),
        Has("Wan21", "latents_mean latents_std", by=LATENTS, why="the checkpoint's own VAE"),
        Has("Mochi", "latents_mean latents_std", by=LATENTS, why="the checkpoint's own VAE"),
        Equals("Wan21.latent_channels", 16, by=WAN, why="which of Wan's two VAEs"),
        Equals("Wan22.latent_channels", 48, by=WAN, why="which of Wan's two VAEs"),
        Equals("LTXV.latent_channels", 128, by=LTX, why="the only LTX-Video that core has"),
    ),
)
