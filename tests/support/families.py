"""Small random models of every variant of every family, created once per session."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import Tensor

from parallel_backend.attention.kernels import KERNELS
from parallel_backend.attention.routing import routed
from parallel_backend.denoiser.attention_views import FullView
from parallel_backend.distributed import mesh
from parallel_backend.families.registry import family_of
from parallel_backend.interfaces.family import Family
from parallel_backend.interfaces.geometry import Shape
from parallel_backend.interfaces.state import State
from parallel_backend.strategies.token_split import TokenSplit
from parallel_backend.verify import examples
from parallel_backend.verify.examples import inputs, variants

__all__ = ["family", "inputs", "module", "run", "sizes", "variants", "weights"]


@cache
def module(class_name: str, name: str) -> Any:
    """Return the diffusers module of a variant."""
    return examples.module(class_name, name)


def weights(class_name: str, variant: int = 0) -> dict[str, Tensor]:
    """Return the weights of a class's variant of this number, in diffusers' names, as files take them."""
    name = [name for each, name in variants() if each == class_name][variant]
    return {key: tensor.clone().contiguous() for key, tensor in module(class_name, name).state_dict().items()}


def family(class_name: str, name: str) -> Family:
    """Return the module as its family."""
    return family_of(class_name)(module(class_name, name))


def run(family: Family, state: State) -> State:
    """Run all blocks on one process, dropping masked keys as the ranks do."""
    one_rank = mesh.alone()
    split = TokenSplit.even({name: tokens.shape[1] for name, tokens in state.streams.items()}, one_rank.sequence)
    with routed(FullView(one_rank, [split]).routes(family, 0, state, KERNELS["sdpa"])):
        return family.run(state)


def sizes(family: Family, inputs: Mapping[str, Tensor]) -> list[Shape]:
    """Return what ``Family.prediction`` needs for these inputs."""
    picture, *others = (tuple(inputs[name].shape[1:]) for name in family.latents)
    return [picture[1:], *others]
