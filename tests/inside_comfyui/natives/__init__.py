"""Tiny native models of the families, by family and variant."""

import comfy.supported_models

from natives import cogvideox, flux, flux2, hunyuan_video, ltx, mochi, pixart, qwen_image, sd3, wan, z_image
from natives.case import Case

HAS_COGVIDEOX = hasattr(comfy.supported_models, "CogVideoX_T2V")
"""Whether this version of ComfyUI has the family."""
FAMILIES = (
    flux, flux2, hunyuan_video, ltx, mochi, pixart, qwen_image, sd3, wan, z_image,
    *([cogvideox] if HAS_COGVIDEOX else []),
)  # fmt: skip
"""Those that not every version has come last, so a case has the same place in ``CASES`` everywhere."""
HEAVY = ("mochi t2v",)
"""Cases with a width that ComfyUI fixes, and one block. Only the newest version runs them outside the grid."""
FIRST = tuple(f"{family.__name__.rpartition('.')[2]} {next(iter(family.CASES))}" for family in FAMILIES)
"""One case per family, which older versions run, too."""
CASES: dict[str, Case] = {
    f"{family.__name__.rpartition('.')[2]} {kind}": case for family in FAMILIES for kind, case in family.CASES.items()
}
