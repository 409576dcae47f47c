"""Ranks on other hosts find their copies of a model, and get what only ComfyUI's memory has."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.protocol.messages import Unload
from tests.ranks import driver, requests
from tests.ranks.conftest import Pools
from tests.ranks.requests import Case
from tests.support import tiny
from tests.support.weight_changes import Change

SIZES = tiny.Tiny(heads=3)
HOSTS = ("", "b", "b")


@pytest.fixture
def folders(pools: Pools, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Where the first host and host b look for models; the pool of three ranks is on them."""
    found = tmp_path / "first", tmp_path / "second"
    pools(3).run(driver.place, [(host, str(found[host == "b"])) for host in HOSTS])
    yield found
    pools(3).run(driver.place, [("", "")] * 3)


def asked(path: Path, content: str, layout: str | None = "ulysses=3", **options: Any) -> Any:
    """A forward of three ranks and its tensors."""
    model = replace(requests.spec(path, layout, ranks=3), content=content)
    message, tensors = requests.forward(model, Case())
    return replace(message, **options), tensors


def run(pools: Pools, message: Any, tensors: Any) -> list[dict[str, Any]]:
    return pools(3).run(driver.handle, message, tensors)


def test_each_host_finds_its_copy_by_name_and_content(pools: Pools, folders: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = folders
    given = tiny.write(tmp_path / "comfyui" / "model", SIZES)
    content = open_checkpoint(given).content()
    wanted = run(pools, *asked(given, ""))[0]["tensors"]
    # Another model has the same path on all hosts, and the one that is meant is elsewhere.
    tiny.write(first / "a" / "deep" / "folder" / "model", SIZES)
    tiny.write(second / "model", SIZES)
    shutil.rmtree(given)
    tiny.write(given, replace(SIZES, seed=1))
    answers = run(pools, *asked(given, content))
    assert [answer["error"] for answer in answers] == [None] * 3
    for name, tensor in wanted.items():
        torch.testing.assert_close(answers[0]["tensors"][name], tensor)
    assert {answer["models"][-1].path for answer in answers} == {str(given)}
    paths = pools(3).run(driver.host_paths)
    assert paths == [[str(first / "a" / "deep" / "folder" / "model")], *[[str(second / "model")]] * 2]


def test_a_host_that_lacks_a_model_or_has_another_says_so(
    pools: Pools, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    first, second = folders
    tiny.write(first / "model", SIZES)
    content = open_checkpoint(first / "model").content()
    gone = tmp_path / "comfyui" / "model"
    answers = run(pools, *asked(gone, content))
    lacks = f"InvalidRequest: rank 1: host b has no model: copy it there, to {gone} or into a folder of"
    assert all(answer["error"].startswith(lacks) for answer in answers)
    tiny.write(second / "model", replace(SIZES, seed=1))
    answers = run(pools, *asked(gone, content))
    another = f"InvalidRequest: rank 1: host b has another model ({second / 'model'}) than ComfyUI"
    assert all(answer["error"].startswith(another) for answer in answers)
    shutil.rmtree(second / "model")
    tiny.write(second / "model", SIZES)
    assert [answer["error"] for answer in run(pools, *asked(gone, content))] == [None] * 3


def test_loras_are_sent_once_to_each_host(pools: Pools, folders: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = folders
    path = tiny.write(first / "model", SIZES)
    shutil.copytree(path, second / "model")
    content = open_checkpoint(path).content()
    loras = [Change.write(tmp_path, tiny.transformer(SIZES), seed=seed, rank=2, strength=0.7) for seed in range(10)]
    for lora in loras:
        adapters = ((lora.file,), (lora.file,))
        wanted = run(pools, *asked(path, "", adapters=adapters))[0]["tensors"]
        answers = run(pools, *asked(path, content, adapters=adapters))
        assert [answer["error"] for answer in answers] == [None] * 3
        for name, tensor in wanted.items():
            torch.testing.assert_close(answers[0]["tensors"][name], tensor)
        on_first, on_second, on_third = pools(3).run(driver.host_paths)
        assert on_first[-1] == lora.file.path
        assert on_second == on_third
        assert Path(on_second[-1]).read_bytes() == Path(lora.file.path).read_bytes()
    kept = pools(3).run(driver.files_in_memory)
    assert kept[0] == kept[2] == 0
    assert 8 <= kept[1] <= 9, "the oldest make room"
    model = asked(path, content)[0].model
    assert [each["error"] for each in run(pools, Unload(model=model), {})] == [None] * 3


def test_a_model_in_memory_is_sent_and_given_up_when_it_is_unloaded(
    pools: Pools, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    native = tiny.write(tmp_path / "model", replace(SIZES, head_dim=128))  # as files of Wan are recognised
    wanted = run(pools, *asked(native, ""))[0]["tensors"]
    descriptor = os.memfd_create("model")
    weights = load_file(next((native / "transformer").glob("*.safetensors")))
    os.write(descriptor, save(weights))
    path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    content = open_checkpoint(path).content()
    message, tensors = asked(path, content)
    answers = run(pools, message, tensors)
    assert [answer["error"] for answer in answers] == [None] * 3
    for name, tensor in wanted.items():
        torch.testing.assert_close(answers[0]["tensors"][name], tensor)
    assert pools(3).run(driver.files_in_memory) == [0, 1, 0]
    run(pools, Unload(model=message.model), {})
    assert pools(3).run(driver.files_in_memory) == [0, 0, 0]
    os.close(descriptor)
