"""Estimates a request's memory beyond weights, from measured tables.

``python -m lab working-memory`` measures the tables and each family's ``values_alive`` anew. They count tensors that
are alive at once, without workspaces of kernels and fragments. A request that does not fit by the estimate cannot work.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ..denoiser.plan import DenoisingPlan
from ..families.registry import family_of
from ..interfaces.geometry import IMAGE
from ..interfaces.patch_plan import patch_count

_CODING: dict[tuple[str, bool], tuple[float, float, float]] = {
    ("AutoencoderKL", False): (24.0, 24.0, 0.0),
    ("AutoencoderKL", True): (20.1, 20.1, 0.0),
    ("AutoencoderKLFlux2", False): (24.0, 24.0, 0.0),
    ("AutoencoderKLFlux2", True): (20.1, 20.1, 0.0),
    ("AutoencoderKLTemporalDecoder", False): (32.0, 0.0, 32.0),
    ("AutoencoderKLTemporalDecoder", True): (20.1, 20.0, 0.1),
    ("AutoencoderKLWan", False): (72.2, 203.4, 0.0),
    ("AutoencoderKLWan", True): (40.4, 146.9, 0.1),
    ("AutoencoderKLWan is_residual", False): (22.7, 84.3, 0.0),
    ("AutoencoderKLWan is_residual", True): (7.7, 28.0, 0.1),
    ("AutoencoderKLQwenImage", False): (72.2, 203.4, 0.0),
    ("AutoencoderKLQwenImage", True): (40.4, 146.9, 0.1),
    ("AutoencoderKLCogVideoX", False): (132.1, 625.6, 0.0),
    ("AutoencoderKLCogVideoX", True): (60.3, 254.6, 0.1),
    ("AutoencoderKLHunyuanVideo", False): (46.4, 19.3, 35.1),
    ("AutoencoderKLHunyuanVideo", True): (28.3, 8.1, 20.2),
    ("AutoencoderKLLTXVideo", False): (3.1, 1.8, 1.3),
    ("AutoencoderKLLTXVideo", True): (2.3, 1.0, 1.3),
    ("AutoencoderKLLTXVideo upsample_factor", False): (1.5, 0.8, 0.7),
    ("AutoencoderKLLTXVideo upsample_factor", True): (1.4, 0.5, 0.7),
    ("AutoencoderKLMiniMaxH3", False): (4.9, 33.0, 0.0),
    ("AutoencoderKLMiniMaxH3", True): (28.4, 351.8, 0.1),
    ("AutoencoderKLMochi", False): (28.2, 8.1, 20.1),
    ("AutoencoderKLMochi", True): (28.3, 8.1, 20.2),
    ("VideoAutoencoderPipeline", False): (24.0, 24.0, 0.0),
    ("VideoAutoencoderPipeline", True): (20.1, 20.0, 0.1),
}
"""Bytes in float32 for each first-level feature of a pixel, by the kind of VAE and whether it encodes.

Those of one frame alone; of a video what is fixed and what each frame adds. Of a VAE with tiles of its own, those of a
tile of a clip.
"""

_TEXT: dict[str, tuple[float, float]] = {"T5EncoderModel": (2.4, 6.0), "UMT5EncoderModel": (2.4, 6.0)}
"""Values for each hidden feature of a token, and for each head of a pair of tokens, by the text encoder's class.

Those of pairs are transformers 4's, which keeps the scores of attention. Newer versions take as few as half.
"""

_WIDTHS = ("decoder_base_dim", "base_dim", "decoder_block_out_channels", "block_out_channels")
_NARROWEST = 64
"""Channels of the first level in diffusers' defaults, for a config that does not say."""


def vae_kind(class_name: str, config: Mapping[str, Any]) -> str:
    """Return a VAE's row in the table: its class, and the entry of the config that distinguishes its forms."""
    narrows = max(config.get("upsample_factor") or (1,)) > 1
    form = "is_residual" if config.get("is_residual") else "upsample_factor" if narrows else ""
    return f"{class_name} {form}".strip()


def first_width(config: Mapping[str, Any]) -> int:
    """Return the channels of a VAE's first level."""
    width = next((config[name] for name in _WIDTHS if config.get(name)), _NARROWEST)
    return int(width if isinstance(width, int) else width[0])


def forward_bytes(class_name: str, plan: DenoisingPlan, rank: int, itemsize: int) -> int:
    """Return the bytes that a rank's tensors take at least in a forward.

    Args:
        class_name: diffusers' class of the transformer.
        plan: the request.
        rank: index of the rank in the mesh.
        itemsize: bytes of a value.
    """
    layout, workload = plan.layout, plan.workload(itemsize)
    place = layout.coordinates(rank)
    tokens = 0
    for samples, extent in workload.local_branches(layout, place):
        local = sum(workload.tokens_by_rank(layout, extent, name)[place["sequence"]] for name in extent.streams)
        if layout.pipe > 1:  # stages run one sample, and in a step loop one patch, at a time
            samples, local = min(samples, 1), local // patch_count(layout, plan.extents)
        tokens = max(tokens, samples * local)
    values = tokens * plan.geometry.width(IMAGE) * family_of(class_name).values_alive
    alive = int(values * itemsize * plan.split.cut_share(place["tensor"]))
    return alive + _kept_bytes(plan, place, itemsize)


def _kept_bytes(plan: DenoisingPlan, place: Mapping[str, int], itemsize: int) -> int:
    """Return the bytes of the keys and values that a rank keeps from one step to the next in approximate layouts."""
    layout, workload = plan.layout, plan.workload(itemsize)
    patches = layout.pipe > 1 and patch_count(layout, plan.extents) > 1
    if not plan.guided or not (patches or layout.stale == "previous"):
        return 0
    values = 0
    for samples, extent in workload.local_branches(layout, place):
        for site in plan.geometry.sites:  # a model with a site of other queries has no such layouts
            heads = workload.heads(layout, site, place).local_keys(place["ulysses"])
            tokens = sum(extent.streams[name] for name in site.streams)
            values += samples * extent.rows * (site.count // layout.pipe) * 2 * heads * site.head_dim * tokens
    return values * itemsize


def coding_bytes(
    class_name: str, config: Mapping[str, Any], *, pixels: int, frames: int, encode: bool, itemsize: int
) -> int:
    """Return the bytes that a rank's tensors take at least in a decode or encode.

    Args:
        class_name: diffusers' class of the VAE.
        config: of the VAE.
        pixels: pixels of a frame that the rank holds at once.
        frames: pixel frames of a sample.
        encode: whether it encodes.
        itemsize: bytes of a value.
    """
    single, fixed, per_frame = _CODING[vae_kind(class_name, config), encode]
    by_feature = min(single * frames, fixed + per_frame * frames) * itemsize / torch.float32.itemsize
    return int(pixels * first_width(config) * by_feature)


def text_bytes(class_name: str, config: Mapping[str, Any], *, texts: int, tokens: int, itemsize: int) -> int:
    """Return the bytes that a text encoder's tensors take at least.

    Args:
        class_name: transformers' class.
        config: of the text encoder.
        texts: number of texts.
        tokens: of each text.
        itemsize: bytes of a value.
    """
    by_feature, by_pair = _TEXT[class_name]
    values = by_feature * tokens * config.get("d_ff", 0) + by_pair * tokens**2 * config.get("num_heads", 0)
    return int(texts * values * itemsize)
