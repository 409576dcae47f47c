"""Tiny native models of the families, by family and kind."""

from natives import flux, flux2, hunyuan_video, ltx, mochi, pixart, qwen_image, sd3, wan, z_image
from natives.case import Case

FAMILIES = (flux, flux2, hunyuan_video, ltx, mochi, pixart, qwen_image, sd3, wan, z_image)
HEAVY = ("mochi t2v",)
"""Those whose width ComfyUI fixes: they run with the newest version alone."""
FIRST = tuple(f"{family.__name__.rpartition('.')[2]} {next(iter(family.CASES))}" for family in FAMILIES)
"""One of each family: older versions run these alone."""
CASES: dict[str, Case] = {
    f"{family.__name__.rpartition('.')[2]} {kind}": case for family in FAMILIES for kind, case in family.CASES.items()
}
