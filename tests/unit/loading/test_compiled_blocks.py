"""Compiled blocks equal the others, and only what says so compiles again. The code is torch's own, not inductor's."""

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

from parallel_backend import operators
from parallel_backend.errors import BackendFailure, InvalidRequest
from parallel_backend.families.registry import family_of
from parallel_backend.loading import compiled_blocks
from parallel_backend.loading.compiled_blocks import CompiledBlocks, check_compiler, compilations
from parallel_backend.loading.low_rank import LowRank, _Hook, _strengths
from parallel_backend.operators import Numbered, Place
from parallel_backend.progress import COMPILING, PROGRESS
from tests.support import families

KIND = ("FluxTransformer2DModel", "dev")
CLASSES = 2


class Compiled:
    """A family with and without compiled blocks."""

    def __init__(self, kind: tuple[str, str]) -> None:
        self.kind = kind
        self.family = family_of(kind[0])(copy.deepcopy(families.module(*kind)))
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

    def adapt(self, strength: float, scale: float = 1.0) -> list[Any]:
        generator = torch.Generator().manual_seed(1)
        handles = []
        for block in self.family.blocks:
            for layer in block.modules:
                for module in layer.modules():
                    if isinstance(module, nn.Linear):
                        up = torch.randn(module.out_features, 2, generator=generator) * 0.1
                        down = torch.randn(2, module.in_features, generator=generator) * 0.1
                        terms = [(LowRank(up=up, down=down, scale=scale), strength)]
                        hook = _Hook(terms, _strengths(terms))
                        handles.append(module.register_forward_hook(hook, prepend=True))
        return handles


@pytest.fixture(autouse=True)
def recursion_limit():
    """inductor raises it, and other tests need it as it is."""
    limit = sys.getrecursionlimit()
    yield
    sys.setrecursionlimit(limit)


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.setattr(compiled_blocks, "BACKEND", "eager")
    torch._dynamo.reset()
    return Compiled(KIND)


def test_each_class_of_layers_compiles_once(compiled):
    compiled.check()
    assert compiled.compilations() == CLASSES
    compiled.check(seed=3)
    compiled.check(text=11)
    compiled.check(size=(7, 6))
    assert compiled.compilations() == CLASSES


@pytest.mark.long
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


@pytest.mark.long
def test_operators_keep_their_order():
    """Ranks exchange in them, and have to do so in one order, though nothing else says which is first."""
    operators.define()
    order: list[int] = []

    class Noted(Place):
        def attend(self, query, key, value, scale):
            order.append(query.shape[2])
            return super().attend(query, key, value, scale)

    def layer(small, large):
        late = operators.attend(small * 2, small, small, None, 0).sum()
        return operators.attend(large * 2, large, large, None, 1).mul(3).sum() + late

    compiled = torch.compile(layer, fullgraph=True, backend="inductor")
    small, large = torch.ones(1, 2, 4, 8), torch.ones(1, 2, 64, 8)
    numbered = Numbered(attention=[Noted(False), Noted(False)], layers=[])
    for first, second in ((small, large), (large, small)):
        order.clear()
        with numbered.computing(), torch.inference_mode():
            found = compiled(first, second)
        assert order == [first.shape[2], second.shape[2]]
        with numbered.computing():
            torch.testing.assert_close(found, layer(first, second))


def test_it_says_that_it_compiles(compiled, monkeypatch):
    phases: list[str] = []
    said: list[bool] = []
    phase = PROGRESS.phase

    def noted(name):
        phases.append(name)
        return phase(name)

    monkeypatch.setattr(PROGRESS, "phase", noted)
    with compilations(said.append):
        compiled.predict(on=True)
        assert phases == [COMPILING] * CLASSES
        assert said == [False, True] * CLASSES
        compiled.predict(on=True, seed=2)
    compiled.adapt(0.5)
    compiled.predict(on=True)
    assert len(said) == 2 * CLASSES


def test_a_machine_without_a_compiler_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # without what was compiled before
    torch._dynamo.reset()
    refusal = r"compile=blocks does not work .*InvalidCxxCompiler.* it needs a C\+\+ compiler, such as g\+\+"
    with inductor_config.patch({"cpp.cxx": ("no such compiler",)}), pytest.raises(InvalidRequest, match=refusal):
        check_compiler(torch.device("cpu"))


def test_what_cannot_be_compiled_says_so(compiled, monkeypatch):
    monkeypatch.setattr(compiled_blocks, "BACKEND", lambda *_: 1 / 0)
    compiled.blocks = CompiledBlocks(compiled.family)
    with pytest.raises(
        BackendFailure, match=r"FluxTransformerBlock cannot be compiled, so choose compile=off: .*by zero"
    ):
        compiled.predict(on=True)


ONE_OF_EACH = list({name: (name, kind) for name, kind in reversed(list(families.variants()))}.values())
WAN = next(each for each in ONE_OF_EACH if each[0] == "WanTransformer3DModel")


@pytest.mark.parametrize("kind", [WAN, *(pytest.param(each, marks=pytest.mark.long) for each in ONE_OF_EACH)])
def test_inductor_equals_stock(kind):
    torch._dynamo.reset()
    check_compiler(torch.device("cpu"))
    compiled = Compiled(kind)
    inputs = families.inputs(*kind, batch=2)
    with torch.inference_mode():
        wanted = compiled.family.stock(inputs)
        size = inputs["hidden_states"].shape[2:]
        got = compiled.family.unpatchify(compiled.predict(on=True), size)
    assert (got - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.long
def test_inductor_takes_loras():
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


RESTARTED = """
import torch
from torch._dynamo.utils import counters
from tests.unit.loading.test_compiled_blocks import WAN, Compiled
Compiled(WAN).predict(on=True)
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.long
def test_the_next_process_finds_the_code_on_disk(tmp_path):
    def start() -> list[str]:
        return subprocess.run(
            [sys.executable, "-c", RESTARTED], check=True, capture_output=True, text=True, timeout=300,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        ).stdout.split()  # fmt: skip

    assert start() == ["0", "1"]
    assert start() == ["1", "0"]
