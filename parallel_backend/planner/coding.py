"""Seconds of a VAE's decode, by its own layers on the meta device."""

import json
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from ..layout.split import Split
from ..vaes import VAES, module_class_of
from .balancing import shares_of_rows
from .compute import seconds
from .hardware.description import Hardware
from .request import Prompt
from .work import Work, count

_SIDE = 16
"""Rows and columns of the latent that is counted. Work grows with the area."""


def decode_seconds(prompt: Prompt, hardware: Hardware) -> float | None:
    """Return the seconds in which all devices decode a prompt's latents, each some rows; None if that is not known.

    Where a plan chooses the layout, idle ones decode, too.
    """
    model = prompt.model
    if not model.vae:
        return None
    found = _counted(model.vae, json.dumps(dict(model.vae_config), sort_keys=True), len(prompt.size) == 3)
    if found is None:
        return None
    first, each = found
    frames = prompt.size[0] if len(prompt.size) == 3 else 1
    area = math.prod(prompt.size[-2:]) / _SIDE**2
    ranks = len(hardware.devices)
    rows = Split.of(shares_of_rows(hardware, ranks)).rows(prompt.size[-2], ranks).sizes
    slowest = max(
        own * (seconds(first, device) + (frames - 1) * seconds(each, device))
        for own, device in zip(rows, hardware.devices, strict=True)
    )
    return prompt.samples * area * slowest / prompt.size[-2]


@cache
def _counted(name: str, config: str, video: bool) -> tuple[Work, Work] | None:
    """Return what a first latent frame takes, and each further one; None if the VAE does not run without numbers."""
    try:
        one = _decode(name, json.loads(config), 1, video)
        return one, _difference(_decode(name, json.loads(config), 2, video), one) if video else Work()
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, ValueError):
        return None  # a number is needed that the meta device does not have


def _decode(name: str, config: Mapping[str, Any], frames: int, video: bool) -> Work:
    vae = VAES[name](config)
    with torch.device("meta"):
        module = module_class_of(name).from_config(config)
    torch.nn.Module.to(module, torch.bfloat16).eval()  # diffusers warns in its own
    shape = (1, vae.scale.channels, *((frames,) if video and vae.scale.video else ()), _SIDE, _SIDE)
    latent = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    work, _ = count(lambda: vae.decode(module, latent, lambda pixels: None, lambda: None), rows=0, widths=())
    return work


def _difference(more: Work, less: Work) -> Work:
    products = dict(more.products)
    for product, number in less.products.items():
        products[product] = products.get(product, 0) - number
    return Work(
        products={product: number for product, number in products.items() if number > 0},
        moved=max(0.0, more.moved - less.moved), moved_cut=max(0.0, more.moved_cut - less.moved_cut),
        between=max(0.0, more.between - less.between), kernels=max(0, more.kernels - less.kernels),
    )  # fmt: skip
