"""The blocks of a loaded transformer, compiled by ``torch.compile`` (https://pytorch.org/docs/stable/torch.compiler.html).

Each class of layers is compiled once, for all sizes. What streams or gathers a layer's weights stays outside, and so do
attention, compressed weights and exchanges between ranks (``operators.py``). LoRAs are part of the code: their coming
and going compiles once more, their strengths do not.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .. import operators
from ..attention.compiled_attention import compile_attention
from ..attention.routing import set_until_exit
from ..errors import BackendFailure, InvalidRequest
from ..interfaces.family import AttentionSite, Family
from ..operators import Numbered
from ..progress import COMPILING, PROGRESS
from .compressed_linear import CompressedLinear

BACKEND = "inductor"

_SAID = 400
"""Characters of a compiler's words that a sentence repeats."""

_VERSIONS = 1 << 16
"""Versions of one class's code that are kept. More are not compiled, so it is a number that is never reached."""


class CompiledBlocks:
    """Compiles the blocks of a family when they first compute."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._undo = ExitStack()
        self._on = False

    def use(self, on: bool) -> None:
        """Compile the blocks, or let them compute as they are."""
        if on == self._on:
            return
        self._undo.close()
        self._on = on
        if on:
            _configure()
            sites = {site.module: site for site in self._family.attentions}
            for block in self._family.blocks:
                for layer in block.modules:
                    self._compile(layer, [sites[each] for each in layer.modules() if each in sites])

    def _compile(self, layer: nn.Module, sites: Sequence[AttentionSite]) -> None:
        places = [
            compile_attention(self._undo, site.module, number, site.each_sample) for number, site in enumerate(sites)
        ]
        compressed = [each for each in layer.modules() if isinstance(each, CompressedLinear)]
        numbered = Numbered(attention=places, layers=[each.forward for each in compressed])
        for number, each in enumerate(compressed):
            set_until_exit(self._undo, each, "forward", _outside(each.rows, number))
        code = _code(type(layer).forward, BACKEND)

        def forward(*args: Any, **kwargs: Any) -> Any:
            with numbered.computing(), _named(type(layer)):
                return code(layer, *map(_plain, args), **{name: _plain(each) for name, each in kwargs.items()})

        set_until_exit(self._undo, layer, "forward", forward)


def _plain(value: Any) -> Any:
    """Return a tensor with the strides of its shape: the code would be compiled again for others."""
    return value.contiguous().view(-1).view(value.shape) if isinstance(value, Tensor) else value


@cache
def _outside(features: int, number: int) -> Callable[[Tensor], Tensor]:
    """Return the ``forward`` of a layer that is computed outside of compiled code."""
    return lambda x: operators.layer(x, features, number)


@cache
def _code(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(forward, dynamic=True, fullgraph=True, backend=backend)
    return compiled


@contextmanager
def _named(kind: type) -> Iterator[None]:
    try:
        yield
    except torch._dynamo.exc.TorchDynamoException as error:
        raise BackendFailure(f"{kind.__name__} cannot be compiled, so choose compile=off: {_said(error)}") from error


def _said(error: Exception) -> str:
    """Return the beginning of what a compiler says."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_SAID]


@cache
def _configure() -> None:
    """Let compiled code call operators, and see hooks that come later, which are LoRAs."""
    import torch._dynamo as dynamo

    operators.define()
    dynamo.config.skip_nnmodule_hook_guards = False
    dynamo.config.recompile_limit = dynamo.config.accumulated_recompile_limit = _VERSIONS


@contextmanager
def compilations(report: Callable[[bool], None]) -> Iterator[None]:
    """Say when something is compiled while the context lasts.

    Args:
        report: gets False at the start and True at the end of each compilation.
    """
    from torch._dynamo.callback import callback_handler

    phase = ExitStack()

    def start(*_: object) -> None:
        report(False)
        phase.enter_context(PROGRESS.phase(COMPILING))

    def end(*_: object) -> None:
        phase.close()
        report(True)

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(start)
        callback_handler.remove_end_callback(end)


def check_compiler(device: torch.device) -> None:
    """Refuse to compile where a small function does not. The first call in a process takes seconds.

    Raises:
        InvalidRequest: the machine lacks what torch compiles with on this device.
    """
    compiled = _code(_twice, BACKEND)
    try:
        with PROGRESS.phase(COMPILING), torch.inference_mode():
            compiled(torch.ones(8, device=device))
    except Exception as error:  # torch, inductor, Triton and compilers have many
        needs = "Triton, a C compiler and Python's headers" if device.type == "cuda" else "a C++ compiler, such as g++"
        raise InvalidRequest(
            f"compile=blocks does not work on the ranks' machine ({_said(error)}): it needs {needs}; install "
            "them, or choose off"
        ) from error


def _twice(x: Tensor) -> Tensor:
    return 2 * x
