"""Cases whose files ComfyUI's own UNETLoader loads, and what stands between a family's loader and its sampler.

ComfyUI reads most sizes from a file and assumes the published ones for the rest. The sizes here are those that it reads
or, where they are small enough, those that it assumes. ``ASSUMED`` lists the sizes that remain.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from natives import z_image
from natives.case import Case, Random
from natives.files import FILE_CASES, FIRST_FILES

Detect = Callable[..., dict[str, Any] | None]

POOLED, TEXT = 768, 4096
"""Widths of HunyuanVideo's pooled text and of Wan's text, which ComfyUI assumes."""

ASSUMED: dict[str, dict[str, Any]] = {
    "flux": {"num_heads": 3},
    "flux2": {"num_heads": 3},
    "mochi_preview": {"depth": 2, "hidden_size_y": 96, "t5_feat_dim": 24},
    "pixart_alpha": {"hidden_size": 96, "caption_channels": 24},
    "pixart_sigma": {"hidden_size": 96, "caption_channels": 24},
    "qwen_image": {"num_attention_heads": 3, "joint_attention_dim": 24},
    "lumina2": {name: FILE_CASES["z_image image"].unet[name] for name in z_image.FIXED},
}
"""Sizes that ComfyUI assumes to be published ones, by ``image_model``. The published models do not fit into a test.

Newer versions read Flux's and Flux.2's from the file. Theirs are the same.
"""

METADATA = {
    "ltx": ("num_attention_heads", "caption_channels", "causal_temporal_positioning"),
}
"""What ComfyUI reads from a file's metadata, as LTX-Video's files have it."""


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
    config = {key: case.unet[key] for key in METADATA.get(name.split()[0], ())}
    save_file(
        {key: tensor.contiguous() for key, tensor in weights.items()},
        path,
        {"config": json.dumps({"transformer": config})} if config else {},
    )


def file_name(name: str) -> str:
    """Return the name of a case's file."""
    return f"{name}.safetensors"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The ModelSampling node of a family.

    Attributes:
        node: its class.
        inputs: its inputs besides the MODEL.
        needed: whether ComfyUI's samplers need it, so that it also stands behind a loader.
    """

    node: str
    inputs: dict[str, Any]
    needed: bool = False


_FLUX = Sampling(node="ModelSamplingFlux", inputs={"max_shift": 1.15, "base_shift": 0.5, "width": 1024, "height": 512})
SAMPLING: dict[str, Sampling] = {
    "flux": _FLUX,
    "flux2": _FLUX,
    "hunyuan_video": Sampling(node="ModelSamplingSD3", inputs={"shift": 5.0}),
    "ltx": Sampling(node="ModelSamplingLTXV", inputs={"max_shift": 2.05, "base_shift": 0.95}),
    "mochi": Sampling(node="ModelSamplingAuraFlow", inputs={"shift": 4.0}),
    "pixart": Sampling(node="ModelSamplingDiscrete", inputs={"sampling": "eps", "zsnr": True}),
    "qwen_image": Sampling(node="ModelSamplingAuraFlow", inputs={"shift": 3.1}),
    "sd3": Sampling(node="ModelSamplingSD3", inputs={"shift": 4.0}),
    "wan": Sampling(node="ModelSamplingSD3", inputs={"shift": 5.0}),
    "z_image": Sampling(node="ModelSamplingAuraFlow", inputs={"shift": 2.0}),
    "cogvideox": Sampling(node="ModelSamplingDiscrete", inputs={"sampling": "v_prediction", "zsnr": True}, needed=True),
}
"""By family."""
