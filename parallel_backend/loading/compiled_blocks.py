"""The blocks of a loaded transformer, compiled by ``torch.compile`` (https://pytorch.org/docs/stable/torch.compiler.html).

Each class of layers is compiled once, for all sizes. What streams or gathers a layer's weights stays outside, and so do
exchanges between ranks (``attention/compiled.py``). LoRAs are part of the code: their coming and going compiles once
more, their strengths do not.
"""

import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import nn

from ..attention.compiled import PLACES, Place, computing
from ..attention.routing import compilable, set_until_exit
from ..errors import InvalidRequest
from ..interfaces.family import AttentionSite, Family
from ..progress import COMPILING, PROGRESS

BACKEND = "inductor"

_SHAPES = 64
"""Versions of one class's code that are kept: a layer may have other inputs on some ranks, and LoRAs come and go."""


class CompiledBlocks:
    """Compiles the blocks of a family when they first compute.

    Attributes:
        fresh: whether no block has computed yet since they were to be compiled.
    """

    def __init__(self, family: Family) -> None:
        self._family = family
        self._undo = ExitStack()
        self._on = self.fresh = False

    def use(self, on: bool) -> None:
        """Compile the blocks, or let them compute as they are."""
        if on == self._on:
            return
        self._undo.close()
        self._on = self.fresh = on
        if on:
            _configure()
            sites = {site.module: site for site in self._family.attentions}
            for block in self._family.blocks:
                for layer in block.modules:
                    self._compile(layer, [sites[each] for each in layer.modules() if each in sites])

    def _compile(self, layer: nn.Module, sites: Sequence[AttentionSite]) -> None:
        places = [Place(site.each_sample) for site in sites]
        for number, (site, place) in enumerate(zip(sites, places, strict=True)):
            set_until_exit(self._undo, site.module, *compilable(site.module, number))
            PLACES[site.module] = place
            self._undo.callback(PLACES.pop, site.module)
        code = _code(type(layer).forward, BACKEND)

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.fresh = False
            with computing(places):
                return code(layer, *map(_plain, args), **{name: _plain(each) for name, each in kwargs.items()})

        set_until_exit(self._undo, layer, "forward", forward)


def _plain(value: Any) -> Any:
    """Return a tensor contiguous: the code would be compiled again for one that is a slice in some of the blocks."""
    return value.contiguous() if isinstance(value, torch.Tensor) else value


@cache
def _code(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(forward, dynamic=True, fullgraph=True, backend=backend)
    return compiled


@cache
def _configure() -> None:
    """Let compiled code see hooks that come later, which are LoRAs, and say while it compiles."""
    import torch._dynamo as dynamo
    from torch._dynamo.callback import callback_handler

    dynamo.config.skip_nnmodule_hook_guards = False
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, _SHAPES)
    phases: list[ExitStack] = []

    def start(_: Any) -> None:
        phases.append(ExitStack())
        phases[-1].enter_context(PROGRESS.phase(COMPILING))

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(lambda _: phases.pop().close())


def check_compiler(device: torch.device) -> None:
    """Refuse to compile where there is no compiler.

    Raises:
        InvalidRequest: the machine lacks what torch compiles with on this device.
    """
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise InvalidRequest("compile=blocks needs the package triton on GPUs: install it, or choose off")
    names = [os.environ[name] for name in ("CXX", "CC") if os.environ.get(name)] + ["g++", "clang++", "gcc", "cc"]
    if not any(shutil.which(name) for name in names):
        raise InvalidRequest("compile=blocks needs a C++ compiler on the ranks' machine: install g++, or choose off")
