"""What Open-Sora 2.0's bridge and nodes rely on."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Has, Mentions, Overrides

OPEN_SORA2, GUIDER = "nodes/families/open_sora2.py", "nodes/open_sora2/guider.py"

ENTRIES = (
    *core_module(
        "comfy.model_base",
        Mentions(
            "BaseModel.concat_cond",
            "concat_mask concat_latent_image concat_image mask_inverted noise",
            by=OPEN_SORA2,
            why="given frames beside the noise",
        ),
        Has("BaseModel", "concat_keys", by=OPEN_SORA2, why="given frames beside the noise"),
    ),
    *core_module(
        "comfy.latent_formats",
        Has("HunyuanVideo", "scale_factor", by=OPEN_SORA2, why="the VAE's scale"),
    ),
    *core_module(
        "comfy.samplers",
        Overrides(
            "CFGGuider.predict_noise(x, timestep, model_options, seed)",
            by=GUIDER,
            why="three branches",
        ),
        Has("CFGGuider", "inner_set_conds sample", by=GUIDER, why="three branches, and frames over the result"),
        Mentions("CFGGuider.inner_sample", "sample_sigmas", by=GUIDER, why="which step a time lies in"),
    ),
)
