"""Routing the attention of compiled blocks: their code calls an operator, which finds the route when it runs."""

from contextlib import ExitStack
from functools import cache
from types import MethodType
from typing import Any

from torch import Tensor, nn

from ..operators import Place, attend
from .routing import PLACES, Seam, as_class, processor_class, redirected, set_until_exit


class _CompiledSeam(Seam):
    """Calls the operator of compiled blocks.

    Args:
        number: of the attention within its block. It is a constant of the compiled code.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Compute attention as the place of this number is routed."""
        return attend(query, key, value, scale, self.number)


@cache
def _compilable(kind: Any, number: int) -> Any:
    """Return the ``forward`` of a class of modules, or a class of processors, that calls the operator."""
    seam = _CompiledSeam(number)
    if issubclass(kind, nn.Module):
        return redirected(kind.forward, seam)
    return processor_class(kind, redirected(kind.__call__, seam))


def compile_attention(stack: ExitStack, module: nn.Module, number: int, each_sample: bool) -> Place:
    """Let a module call the operator of compiled blocks until the stack closes.

    Modules of one class get the same code, which is compiled once.

    Args:
        number: of the attention within its block.
        each_sample: whether the module calls attention separately for each sample.

    Returns:
        Where the operator finds what the module is routed to.

    Raises:
        BackendFailure: the module computes attention in a way that is not known.
    """
    processor: Any = getattr(module, "processor", None)
    kind: Any = type(module if processor is None else processor)
    replacement = _compilable(kind, number)
    if processor is None:
        set_until_exit(stack, module, "forward", MethodType(replacement, module))
    else:
        set_until_exit(stack, module, "processor", as_class(processor, replacement))
    PLACES[module] = place = Place(each_sample)
    stack.callback(PLACES.pop, module)
    return place
