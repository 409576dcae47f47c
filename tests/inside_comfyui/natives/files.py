"""Cases of every family with sizes that can be read from a file: as wide as the heads' published width allows."""

from dataclasses import replace
from typing import Any

from natives import CASES, FAMILIES
from natives.case import Case

WIDE: dict[str, dict[str, Any]] = {
    "flux": {"hidden_size": 384, "axes_dim": [16, 56, 56]},
    "flux2": {"hidden_size": 384, "axes_dim": [32, 32, 32, 32]},
    "hunyuan_video": {"hidden_size": 384, "axes_dim": [16, 56, 56]},
    "qwen_image": {"attention_head_dim": 128, "axes_dims_rope": [16, 56, 56]},
    "wan": {"dim": 384},
    "z_image": {"dim": 1152, "n_heads": 9, "n_kv_heads": 9, "axes_dims": [32, 48, 48]},
}
"""Entries of a family's ``unet_config`` that replace those of its tiny cases."""

SKIPPED = ("wan ti2v 5b, first frame",)
"""Cases whose weights are those of another case."""


def _wide(name: str, case: Case) -> Case:
    return replace(case, unet={**case.unet, **WIDE.get(name.split()[0], {})})


FILE_CASES: dict[str, Case] = {name: _wide(name, case) for name, case in CASES.items() if name not in SKIPPED}
FIRST_FILES = tuple(
    next(name for name in FILE_CASES if name.split()[0] == family.__name__.rpartition(".")[2]) for family in FAMILIES
)
"""One case a family."""
