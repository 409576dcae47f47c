"""Small random models of every variant of every family, and seeded inputs for them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..geometry import LATENT, TIMESTEP
from ..models import FAMILIES, Family
from ..models.base import Variant


def short_name(class_name: str) -> str:
    """A family's name on the command line: that of its file."""
    return FAMILIES[class_name].__module__.rpartition(".")[2]


def variants() -> Iterator[tuple[str, str]]:
    """Class name and variant, of all."""
    for class_name, family in FAMILIES.items():
        yield from ((class_name, name) for name in family.variants())


def variant(class_name: str, name: str) -> Variant:
    """A variant by its name."""
    return FAMILIES[class_name].variants()[name]


def module(class_name: str, name: str, seed: int = 0) -> Any:
    """The diffusers module; weights have unit gain and biases a size, so that no part is lost in rounding."""
    import diffusers

    torch.manual_seed(seed)
    made = getattr(diffusers, class_name)(**variant(class_name, name).config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return made.eval().requires_grad_(False)


def family(class_name: str, name: str) -> Family:
    """The module in its family's three parts."""
    return FAMILIES[class_name](module(class_name, name))


def write(folder: Path, made: Any) -> Path:
    """A checkpoint in diffusers layout that holds a transformer alone."""
    made.save_pretrained(folder / "transformer")
    index = {"_class_name": "DiffusionPipeline", "transformer": ["diffusers", type(made).__name__]}
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def inputs(
    class_name: str,
    name: str,
    *,
    batch: int,
    size: Sequence[int] | None = None,
    text: int | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Seeded inputs of a forward; without ``size`` and ``text`` of the variant's own."""
    chosen = variant(class_name, name)
    size, text = tuple(size or chosen.size), text or chosen.text
    generator = torch.Generator().manual_seed(seed)
    channels = FAMILIES[class_name].describe(chosen.config).channels
    made = {
        LATENT: torch.randn(batch, channels, *size, generator=generator),
        TIMESTEP: torch.linspace(0.9, 0.3, batch),
    }
    for key, shape in chosen.inputs.items():
        made[key] = _values(key, (batch, *_resolve(shape, size, text)), generator)
    return made


def branches(several: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The inputs of several branches under the names of a ``Forward``."""
    return {f"{i}.{key}": value for i, one in enumerate(several) for key, value in one.items()}


def _values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name.endswith("_mask"):  # texts of different lengths, none of the whole one
        lengths = [max(1, shape[1] - 2 * i - 1) for i in range(shape[0])]
        return torch.stack([torch.arange(shape[1]) < length for length in lengths])
    if name.endswith("_ids"):  # places, which all samples share
        return torch.randn(1, *shape[1:], generator=generator).expand(shape).contiguous()
    if name.endswith("_labels"):
        return torch.randint(0, 10, shape, generator=generator)
    return torch.randn(shape, generator=generator)


def _resolve(shape: Sequence[int | str], size: tuple[int, ...], text: int) -> list[int]:
    resolved: list[int] = []
    for dim in shape:
        resolved += size if dim == "size" else [text if dim == "text" else int(dim)]
    return resolved
