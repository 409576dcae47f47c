"""What Open-Sora 1.2's bridge and nodes rely on."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Has, Overrides

OPEN_SORA1, VIDEO = "nodes/families/open_sora1.py", "nodes/open_sora1/video.py"

ENTRIES = (
    *core_module(
        "comfy.model_base",
        Overrides(
            "BaseModel.scale_latent_inpaint(sigma, noise, latent_image, **kwargs)",
            by=OPEN_SORA1,
            why="given frames without noise",
        ),
    ),
    *core_module(
        "comfy.latent_formats",
        Has("LatentFormat", "latent_channels latent_dimensions", by=OPEN_SORA1, why="latents of a video"),
    ),
    *core_module(
        "comfy.model_patcher",
        Has("ModelPatcher", "set_model_denoise_mask_function", by=VIDEO, why="frames that are edited"),
    ),
)
