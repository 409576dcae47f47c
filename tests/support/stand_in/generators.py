"""Generators of random numbers that say that they are on a GPU."""

from typing import Any

import torch

_ON_GPU: set[int] = set()
"""Addresses of the generators that are said to be on a GPU."""


class StandInGenerator(torch.Generator):
    """In the place of ``torch.Generator``: draws on the CPU, whatever its device."""

    claimed: torch.device

    def __new__(cls, device: Any = "cpu") -> "StandInGenerator":
        made: StandInGenerator = super().__new__(cls)
        made.claimed = torch.device(device)
        if made.claimed.type == "cuda":
            _ON_GPU.add(_address(made))
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """What the generator was made for."""
        return self.claimed

    def __del__(self) -> None:
        _ON_GPU.discard(_address(self))


def is_on_gpu(generator: torch.Generator) -> bool:
    """Whether a generator, as an operator gets it, is said to be on a GPU."""
    return _address(generator) in _ON_GPU


def _address(generator: Any) -> int:
    address: int = generator._cdata
    return address
