"""Cases whose files ComfyUI's own UNETLoader loads, and what stands between a family's loader and its sampler.

ComfyUI reads most sizes from a file and assumes the published ones for the rest. The sizes here are those that it reads
or, where they are small enough, those that it assumes. ``ASSUMED`` lists the sizes that remain.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from natives import PRESENT, name_of
from natives.case import Case, Random, Sampling
from natives.files import FILE_CASES, FIRST_FILES, in_metadata

Detect = Callable[..., dict[str, Any] | None]

POOLED, TEXT = 768, 4096
"""Widths of HunyuanVideo's pooled text and of Wan's text, which ComfyUI assumes."""


def by_image_model(families: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Return the families' ``ASSUMED`` by ``image_model``.

    Raises:
        ValueError: a file's ``image_model`` does not say whose sizes ComfyUI assumes.
    """
    owners: dict[str, Any] = {}
    for family in families:
        for image_model in {case.unet["image_model"] for case in family.CASES.values() if hasattr(family, "ASSUMED")}:
            if image_model in owners:
                both = f"{name_of(owners[image_model])} and {name_of(family)}"
                raise ValueError(f"{both} have ASSUMED for {image_model!r}: let another number decide in loadable.py")
            owners[image_model] = family
    return {image_model: family.ASSUMED for image_model, family in owners.items()}


ASSUMED = by_image_model(PRESENT)
"""Sizes that ComfyUI assumes to be published ones, by ``image_model``. The published models do not fit into a test.

Newer versions read Flux's and Flux.2's from the file. Theirs are the same.
"""

METADATA: dict[str, tuple[str, ...]] = {
    "ltx": ("num_attention_heads", "caption_channels", "causal_temporal_positioning"),
}
"""What ComfyUI reads from a file's metadata, as files of LTX-Video have it."""


def with_assumed_sizes(detect: Detect) -> Detect:
    """Return ComfyUI's ``detect_unet_config`` with the sizes of ``ASSUMED``."""

    def detected(*args: Any, **options: Any) -> dict[str, Any] | None:
        found = detect(*args, **options)
        return found and {**found, **ASSUMED.get(found.get("image_model", ""), {})}

    return detected


def _loadable(name: str, case: Case) -> Case:
    family = name.split()[0]
    if family == "hunyuan_video":
        extra = case.extra
        case = replace(case, unet={**case.unet, "vec_in_dim": POOLED}, extra=lambda random: _pooled(extra, random))
    if family == "wan":
        case = replace(case, unet={**case.unet, "text_dim": TEXT, "freq_dim": 256}, text=(case.text[0], TEXT))
    if family == "mochi":
        case = replace(case, unet={**case.unet, **ASSUMED["mochi_preview"]}, latent=(2, 12, 2, 4, 6))
    return case


def _pooled(extra: Callable[[Random], dict[str, Any]], random: Random) -> dict[str, Any]:
    return {**extra(random), "pooled_output": random(1, POOLED)}


CASES: dict[str, Case] = {name: _loadable(name, case) for name, case in FILE_CASES.items()}
FIRST = FIRST_FILES
"""One case a family."""


def write(name: str, folder: Path) -> None:
    """Write a case's file into a folder, with the names of ComfyUI's own class, unless it is there."""
    path = folder / file_name(name)
    if path.exists():
        return
    case = CASES[name]
    weights = case.native().model.diffusion_model.state_dict()
    config = {key: case.unet[key] for key in METADATA.get(name.split()[0], ())} or in_metadata(case)
    save_file(
        {key: tensor.contiguous() for key, tensor in weights.items()},
        path,
        {"config": json.dumps({"transformer": config})} if config else {},
    )


def file_name(name: str) -> str:
    """Return the name of a case's file."""
    return f"{name}.safetensors"


SAMPLING: dict[str, Sampling] = {name_of(family): family.SAMPLING for family in PRESENT}
"""By family."""
