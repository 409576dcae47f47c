"""Small random models of every variant of every family, made once a session."""

from datetime import timedelta
from functools import cache
from typing import Any

from parallel_backend import mesh, seam
from parallel_backend.attention import routed
from parallel_backend.kernels import KERNELS
from parallel_backend.layout import ParallelLayout
from parallel_backend.models import FAMILIES, Family
from parallel_backend.state import State
from parallel_backend.strategies import TokenSplit
from parallel_backend.verify import examples
from parallel_backend.verify.examples import inputs, variants

__all__ = ["family", "inputs", "module", "run", "variants"]


@cache
def module(class_name: str, name: str) -> Any:
    """The diffusers module."""
    return examples.module(class_name, name)


def family(class_name: str, name: str) -> Family:
    """The module in its family's three parts."""
    return FAMILIES[class_name](module(class_name, name))


def run(family: Family, state: State) -> State:
    """All blocks on one process, with masked keys left out as the ranks do it."""
    alone = mesh.create(ParallelLayout(), rank=0, timeout=timedelta(seconds=1))
    assert alone is not None
    split = TokenSplit.even({name: tokens.shape[1] for name, tokens in state.streams.items()}, alone.sequence)
    sites = [
        (site.module, seam.attention(alone, split, site.streams, state.masks, KERNELS["sdpa"]), site.each_sample)
        for site in family.attentions
    ]
    with routed(sites if state.masks else []):
        return family.run(state)
