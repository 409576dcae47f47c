"""What Latte's bridge relies on."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Has

LATTE = "nodes/families/latte.py"

ENTRIES = (
    *core_module(
        "comfy.latent_formats",
        Has("LatentFormat", "taesd_decoder_name", by=LATTE, why="latents of a video"),
    ),
)
