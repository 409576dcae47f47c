"""Tiny native models of the families, by family and variant: of those that ComfyUI and single files have."""

from importlib import import_module

import comfy.supported_models
from any_folder_name.parallel_backend.families.registry import FAMILIES

from natives.case import Case

MODULES = sorted(
    (import_module(f"natives.{row.folder}") for row in FAMILIES.values() if row.in_files and row.in_core),
    key=lambda module: hasattr(module, "SINCE"),
)
"""The families' files. A case has the same place in ``CASES`` everywhere: what not every version has comes last.

A file has ``CASES``, and ``SAMPLING``, the family's ModelSampling node. Where needed it has ``SINCE``, the name in
``comfy.supported_models`` that newer versions have; ``WIDE``, entries of ``unet_config`` that differ where sizes are
read from a file; and ``ASSUMED``, those that ComfyUI assumes to be the published ones, whatever a file holds.
"""
PRESENT = [each for each in MODULES if hasattr(comfy.supported_models, getattr(each, "SINCE", "models"))]
HAS_COGVIDEOX = hasattr(comfy.supported_models, "CogVideoX_T2V")
"""Whether this version of ComfyUI has the family."""
HEAVY = ("mochi t2v",)
"""Cases with a width that ComfyUI fixes, and one block. Only the newest version runs them outside the grid."""


def name_of(module: object) -> str:
    """Return a family's name, which is that of its file."""
    return module.__name__.rpartition(".")[2]


FIRST = tuple(f"{name_of(family)} {next(iter(family.CASES))}" for family in PRESENT)
"""One case per family, which older versions run, too."""
CASES: dict[str, Case] = {
    f"{name_of(family)} {kind}": case for family in PRESENT for kind, case in family.CASES.items()
}
