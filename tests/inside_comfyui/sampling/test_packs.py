"""Nodes of widespread packs do the same to a parallel MODEL, or are refused by name.

The packs are not in this repository: ``PARALLEL_DIT_PACKS`` names a folder with them. What they import has to be
there, too. With ``PARALLEL_DIT_WRITE_NODES=1`` outcomes are written into ``pack_nodes.json``.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import comfy.ldm.lightricks.model
import comfy.samplers
import folder_paths
import pytest
import torch
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers import node_inputs, packs
from helpers.inside_fixtures import ksampler, relative_error
from helpers.layout_cover import IS_NEWEST
from helpers.node_inputs import UnknownInput
from helpers.node_outcomes import Unlike, outcome
from helpers.node_sweep import LETTERS, NATIVE, Subject, native_subject
from helpers.sensitivity import limit
from natives import CASES
from safetensors.torch import save_file

pytestmark = [
    pytest.mark.grid,
    pytest.mark.skipif(not IS_NEWEST, reason="packs follow the newest ComfyUI"),
    pytest.mark.timeout(3000),
]

FOLDERS = packs.pack_folders()
NONE = pytest.param(None, marks=pytest.mark.skip(reason=f"{packs.VARIABLE} names no folder with packs"))
SAMPLERS_CLOSE = 3e-6


@dataclass(frozen=True, kw_only=True)
class Pack:
    """What a pack brings.

    Attributes:
        nodes: its nodes' classes.
        samplers: what it adds to KSampler's list.
    """

    nodes: dict[str, Any]
    samplers: list[str]


@pytest.fixture(scope="session")
def load_pack() -> Iterator[Callable[[Path], Pack]]:
    """``load_pack(path)`` returns a pack. Some cannot be loaded twice in a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(folder_paths.folder_names_and_paths, "custom_nodes", ([str(FOLDERS[0].parent)], set()))
        patch.setattr(comfy.samplers.KSampler, "SAMPLERS", [*comfy.samplers.KSampler.SAMPLERS])
        # ComfyUI dropped it. TeaCache imports it, though it uses it for LTX-Video alone.
        patch.setattr(comfy.ldm.lightricks.model, "precompute_freqs_cis", None, raising=False)
        # RES4LYF copies weights to a GPU.
        patch.setattr(torch.Tensor, "cuda", lambda tensor: tensor.to("cpu"))

        @cache
        def load(path: Path) -> Pack:
            before = [*comfy.samplers.KSampler.SAMPLERS]
            nodes = packs.load_pack(path, patch)
            return Pack(nodes=nodes, samplers=[x for x in comfy.samplers.KSampler.SAMPLERS if x not in before])

        yield load


@pytest.mark.parametrize("model", packs.MODELS)
@pytest.mark.parametrize("pack", FOLDERS or [NONE], ids=lambda pack: pack and pack.name)
def test_every_node_of_a_pack(
    pack: Path,
    model: str,
    load_pack: Callable[[Path], Pack],
    files: Path,
    load_subject: Callable[[Subject, ParallelLayout], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nodes change what other models share, so each gets models of its own."""
    kinds = {name: kind for name, kind in load_pack(pack).nodes.items() if packs.changes_models(kind)}
    found, wrong = {}, []
    for place, (name, kind) in enumerate(sorted(kinds.items())):
        subject = native_subject(model, fresh=True)
        scene, plain = subject.native.scene, subject.native.plain  # before the node changes the model itself
        assert plain.isfinite().all()
        save_file(scene.lora, files / f"{scene.family}.safetensors")
        monkeypatch.setattr(node_inputs, "VALUES", node_inputs.VALUES | packs.values_for(scene.family))
        ours = load_subject(subject, ParallelLayout.parse("ulysses=2"))
        try:
            found[name] = LETTERS[outcome(name, kind, ours, subject.native, parallel=bool(place % 2))]
        except UnknownInput:
            continue
        except Unlike as error:
            wrong.append(str(error))
    assert wrong == []
    if os.environ.get("PARALLEL_DIT_WRITE_NODES"):
        packs.write_known(pack.name, model, found)
    letters = packs.known(pack.name, model)
    assert found == {node: letters.get(node, letter) for node, letter in found.items()}


@pytest.mark.parametrize("pack", FOLDERS or [NONE], ids=lambda pack: pack and pack.name)
def test_every_sampler_of_a_pack(
    pack: Path,
    load_pack: Callable[[Path], Pack],
    load_case: Callable[..., Any],
) -> None:
    """Sample with what the pack adds to KSampler's list, of RES4LYF for one."""
    added = load_pack(pack).samplers
    if not added:
        pytest.skip(f"{pack.name} adds no sampler")
    case = CASES[NATIVE["Wan T2V"]]
    prompts = {"positive": case.conditioning(1), "negative": case.conditioning(2, case.shorter), "cfg": case.cfg}
    native, ours = case.native(), load_case(NATIVE["Wan T2V"], ParallelLayout.parse("ulysses=2"))

    def sample(model: Any, sampler: str) -> Any:
        return ksampler(model, case.samples(), sampler_name=sampler, steps=4, **prompts)

    results = {name: [_result(sample, model, name) for model in (native, ours)] for name in added}
    tensors = {name: pair for name, pair in results.items() if not isinstance(pair[0], str)}
    errors = {name: relative_error(mine, theirs) for name, (theirs, mine) in tensors.items()}
    far = {name: error for name, error in errors.items() if not error < SAMPLERS_CLOSE}
    limits = {
        name: limit(native, lambda model, name=name: sample(model, name), results[name][0], close=SAMPLERS_CLOSE)
        for name in far
    }
    assert {name: (error, limits[name]) for name, error in far.items() if not error < limits[name]} == {}
    failed = [pair for name, pair in results.items() if name not in tensors]  # some want a GPU
    assert [mine for _, mine in failed] == [theirs for theirs, _ in failed]
    assert tensors
    print(f"{len(tensors)} samplers of {pack.name}, {max(errors.values()):.1e} at most; {len(failed)} fail alone")


def _result(sample: Callable[[Any, str], Any], model: Any, sampler: str) -> Any:
    """Return the latent, or what the error says."""
    try:
        return sample(model, sampler)
    except Exception as error:  # whatever the pack raises is compared
        return f"{type(error).__name__}: {error}"
