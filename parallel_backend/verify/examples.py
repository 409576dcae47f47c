"""Small random models of every variant of every family, and seeded inputs for them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..families.modules import module_class_of
from ..families.registry import FAMILIES, family_of
from ..interfaces.family import Family, Variant
from ..interfaces.geometry import TIMESTEP, Shape
from ..interfaces.input_shapes import input_shapes
from ..protocol.packing import pack


def short_name(class_name: str) -> str:
    """Return a family's name on the command line, which is that of its folder."""
    return FAMILIES[class_name].folder


def variants() -> Iterator[tuple[str, str]]:
    """Yield the class name and the name of each variant of each family."""
    for class_name in FAMILIES:
        yield from ((class_name, name) for name in family_of(class_name).variants())


def variant(class_name: str, name: str) -> Variant:
    """Return a variant by its name."""
    return family_of(class_name).variants()[name]


def module(class_name: str, name: str, seed: int = 0) -> Any:
    """Return the diffusers module of a variant; see ``random_module``."""
    return random_module(class_name, variant(class_name, name).config, seed)


def random_module(class_name: str, config: Mapping[str, Any], seed: int = 0) -> Any:
    """Return a diffusers module with random weights.

    Weights have unit gain, and biases are not zero, so that no part of the result vanishes in rounding.
    """
    torch.manual_seed(seed)
    module = module_class_of(class_name)(**config)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return module.eval().requires_grad_(False)


def family(class_name: str, name: str) -> Family:
    """Return the module of a variant in its family's three parts."""
    return family_of(class_name)(module(class_name, name))


def write_checkpoint(folder: Path, module: Any) -> Path:
    """Write a checkpoint in diffusers layout that holds only a transformer, and return its folder."""
    module.save_pretrained(folder / "transformer")
    index = {"_class_name": "DiffusionPipeline", "transformer": ["diffusers", type(module).__name__]}
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
    """Return seeded inputs of a variant's forward.

    Args:
        class_name: class of diffusers.
        name: one of the family's variants.
        batch: samples.
        size: of the latent; None for the variant's own.
        text: text tokens; None for the variant's own.
        seed: of the values.
    """
    chosen = variant(class_name, name)
    shapes = input_shapes(
        family_of(class_name), chosen.config, chosen.inputs, batch=batch, size=size or chosen.size,
        text=text or chosen.text,
    )  # fmt: skip
    return fill(shapes, seed)


def fill(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Return seeded values for inputs of these shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _values(name, shape, generator) for name, shape in shapes.items()}


def evenly_divisible_size(class_name: str, name: str) -> tuple[tuple[int, ...], int]:
    """Return a latent size and a text length near the variant's own whose numbers of tokens are divisible by 2 and 4.

    A text of fixed length keeps its length.
    """
    chosen = variant(class_name, name)
    geometry = family_of(class_name).describe(chosen.config)
    *frames, rows, columns = geometry.grid(chosen.size)
    grid = (*frames, rows // 2 * 2, columns // 2 * 2)
    text = chosen.text if chosen.fixed_text else -(-chosen.text // 4) * 4
    return tuple(length * patch for length, patch in zip(grid, geometry.patch, strict=True)), text


def smallest_size(class_name: str, name: str, text: int) -> tuple[tuple[int, ...], int]:
    """Return the size of a latent of one token per frame, and a text length.

    There is one frame, and the text has ``text`` tokens, unless the variant fixes its number of frames or of tokens.
    """
    chosen = variant(class_name, name)
    geometry = family_of(class_name).describe(chosen.config)
    fixed_frames = any("frames" in shape for shape in chosen.inputs.values())
    size = (chosen.size[0], *geometry.patch[1:]) if fixed_frames else geometry.patch
    return size, chosen.text if chosen.fixed_text else text


def loop_inputs(class_name: str, inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Split the inputs of a forward into what a step loop changes, packed latents, and what it keeps."""
    latents = family_of(class_name).latents
    kept = {name: tensor for name, tensor in inputs.items() if name not in (*latents, TIMESTEP)}
    return pack([inputs[name] for name in latents]), kept


def latent_shapes(class_name: str, inputs: Mapping[str, Tensor]) -> tuple[Shape, ...]:
    """Return what a ``Sample`` says of the latents of these inputs: nothing if there is only one."""
    shapes = tuple(tuple(inputs[name].shape[1:]) for name in family_of(class_name).latents)
    return shapes if len(shapes) > 1 else ()


def branches(several: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the inputs of several branches under the names that a ``Forward`` request uses."""
    return {f"{i}.{key}": value for i, one in enumerate(several) for key, value in one.items()}


def _values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    # Timestep and guidance are exact in half precision, even times 1000, because stock forwards round them first.
    if name == TIMESTEP:  # different for each sample
        return 0.5 ** torch.arange(1.0, shape[0] + 1)
    if name == "guidance":
        return torch.full(shape, 4.0)
    if name.endswith("_mask"):  # texts of different lengths, all shorter than the maximum
        lengths = [max(1, shape[1] - 2 * i - 1) for i in range(shape[0])]
        return torch.stack([torch.arange(shape[1]) < length for length in lengths])
    if name.endswith("_ids"):  # positions, which all samples share
        return torch.randn(1, *shape[1:], generator=generator).expand(shape).contiguous()
    if name.endswith("_labels"):
        return torch.randint(0, 10, shape, generator=generator)
    return torch.randn(shape, generator=generator)
