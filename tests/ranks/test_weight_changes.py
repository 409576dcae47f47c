"""LoRAs as factors beside the weights, and overlays, equal merged weights in every exact layout."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from parallel_backend.checkpoint import adapter_file, overlay_file
from parallel_backend.checkpoint.adapter_file import AdapterLayer
from parallel_backend.models.shared.patchify import pad_to_patch
from parallel_backend.protocol.messages import Adapter, Overlay
from tests.ranks import driver, requests
from tests.ranks.requests import Case
from tests.support import tiny

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


@dataclass(frozen=True)
class Change:
    """A LoRA's file, and what it adds to each weight."""

    file: Adapter
    deltas: dict[str, Tensor]


def lora(folder: Path, seed: int, rank: int, strength: float) -> Change:
    """Write a LoRA on every linear layer. Its second layer changes the second half of the rows only."""
    random = torch.Generator().manual_seed(seed)
    model = tiny.transformer(SIZES)
    layers: list[AdapterLayer] = []
    tensors: dict[str, Tensor] = {}
    deltas: dict[str, Tensor] = {}
    linears = [name for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    for number, name in enumerate(linears):
        weight = model.get_submodule(name).weight
        start = len(weight) // 2 if number == 1 else 0
        up = torch.randn(len(weight) - start, rank, generator=random) * 0.3
        down = torch.randn(rank, weight.shape[1], generator=random) * weight.shape[1] ** -0.5
        layers.append(AdapterLayer(weight=f"{name}.weight", start=start, scale=1.5))
        tensors |= {f"{number}.up": up, f"{number}.down": down}
        deltas[f"{name}.weight"] = torch.cat([torch.zeros(start, weight.shape[1]), 1.5 * up @ down])
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    path = folder / f"lora-{seed}.safetensors"
    save_file(tensors, path, adapter_file.metadata(layers, shapes))
    return Change(Adapter(path=str(path), id=f"lora {seed}", strength=strength), deltas)


@pytest.fixture(scope="module")
def loras(tmp_path_factory) -> tuple[Change, Change]:
    folder = tmp_path_factory.mktemp("loras")
    return lora(folder, seed=1, rank=2, strength=0.7), lora(folder, seed=2, rank=5, strength=-0.4)


def stock(case: Case, branch: int, changes: tuple[Change, ...], replaced: dict[str, Tensor]) -> Tensor:
    """diffusers' own forward with merged weights."""
    model = tiny.transformer(SIZES)
    weights = model.state_dict() | replaced
    for change in changes:
        weights |= {name: weights[name] + change.file.strength * delta for name, delta in change.deltas.items()}
    model.load_state_dict(weights)
    latent = case.latent
    with torch.no_grad():
        out = model(pad_to_patch(latent, SIZES.patch), case.timestep, case.text(branch), return_dict=False)[0]
    return out[:, :, : latent.shape[2], : latent.shape[3], : latent.shape[4]]


def check(pools, path, ranks, layout, by_branch, overlay=None, replaced=None):
    case = Case()
    message, tensors = requests.forward(requests.spec(path, layout), case)
    adapters = tuple(tuple(change.file for change in changes) for changes in by_branch)
    answers = pools(ranks).run(driver.handle, replace(message, adapters=adapters, overlay=overlay), tensors)
    assert [answer["error"] for answer in answers] == [None] * ranks
    for branch, changes in enumerate(by_branch):
        wanted = stock(case, branch, changes, replaced or {})
        assert requests.relative_error(answers[0]["tensors"][str(branch)], wanted) <= CLOSE
    return answers


def loads_of(answers, path):
    """How often each rank has loaded weights of a checkpoint."""
    return [model.loads for answer in answers for model in answer["models"] if model.path == str(path)]


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_loras_by_branch_equal_merged_weights_and_leave_no_trace(pools, checkpoints, loras, ranks, layout):
    path, (first, second) = checkpoints(heads=3), loras
    loads = loads_of(check(pools, path, ranks, layout, ((), ())), path)
    for by_branch in (((first, second), (first, second)), ((first,), (second,)), ((second,), ()), ((), ())):
        answers = check(pools, path, ranks, layout, by_branch)
    assert loads_of(answers, path) == loads


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_an_overlay_replaces_weights_and_is_undone(pools, checkpoints, loras, tmp_path, ranks, layout):
    path, model = checkpoints(heads=3), tiny.transformer(SIZES)
    random = torch.Generator().manual_seed(3)
    names = [name for name in model.state_dict() if "blocks.0" in name or "proj_out" in name]
    replaced = {name: torch.randn(model.state_dict()[name].shape, generator=random) * 0.2 for name in names}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    file = tmp_path / "overlay.safetensors"
    save_file({f"transformer.{name}": each for name, each in replaced.items()}, file, overlay_file.metadata(shapes))
    overlay = Overlay(path=str(file), id="overlay")
    check(pools, path, ranks, layout, ((loras[0],), ()), overlay, replaced)
    check(pools, path, ranks, layout, ((), ()))


def test_a_file_that_is_known_is_not_read_again(pools, checkpoints, loras, tmp_path):
    path = checkpoints(heads=3, seed=4)
    check_known = loras[0].file
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(Path(check_known.path).read_bytes())
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
