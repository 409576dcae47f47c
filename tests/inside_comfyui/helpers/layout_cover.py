"""Which exact layouts a case runs with: strategies in turn, so that families and versions of ComfyUI cover them."""

from pathlib import Path

import comfyui_version
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from natives import CASES, FIRST, HEAVY

from scripts import comfy_paths

STRATEGIES = tuple(
    map(
        ParallelLayout.parse,
        ("ulysses=2", "cfg=2", "ring=2", "tensor=2", "data=2", "pipe=2 patches=1", "ulysses=2 shard_weights"),
    )
)
"""One layout of two ranks for each way of splitting the work."""
EACH = 2
"""How many of them a case runs with: one for KSampler and one for Parallel Sampler."""
IS_NEWEST = comfy_paths.release(Path(comfyui_version.__file__).parent) >= comfy_paths.NEWEST_TESTED
"""Whether the running ComfyUI is the newest that is tested. It runs all cases, and others run the first of a family."""


def layouts(name: str, *, newest: bool = IS_NEWEST) -> list[ParallelLayout]:
    """Return the layouts of a case. The newest ComfyUI continues where the others stop."""
    useful = [layout for layout in STRATEGIES if _is_useful(layout, name)]
    start = EACH * (_place(name) + newest)
    return [useful[(start + i) % len(useful)] for i in range(EACH)]


def _is_useful(layout: ParallelLayout, name: str) -> bool:
    """Whether a case has guidance, samples and blocks to split. A heavy one's weights take too long to gather."""
    case = CASES[name]
    if name in HEAVY and (layout.pipe > 1 or layout.shard_weights):
        return False
    return (layout.cfg == 1 or case.cfg != 1.0) and layout.data <= case.latent[0]


def _place(name: str) -> int:
    """Return the place of the family plus that of the case in it, so the first cases take the strategies in turn."""
    families = [first.split()[0] for first in FIRST]
    family = name.split()[0]
    return families.index(family) + [each for each in CASES if each.split()[0] == family].index(name)
