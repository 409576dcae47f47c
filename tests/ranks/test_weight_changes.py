"""LoRAs as factors beside the weights, and overlays, equal merged weights in every exact layout."""

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from parallel_backend.families.shared.patchify import pad_to_patch
from tests.ranks import driver, requests
from tests.ranks.requests import Case
from tests.support import tiny
from tests.support.weight_changes import Change, merged, write_overlay

CLOSE = 1e-5
SIZES = tiny.Tiny(heads=3)
LAYOUTS = [
    (1, ""),
    (3, "ulysses=3"),
    (2, "cfg=2"),
    (3, "tensor=3"),
    (4, "tensor=2 ulysses=2"),
    (3, "ring=3 shard_weights"),
    (2, "pipe=2 patches=1"),
]


@pytest.fixture(scope="module")
def loras(tmp_path_factory) -> tuple[Change, Change]:
    folder = tmp_path_factory.mktemp("loras")
    model = tiny.transformer(SIZES)
    return Change.write(folder, model, seed=1, rank=2, strength=0.7), Change.write(
        folder, model, seed=2, rank=5, strength=-0.4
    )


def stock(
    case: Case, branch: int, changes: tuple[Change, ...], replaced: dict[str, Tensor], sizes: tiny.Tiny = SIZES
) -> Tensor:
    """diffusers' own forward with merged weights."""
    model = tiny.transformer(sizes)
    model.load_state_dict(merged(model.state_dict() | replaced, changes))
    latent = case.latent
    with torch.no_grad():
        out = model(pad_to_patch(latent, SIZES.patch), case.timestep, case.text(branch), return_dict=False)[0]
    return out[:, :, : latent.shape[2], : latent.shape[3], : latent.shape[4]]


def check(pools, path, ranks, layout, by_branch, overlay=None, replaced=None, sizes=SIZES):
    case = Case()
    message, tensors = requests.forward(requests.spec(path, layout), case)
    adapters = tuple(tuple(change.file for change in changes) for changes in by_branch)
    answers = pools(ranks).run(driver.handle, replace(message, adapters=adapters, overlay=overlay), tensors)
    assert [answer["error"] for answer in answers] == [None] * ranks
    for branch, changes in enumerate(by_branch):
        wanted = stock(case, branch, changes, replaced or {}, sizes)
        assert requests.relative_error(answers[0]["tensors"][str(branch)], wanted) <= CLOSE
    return answers


def loads_of(answers, path):
    """How often each rank has loaded weights of a checkpoint."""
    return [model.loads for answer in answers for model in answer["models"] if model.path == str(path)]


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
@pytest.mark.daily(3)
def test_loras_by_branch_equal_merged_weights_and_leave_no_trace(pools, checkpoints, loras, ranks, layout):
    path, (first, second) = checkpoints(heads=3), loras
    loads = loads_of(check(pools, path, ranks, layout, ((), ())), path)
    for by_branch in (((first, second), (first, second)), ((first,), (second,)), ((second,), ()), ((), ())):
        answers = check(pools, path, ranks, layout, by_branch)
    assert loads_of(answers, path) == loads


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
@pytest.mark.daily(3)
def test_an_overlay_replaces_weights_and_is_undone(pools, checkpoints, loras, tmp_path, ranks, layout):
    path, model = checkpoints(heads=3), tiny.transformer(SIZES)
    names = [name for name in model.state_dict() if "blocks.0" in name or "proj_out" in name]
    overlay, replaced = write_overlay(tmp_path, model, names)
    check(pools, path, ranks, layout, ((loras[0],), ()), overlay, replaced)
    check(pools, path, ranks, layout, ((), ()))


def test_a_path_that_names_another_file_by_now_is_refused(pools, checkpoints, loras, tmp_path):
    path, model, case = checkpoints(heads=3), tiny.transformer(SIZES), Case()
    overlay, _ = write_overlay(tmp_path, model, ["proj_out.weight"])
    message, tensors = requests.forward(requests.spec(path, "ulysses=2"), case)
    adapter = replace(loras[0].file, id="another")
    for changes in ({"adapters": ((adapter,), ())}, {"overlay": replace(overlay, id="another")}):
        answers = pools(2).run(driver.handle, replace(message, **changes), tensors)
        assert all("holds other weights than the request means (another)" in answer["error"] for answer in answers)


@pytest.mark.parametrize(("ranks", "layout"), [(2, "ulysses=2"), (3, "tensor=3"), (3, "ring=3 shard_weights")])
def test_another_strength_or_none_sends_and_loads_nothing_more(pools, checkpoints, loras, ranks, layout):
    path, first = checkpoints(heads=3, seed=5), loras[0].file
    message, tensors = requests.forward(requests.spec(path, layout), Case())
    sent, loads = [], []
    for adapters in ((), (first,), (replace(first, strength=2.0),), ()):
        asked = replace(message, adapters=(adapters, adapters), measure="bytes")
        answers = pools(ranks).run(driver.handle, asked, tensors)
        sent.append(answers[0]["tensors"]["sent_bytes"].tolist())
        loads.append(loads_of(answers, path))
    assert sent == [sent[0]] * 4
    assert sum(sent[0]) > 0
    assert loads == [loads[0]] * 4


def test_a_file_that_is_known_is_not_read_again(pools, checkpoints, loras, tmp_path):
    path = checkpoints(heads=3, seed=4)
    check_known = loras[0].file
    copy = tmp_path / "copy.safetensors"
    with safe_open(check_known.path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        save_file(tensors, copy, file.metadata() | {"id": "a copy"})
    case = Case()
    message, tensors = requests.forward(requests.spec(path, "ulysses=2"), case)
    known = replace(check_known, path=str(copy), id="a copy")
    once = pools(2).run(driver.handle, replace(message, adapters=((known,), (known,))), tensors)
    copy.unlink()
    stronger = replace(known, strength=2.0)
    again = pools(2).run(driver.handle, replace(message, adapters=((stronger,), (known,))), tensors)
    assert [answer["error"] for answer in again] == [None] * 2
    assert torch.equal(once[0]["tensors"]["1"], again[0]["tensors"]["1"])
    assert not torch.equal(once[0]["tensors"]["0"], again[0]["tensors"]["0"])
