"""What Flux.2's bridge relies on."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.model_kinds import Detects

FLUX2 = "nodes/families/flux2.py"

ENTRIES = (
    *core_module(
        "comfy.supported_models",
        Detects("Flux2", {"image_model": "flux2"}, "Flux2", "Flux2", "shift", by=FLUX2, why="Flux.2"),
    ),
)
