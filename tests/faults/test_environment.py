"""Ranks in the environment of somebody's ComfyUI: broken packages, and variables that are made for others."""

import os
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from lab.bench.model_file import TEXT, write_wan
from parallel_backend import packages
from parallel_backend.client.client import Client
from parallel_backend.engine.engine import Engine
from parallel_backend.errors import BrokenPackage, InvalidRequest
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.endpoint import Endpoint
from parallel_backend.protocol.messages import Decode, EncodeText, RankRequest, Sample
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.protocol.tensors import describe
from tests.support import broken_packages, tiny

Tensors = dict[str, torch.Tensor]

VARIABLES = {
    "DIFFUSERS_ATTN_BACKEND": "flash", "DIFFUSERS_SLOW_IMPORT": "1", "DIFFUSERS_GGUF_CUDA_KERNELS": "1", "USE_TF": "1",
    "USE_TORCH": "0", "USE_SAFETENSORS": "0", "FORCE_TF_AVAILABLE": "1", "HF_ENABLE_PARALLEL_LOADING": "1",
    "TRANSFORMERS_VERBOSITY": "garbage", "PYTHONOPTIMIZE": "2", "PYTHONWARNINGS": "error", "PYTHONINSPECT": "1",
    "PYTHONSTARTUP": "/no/such/file", "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1,2",
    "GLOO_SOCKET_IFNAME": "elsewhere0", "NCCL_SOCKET_IFNAME": "elsewhere0", "NCCL_COMM_ID": "10.1.1.1:9",
    "GLOO_DEVICE_TRANSPORT": "TCP_TLS", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCH_DISTRIBUTED_DEBUG": "garbage",
    "TORCH_NCCL_BLOCKING_WAIT": "garbage", "TORCH_CPP_LOG_LEVEL": "garbage", "MASTER_ADDR": "10.1.1.1",
    "MASTER_PORT": "9", "RANK": "5", "LOCAL_RANK": "5", "WORLD_SIZE": "9", "LOCAL_WORLD_SIZE": "9",
    "TORCHINDUCTOR_COMPILE_THREADS": "many", "TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor_somebody",
}  # fmt: skip
"""Each ends ranks that inherit it, or did with some version of a library, or is another launcher's."""


FILE, GGUF = "model.safetensors", "model.gguf"
"""Files in original names."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = tiny.write(tmp_path_factory.mktemp("tiny") / "model")
    for name, stored_format in ((FILE, "plain"), (GGUF, "gguf")):
        write_wan(folder / name, heads=2, layers=1, stored_format=stored_format)
    devices = Devices(kind="cpu", indices=(0, 1))
    return ModelSpec(path=str(folder), devices=devices, dtype="float32", layout=ParallelLayout(ulysses=2))


def requests(model: ModelSpec) -> list[tuple[RankRequest, Tensors]]:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(1, 16, 1, 8, 8), "sigmas": torch.linspace(1, 0, 3)}
    texts = [{"0.encoder_hidden_states": torch.randn(1, 6, width)} for width in (32, TEXT)]
    return [
        *((_sample(model, path), inputs | text) for path, text in zip(("", FILE), texts, strict=True)),
        (EncodeText(model=model), {"ids": torch.tensor([[3, 4, 1]]), "lengths": torch.tensor([3])}),
        (Decode(model=model), {"latent": torch.randn(1, 16, 1, 4, 4)}),
    ]


def _sample(model: ModelSpec, file: str) -> Sample:
    path = os.path.join(model.path, file) if file else model.path
    return Sample(model=replace(model, path=path), branches=1, sampler="euler", cfg=1.0)


def alone(message: RankRequest, tensors: Tensors) -> Tensors:
    """The result of one rank in this process."""
    one = replace(message.model, devices=Devices(kind="cpu", indices=(0,)), layout=ParallelLayout())
    engine = Engine(rank=0, world_size=1, device=torch.device("cpu"))
    asked = replace(message, model=one)
    return engine.handle(asked, describe(tensors), tensors, report=lambda *_: None, cancelled=lambda: False)


def test_ranks_run_beside_broken_packages_and_variables_for_others(
    runtime: Path, model: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [alone(*request) for request in requests(model)]
    broken_packages.write(tmp_path / "broken", (*packages.HIDDEN, "jax", "tensorflow"), version="0.1.0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["broken", "", os.environ.get("PYTHONPATH", "")]))
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    client = Client(endpoint=Endpoint(folder=runtime))
    for request, expected in zip(requests(model), wanted, strict=True):
        got = client.call(*request)
        assert got.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], atol=1e-4, rtol=1e-4)
    assert broken_packages.imported(tmp_path / "broken") == set()
    with pytest.raises(InvalidRequest, match=r"model\.gguf is not loaded: the package gguf 0\.1\.0 cannot be imported"):
        client.call(_sample(model, GGUF), requests(model)[1][1])
    assert client.status().generation == 1
    for rank in client.status().ranks:
        found = psutil.Process(rank.pid).environ()
        assert str(tmp_path / "broken") in found["PYTHONPATH"].split(os.pathsep)
        assert found["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "caches" / "parallel-dit" / "compiled")


def test_a_package_that_ranks_need_is_named_and_they_start_once(
    runtime: Path, model: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_packages.write(tmp_path, ["huggingface_hub"], version="0.1.0", errors=("OSError",))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    client = Client(endpoint=Endpoint(folder=runtime))
    with pytest.raises(BrokenPackage) as caught:
        client.call(*requests(model)[0])
    said = str(caught.value)
    assert "the package huggingface_hub 0.1.0, which " in said
    assert "cannot be imported (OSError: huggingface_hub does not work here): run " in said
    assert "PARALLEL_DIT_PYTHON" in said
    assert client.status().generation == 1
