"""Small models for the cells of the matrix, created when they are first needed."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel_backend.families.registry import family_of
from parallel_backend.verify import examples
from parallel_backend.verify.run import Comparison, block_parameters, stages_of

from .matrix import Cell


class SmallModels:
    """The small models of cells, saved in a folder. The stock forward runs on a device."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder, self.device = folder, device

    def comparison(self, cell: Cell) -> Comparison:
        """Compare two branches of different text lengths if the cell splits guidance, otherwise one."""
        arguments = [
            (self.device, cell.class_name, cell.variant, cell.batch, cell.size, text, branch)
            for branch, text in enumerate(_text_lengths(cell))
        ]
        family = family_of(cell.class_name)(_module(self.device, cell.class_name, cell.variant))
        return Comparison(
            title=str(cell),
            model=self._path(cell.class_name, cell.variant),
            layout=cell.layout,
            inputs=[_inputs(*one[1:]) for one in arguments],
            stock=lambda i: _stock(*arguments[i]),
            parameters=block_parameters(family),
            stages=stages_of(family, cell.layout),
        )

    def _path(self, class_name: str, name: str) -> Path:
        path = self.folder / f"{class_name} {name}"
        return path if path.is_dir() else examples.write_checkpoint(path, _module(self.device, class_name, name))


def _text_lengths(cell: Cell) -> list[int]:
    variant = examples.variant(cell.class_name, cell.variant)
    text = cell.text or variant.text
    shorter = text if variant.fixed_text else max(1, text - 2)
    return [text, shorter] if cell.layout.cfg > 1 else [text]


def _inputs(
    class_name: str, name: str, batch: int, size: tuple[int, ...] | None, text: int, seed: int
) -> dict[str, Tensor]:
    return examples.inputs(class_name, name, batch=batch, size=size, text=text, seed=seed)


@lru_cache(maxsize=4)
@torch.no_grad()
def _stock(device: torch.device, class_name: str, name: str, *arguments: Any) -> Tensor:
    """The stock forward's prediction. Cached, since consecutive cells compare the same inputs in other layouts."""
    inputs = {key: tensor.to(device) for key, tensor in _inputs(class_name, name, *arguments).items()}
    return family_of(class_name)(_module(device, class_name, name)).stock(inputs).cpu()


@lru_cache(maxsize=2)
def _module(device: torch.device, class_name: str, name: str) -> Any:
    return examples.module(class_name, name).to(device)
