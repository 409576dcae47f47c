"""Supported models: their detection, what core's model classes read from them, and their latent formats."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Has, Overrides

BRIDGE, CUSTOM_MODEL, LATENTS = "nodes/bridges/bridge.py", "nodes/bridges/custom_model.py", "nodes/bridges/latents.py"
MODEL, CORE_MODEL, PREVIEWS = "nodes/remote/transformer.py", "nodes/remote/model.py", "nodes/remote/previews.py"
WAN, LTX = "nodes/families/wan.py", "nodes/families/ltx.py"

ENTRIES = (
    *core_module(
        "comfy.supported_models_base",
        Has("BASE", "unet_extra_config sampling_settings latent_format", by=CUSTOM_MODEL, why="what BaseModel reads"),
        Has("BASE", "unet_config", by=f"{BRIDGE} {CUSTOM_MODEL} {MODEL}", why="names and shapes of weights"),
        Has(
            "BASE",
            "latent_format",
            by=f"{WAN} {LTX}",
            why="channels of the latent",
        ),
        Overrides("BASE.get_model(state_dict, prefix, device)", by=CUSTOM_MODEL, why="a custom model class"),
        Calls("BASE.get_model(state_dict, prefix)", by=CORE_MODEL, why="the model class"),
    ),
    *core_module(
        "comfy.latent_formats",
        Has("LatentFormat", "latent_rgb_factors latent_rgb_factors_bias", by=PREVIEWS, why="previews"),
        Has("SD3", "shift_factor", by=LATENTS, why="the checkpoint's own VAE"),
        Has("Flux", "shift_factor", by=LATENTS, why="the checkpoint's own VAE"),
        Has("Wan21", "latents_mean latents_std", by=LATENTS, why="the checkpoint's own VAE"),
        Has("Mochi", "latents_mean latents_std", by=LATENTS, why="the checkpoint's own VAE"),
    ),
)
