"""What only the memory of ComfyUI's machine has reaches the ranks of a backend on another machine."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from parallel_backend import env
from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.client.client import Client
from parallel_backend.errors import InvalidRequest
from parallel_backend.protocol.messages import Forward, Unload
from parallel_backend.protocol.model_spec import Adapter, ModelSpec
from parallel_backend.supervisor.limits import Limits
from tests.ranks import requests
from tests.ranks.requests import Case
from tests.support import tiny
from tests.support.certificates import made
from tests.support.weight_changes import Change, write_overlay

from .backend import start_fake
from .conftest import runtime_folder
from .over_gateway import client_of

SIZES = tiny.Tiny(heads=3, head_dim=128)
"""As files of Wan are recognised."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny") / "model", SIZES)


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Client]]:
    """A client beside a backend of two real ranks, and one of another machine."""
    certificates = made(tmp_path_factory.mktemp("files") / "certificates")
    with runtime_folder() as runtime, pytest.MonkeyPatch.context() as patch:
        patch.setenv(env.CERTIFICATES.name, str(certificates))
        local = start_fake(runtime, worker="losing_rank.py", limits=Limits(), certificates=certificates)
        yield Client(endpoint=local.endpoint), client_of(local.status().listens)


class InMemory:
    """A file in this process's memory. The backend runs on this machine, so its path is one that nobody has there."""

    def __init__(self, content: bytes) -> None:
        self.descriptor = os.memfd_create("test")
        os.write(self.descriptor, content)
        self.path = f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def close(self) -> None:
        """Give it up."""
        os.close(self.descriptor)


def model(path: Path, content: str = "") -> ModelSpec:
    return replace(requests.spec(path, "ulysses=2", ranks=2), content=content)


def forward(client: Client, spec: ModelSpec, **options: object) -> torch.Tensor:
    """Return the predictions of both branches."""
    message, tensors = requests.forward(spec, Case())
    answer = client.call(replace(message, **options), tensors)  # type: ignore[arg-type]
    return torch.stack([answer["0"], answer["1"]])


def sent(client: Client) -> int:
    """Bytes of files that rank 0 keeps in memory."""
    pid = client.status().ranks[0].pid
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # heartbeats open and close files meanwhile
            if "memfd:parallel-dit" in os.readlink(entry):
                status = entry.stat()
                found[status.st_ino] = status.st_size
    return sum(found.values())


def test_loras_and_changed_weights_are_sent_once(clients: tuple[Client, Client], folder: Path, tmp_path: Path) -> None:
    local, remote = clients
    module = tiny.transformer(SIZES)
    lora = Change.write(tmp_path, module, seed=1, rank=2, strength=0.7)
    overlay, _ = write_overlay(tmp_path, module, ["blocks.0.attn1.to_q.weight"])
    options = {"adapters": ((lora.file,), (lora.file,)), "overlay": overlay}
    wanted = forward(local, model(folder), **options)
    content = open_checkpoint(folder).content()
    files = [InMemory(Path(each.path).read_bytes()) for each in (lora.file, overlay)]
    adapter: Adapter = replace(lora.file, path=files[0].path)
    there = {"adapters": ((adapter,), (adapter,)), "overlay": replace(overlay, path=files[1].path)}
    spec = model(folder, content)
    torch.testing.assert_close(forward(remote, spec, **there), wanted)
    size = sum(os.stat(each.path).st_size for each in files)
    assert sent(local) == size
    for each in files:
        each.close()  # nothing is sent again
    stronger = replace(adapter, strength=1.4)
    again = forward(remote, spec, **(there | {"adapters": ((stronger,), (stronger,))}))
    assert (again - wanted).abs().max() > 1e-3
    assert sent(local) == size


def test_a_model_in_memory_is_sent_and_freed_when_it_is_unloaded(clients: tuple[Client, Client], folder: Path) -> None:
    local, remote = clients
    wanted = forward(local, model(folder))
    before = sent(local)
    file = InMemory(save(load_file(next((folder / "transformer").glob("*.safetensors")))))
    spec = model(Path(file.path), open_checkpoint(Path(file.path)).content())
    torch.testing.assert_close(forward(remote, spec), wanted)
    assert sent(local) == before + os.stat(file.path).st_size
    remote.call(Unload(model=spec))
    assert sent(local) == before
    file.close()
    with pytest.raises(InvalidRequest, match="a file in this process's memory is gone"):
        remote.call(*requests.forward(spec, Case()))
    assert isinstance(requests.forward(spec, Case())[0], Forward)
    torch.testing.assert_close(forward(local, model(folder)), wanted)
