"""Compiled blocks equal the others, and only what says so compiles again. The code is torch's own, not inductor's."""

import copy
import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from parallel_backend.errors import InvalidRequest
from parallel_backend.loading import compiled_blocks
from parallel_backend.loading.compiled_blocks import CompiledBlocks, check_compiler
from parallel_backend.loading.low_rank import LowRank, _Hook
from parallel_backend.progress import COMPILING, PROGRESS
from tests.support import families

KIND = ("FluxTransformer2DModel", "dev")
CLASSES = 2


class Compiled:
    """A family with and without compiled blocks."""

    def __init__(self, kind: tuple[str, str]) -> None:
        self.kind = kind
        self.family = families.family_of(kind[0])(copy.deepcopy(families.module(*kind)))
        self.blocks = CompiledBlocks(self.family)
        self.started = counters["stats"]["unique_graphs"]

    def compilations(self) -> int:
        return int(counters["stats"]["unique_graphs"] - self.started)

    def predict(self, *, on: bool, seed: int = 0, **shape) -> torch.Tensor:
        self.blocks.use(on)
        with torch.inference_mode():
            state = self.family.embed(families.inputs(*self.kind, batch=2, seed=seed, **shape))
            return self.family.head(families.run(self.family, state))

    def check(self, **options) -> None:
        plain, compiled = (self.predict(on=on, **options) for on in (False, True))
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-4)

    def adapt(self, strength: float, scale: float = 1.0) -> list:
        generator = torch.Generator().manual_seed(1)
        handles = []
        for block in self.family.blocks:
            for layer in block.modules:
                for module in layer.modules():
                    if isinstance(module, nn.Linear):
                        up = torch.randn(module.out_features, 2, generator=generator) * 0.1
                        down = torch.randn(2, module.in_features, generator=generator) * 0.1
                        hook = _Hook([(LowRank(up=up, down=down, scale=scale), strength)])
                        handles.append(module.register_forward_hook(hook, prepend=True))
        return handles


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.setattr(compiled_blocks, "BACKEND", "eager")
    torch._dynamo.reset()  # which forgets callbacks
    compiled_blocks._configure.cache_clear()
    return Compiled(KIND)


def test_each_class_of_layers_compiles_once(compiled):
    compiled.check()
    assert compiled.compilations() == CLASSES
    compiled.check(seed=3)
    compiled.check(text=11)
    compiled.check(size=(7, 6))
    assert compiled.compilations() == CLASSES


def test_what_is_off_leaves_nothing_behind(compiled):
    before = {name: set(vars(module)) for name, module in compiled.family.module.named_modules()}
    compiled.predict(on=True)
    compiled.predict(on=False)
    assert {name: set(vars(module)) for name, module in compiled.family.module.named_modules()} == before


def test_an_adapter_that_comes_compiles_once_and_its_strength_never(compiled):
    plain = compiled.predict(on=True)
    handles = compiled.adapt(0.5)
    compiled.check()
    assert compiled.compilations() == 2 * CLASSES
    half = compiled.predict(on=True)
    assert (half - plain).abs().max() > 1e-2
    for strength in (0.7, -1.0, 0.0, 1.0):
        for handle in handles:
            handle.remove()
        handles = compiled.adapt(strength)
        compiled.check()
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(compiled.predict(on=True), plain)
    assert compiled.compilations() == 2 * CLASSES


def test_it_says_that_it_compiles(compiled, monkeypatch):
    phases = []
    phase = PROGRESS.phase
    monkeypatch.setattr(PROGRESS, "phase", lambda name: phases.append(name) or phase(name))
    assert not compiled.blocks.fresh
    compiled.blocks.use(True)
    assert compiled.blocks.fresh
    compiled.predict(on=True)
    assert COMPILING in phases
    assert not compiled.blocks.fresh


def test_a_machine_without_a_compiler_is_refused(monkeypatch):
    check_compiler(torch.device("cpu"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(InvalidRequest, match="compile=blocks needs a C\\+\\+ compiler"):
        check_compiler(torch.device("cpu"))


ONE_OF_EACH = list({name: (name, kind) for name, kind in reversed(list(families.variants()))}.values())


@pytest.mark.long
@pytest.mark.parametrize("kind", [each for each in ONE_OF_EACH if each[0] != "MochiTransformer3DModel"])
def test_families(kind, monkeypatch):
    monkeypatch.setattr(compiled_blocks, "BACKEND", "eager")
    torch._dynamo.reset()
    Compiled(kind).check()


@pytest.mark.long
def test_inductor():
    torch._dynamo.reset()
    compiled = Compiled(KIND)
    compiled.check()
    handles = compiled.adapt(0.5)
    compiled.check()
    before = compiled.compilations()
    for handle in handles:
        handle.remove()
    compiled.adapt(0.9)
    compiled.check()
    assert compiled.compilations() == before
