"""Weights that a reference gives by a recipe instead of a file: seeded values by name, the same on every machine."""

import json
import math
import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from parallel_backend.errors import InvalidRequest

from .part import Part

NAMES = "_names"
"""What ends the name of the file that says which weights the recipe makes for a part."""

_TABLES = ("scale_shift_table", "y_embedding")
_SUM_ERROR = 1e-4
"""Largest difference from a sum of the reference, for each unit of the sum of magnitudes."""


def weights(part: Part, constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights whose names and shapes are in ``PART_names.json``.

    Args:
        constants: weights that the recipe does not make.

    Raises:
        InvalidRequest: the file cannot be read, or a weight has another sum than the file says.
    """
    file = part.file.with_name(f"{part.name}{NAMES}.json")
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))["names"]
    except (OSError, ValueError, KeyError) as error:
        raise InvalidRequest(f"{file} cannot be read: {error!r}") from error
    seed, made = part.entry("weights")["seed"], {}
    for name, about in listed.items():
        values = constants.get(name)
        made[name] = weight(seed, name, about["shape"]) if values is None else values.reshape(about["shape"])
        _check_sums(name, made[name], about.get("sums"))
    return made


def weight(seed: int, name: str, shape: list[int]) -> Tensor:
    """Return one weight in float32, with values that bfloat16 holds exactly.

    ``n`` is standard normal by ``numpy.random.RandomState``, whose stream is frozen, of the CRC-32 of ``SEED:NAME``.
    Scales of norms are ``1 + n / 10`` and other vectors ``n / 10``. Tables are ``n / sqrt(columns)``, and the rest is
    ``n / sqrt(inputs)``.
    """
    random = np.random.RandomState(zlib.crc32(f"{seed}:{name}".encode()))
    normal = torch.from_numpy(random.standard_normal(tuple(shape)).astype(np.float32))
    kind = name.rsplit(".", 1)[-1]
    if len(shape) == 1:
        values = 1 + 0.1 * normal if kind in ("weight", "scale") else 0.1 * normal
    else:
        values = normal / math.sqrt(shape[-1] if kind in _TABLES else math.prod(shape[1:]))
    return values.bfloat16().float()


def _check_sums(name: str, values: Tensor, sums: list[float] | None) -> None:
    if sums is None:
        return
    ours = (values.double().sum().item(), values.double().abs().sum().item())
    if any(abs(got - wanted) > _SUM_ERROR * (1 + sums[1]) for got, wanted in zip(ours, sums, strict=True)):
        raise InvalidRequest(f"the recipe gives {name} the sums {ours}, and the reference says {sums}")
