"""Compiled blocks give what diffusers' own forward gives in every kind of layout, and are compiled once.

The code is torch's own, not inductor's, which takes a minute for a layout: what is compiled, and when, is the same.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lab.verify.forward import matrix
from lab.verify.forward.cells import SmallModels
from lab.verify.forward.matrix import Cell
from lab.verify.loops import run as steps
from lab.verify.loops.run import SIGMAS, Loop
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.model_spec import Devices
from parallel_backend.verify import examples
from parallel_backend.verify.run import forward_request
from tests.ranks import driver, requests
from tests.ranks.requests import Case
from tests.support import tiny
from tests.support.weight_changes import Change

CLOSE, FAR = 1e-4, 1e-2
SIZES = tiny.Tiny(heads=3)
MASKED, WAN = ("QwenImageTransformer2DModel", "masked"), ("WanTransformer3DModel", "t2v")
FIRSTS = [pair for pair in examples.variants() if matrix.is_first_variant(*pair)]
LAYOUTS = ["", "ulysses=3", "ring=3", "cfg=2", "pipe=2 patches=1", "tensor=2", "ulysses=2 shard_weights"]
"""One of each kind."""


def ask(pools, ranks, message, tensors):
    answers = pools(ranks).run(driver.handle, message, tensors)
    assert [answer["error"] for answer in answers] == [None] * ranks
    return answers


def check(pools, compiled_eagerly, tmp_path, pair, layout):
    parsed = ParallelLayout.parse(layout)
    compiled_eagerly(parsed.ranks)
    models = SmallModels(tmp_path, torch.device("cpu"))
    comparison = models.comparison(Cell(class_name=pair[0], variant=pair[1], layout=parsed))
    devices = Devices(kind="cpu", indices=tuple(range(parsed.ranks)))
    message = forward_request(comparison.model, "float32", parsed, devices, len(comparison.inputs))
    message = replace(message, measure="", model=replace(message.model, compile="blocks"))
    answers = ask(pools, parsed.ranks, message, examples.branches(comparison.inputs))
    for branch in range(len(comparison.inputs)):
        assert requests.relative_error(answers[0]["tensors"][str(branch)], comparison.stock(branch)) <= CLOSE


@pytest.mark.parametrize(("pair", "layout"), [(MASKED, "ulysses=3"), (MASKED, "ring=3")])
def test_equals_stock(pools, compiled_eagerly, tmp_path, pair, layout):
    check(pools, compiled_eagerly, tmp_path, pair, layout)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pair", FIRSTS)
def test_every_family_equals_stock(pools, compiled_eagerly, tmp_path, pair, layout):
    check(pools, compiled_eagerly, tmp_path, pair, layout)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inductor_equals_stock(pools, tmp_path, layout):
    check(pools, lambda _: None, tmp_path, WAN, layout)


def request(path, layout, case, **changes):
    message, tensors = requests.forward(replace(requests.spec(path, layout), compile="blocks"), case)
    return replace(message, **changes), tensors


def test_compiles_once(pools, checkpoints, compiled_eagerly, tmp_path):
    """A prompt, a seed, a size, a skipped block, a LoRA's strength and a pause of compiling compile nothing."""
    compiled_eagerly(2)
    path, layout = checkpoints(heads=3), "ulysses=2 shard_weights"
    model = tiny.transformer(SIZES)
    loras = [replace(Change.write(tmp_path, model, seed=1, rank=3, strength=1.0).file, strength=s) for s in (0.4, -0.7)]
    seen = []
    prompts: list[tuple[Case, dict[str, Any]]] = [
        (Case(), {}),
        (Case(seed=4, texts=(11, 5), size=(5, 7, 3)), {}),
        (Case(), {"adapters": ((loras[0],), (loras[0],))}),
        (Case(), {"skipped": ((), (0,))}),
        (Case(seed=2), {"adapters": ((loras[1],), (loras[1],))}),
        (Case(), {}),
    ]
    for case, changes in prompts:
        message, tensors = request(path, layout, case, **changes)
        compiled = ask(pools, 2, message, tensors)
        seen.append(pools(2).run(driver.compilations))
        plain = ask(pools, 2, replace(message, model=replace(message.model, compile="off")), tensors)
        for branch in plain[0]["tensors"]:
            assert requests.relative_error(compiled[0]["tensors"][branch], plain[0]["tensors"][branch]) <= CLOSE
    first, others, lora, *rest = seen
    assert others == first
    assert [more - fewer for more, fewer in zip(lora, first, strict=True)] == [1, 1]
    assert rest == [lora] * 3


@pytest.mark.parametrize("layout", ["pipe=2 patches=3", pytest.param("ring=2 stale=previous", marks=pytest.mark.long)])
def test_patches_are_the_algorithm(pools, compiled_eagerly, tmp_path, layout):
    compiled_eagerly(2)
    asked = Loop(class_name=WAN[0], variant=WAN[1], layout=ParallelLayout.parse(layout), sigmas=SIGMAS[::3])
    path = examples.write_checkpoint(tmp_path / "model", steps.module(*WAN))
    message = replace(asked.message(path, Devices(kind="cpu", indices=(0, 1))), measure="")
    plain = ask(pools, 2, message, asked.tensors())
    compiled = ask(pools, 2, replace(message, model=replace(message.model, compile="blocks")), asked.tensors())
    got, wanted = (answers[0]["tensors"]["samples"] for answers in (compiled, plain))
    assert requests.relative_error(got, wanted) <= CLOSE
    assert "compiling" in {progress.phase for progress, _ in compiled[0]["reports"]}


def test_blocks_that_stream(pools, checkpoints, compiled_eagerly, streaming):
    compiled_eagerly(2)
    streaming(2)
    message, tensors = request(checkpoints(heads=3, layers=7), "ulysses=2", Case(), adapt=True)
    compiled = ask(pools, 2, message, tensors)
    plain = ask(pools, 2, replace(message, model=replace(message.model, compile="off")), tensors)
    assert requests.relative_error(compiled[0]["tensors"]["0"], plain[0]["tensors"]["0"]) <= CLOSE


@pytest.mark.parametrize(
    ("layout", "streams"), [("tensor=2", False), ("pipe=2 patches=1", False), ("cfg=2", False), ("ulysses=2", True)]
)
def test_a_lora_comes_and_goes(pools, checkpoints, compiled_eagerly, streaming, tmp_path, layout, streams):
    compiled_eagerly(2)
    if streams:
        streaming(2)
    lora = Change.write(tmp_path, tiny.transformer(SIZES), seed=1, rank=3, strength=1.0).file
    given = [(), (replace(lora, strength=0.4),), (replace(lora, strength=-0.7),), (replace(lora, strength=0.4),), ()]
    found = []
    for adapters in given:
        message, tensors = request(checkpoints(heads=3), layout, Case(), adapters=(adapters, adapters), adapt=streams)
        compiled, plain = (
            ask(pools, 2, replace(message, model=replace(message.model, compile=mode)), tensors)[0]["tensors"]
            for mode in ("blocks", "off")
        )
        assert all(requests.relative_error(compiled[branch], plain[branch]) <= CLOSE for branch in plain)
        found.append(compiled["0"])
    assert all(requests.relative_error(each, found[0]) > FAR for each in found[1:4])
    assert torch.equal(found[1], found[3])
    assert torch.equal(found[0], found[4])


def test_who_counts_bytes_is_refused(pools, checkpoints):
    message, tensors = request(checkpoints(heads=3), "ulysses=2", Case(), measure="bytes")
    for answer in pools(2).run(driver.handle, message, tensors):
        assert "count bytes with compile=off" in answer["error"]
