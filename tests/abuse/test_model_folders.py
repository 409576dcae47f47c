"""Model folders that bring code, or lead elsewhere: nothing of theirs runs, and nothing that they lead to is quoted.

Elsewhere: weights in `.bin` and `.pt` files, an index that lists other folders (`unit/loading`), and names with `..` in
the loader (`inside_comfyui/models/test_loading.py`).
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.client.client import Client
from parallel_backend.errors import InvalidRequest
from parallel_backend.protocol.endpoint import Endpoint
from parallel_backend.protocol.messages import Decode, EncodeText, RankRequest, Sample
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from tests.faults.conftest import runtime_folder
from tests.support import tiny

Tensors = dict[str, torch.Tensor]

MARK = "open({!r}, 'a').close()\n"
"""A program that leaves a file behind."""
MODULES = (
    "__init__", "evil", "pipeline", "model_index", "sitecustomize", "torch", "diffusers", "transformers", "safetensors",
    "json", "numpy",
)  # fmt: skip
"""Modules that the folder has a file of."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Client]:
    """A backend with real ranks."""
    with runtime_folder() as folder:
        yield Client(endpoint=Endpoint(folder=folder))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.write(tmp_path / "model")


def changed(file: Path, **entries: Any) -> None:
    """Change entries of a JSON file."""
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | entries))


def spec(folder: Path) -> ModelSpec:
    return ModelSpec(path=str(folder), devices=Devices(kind="cpu", indices=(0,)))


def requests(folder: Path) -> Iterator[tuple[RankRequest, Tensors]]:
    """A request for each component."""
    torch.manual_seed(0)
    inputs = {"x": torch.randn(1, 16, 1, 8, 8), "sigmas": torch.linspace(1, 0, 2)}
    inputs["0.encoder_hidden_states"] = torch.randn(1, 6, 32)
    yield Sample(model=spec(folder), branches=1, sampler="euler", cfg=1.0), inputs
    ids = {"ids": torch.tensor([[3, 4, 1]]), "lengths": torch.tensor([3])}
    yield EncodeText(model=spec(folder)), ids
    yield Decode(model=spec(folder)), {"latent": torch.randn(1, 16, 1, 4, 4)}


def results(client: Client, folder: Path) -> list[Tensors]:
    return [client.call(*request) for request in requests(folder)]


def test_code_in_a_folder_is_never_run(ranks: Client, model: Path, tmp_path: Path) -> None:
    """In every place where diffusers or transformers would look for it, if they were asked to trust it."""
    clean = results(ranks, model)
    mark = tmp_path / "ran"
    for folder in (model, *(each for each in model.iterdir() if each.is_dir())):
        for name in MODULES:
            (folder / f"{name}.py").write_text(MARK.format(str(mark)))
    automatic = {"AutoModel": "evil.Evil", "AutoConfig": "evil.Evil", "AutoModelForSeq2SeqLM": "evil.Evil"}
    for component in ("transformer", "text_encoder", "vae"):
        changed(model / component / "config.json", auto_map=automatic, custom_pipeline="evil", trust_remote_code=True)
    changed(
        model / "model_index.json", _class_name=["pipeline", "Evil"], custom_pipeline="pipeline", evil=["evil", "Evil"]
    )
    for one, other in zip(clean, results(ranks, model), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("component", "pair", "message"),
    [
        ("transformer", ["evil", "Evil"], "Evil is not supported; supported: "),
        ("transformer", ["diffusers", "DiffusionPipeline"], "DiffusionPipeline is not supported; supported: "),
        ("transformer", ["diffusers", "__class__"], "__class__ is not supported; supported: "),
        ("transformer", ["os", ["system"]], "has no transformer"),
        ("transformer", ["os", {"a": 1}], "has no transformer"),
        ("text_encoder", ["transformers", "AutoModel"], "text_encoder class AutoModel is not supported; supported: "),
        ("vae", ["diffusers", "ModelMixin"], "vae class ModelMixin is not supported; supported: "),
    ],
)
def test_any_other_class_is_refused(ranks: Client, model: Path, component: str, pair: Any, message: str) -> None:
    changed(model / "model_index.json", **{component: pair})
    with pytest.raises(InvalidRequest, match=message):
        results(ranks, model)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "_experts_implementation"])
@pytest.mark.parametrize("value", ["someone/kernel", "flash_attention_2", {"": "someone/kernel"}])
@pytest.mark.daily(3)
def test_a_config_that_names_a_program_is_refused(ranks: Client, model: Path, key: str, value: Any) -> None:
    changed(model / "text_encoder" / "config.json", **{key: value})
    with pytest.raises(InvalidRequest, match=f"has {key} .*, for which transformers may download and run a program"):
        results(ranks, model)


SECRET = "a line of a file that is none of the model's"
FILES = ("model_index.json", "transformer/config.json", "transformer/diffusion_pytorch_model.safetensors")


@pytest.mark.parametrize("name", FILES)
def test_a_link_to_another_file_is_read_as_what_it_should_be_and_not_quoted(
    ranks: Client, model: Path, tmp_path: Path, name: str
) -> None:
    """Links are followed, as ComfyUI follows them: a cache of Hugging Face consists of them."""
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    (model / name).unlink()
    (model / name).symlink_to(secret)
    with pytest.raises(InvalidRequest) as caught:
        results(ranks, model)
    assert str(model) in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("device", ["/dev/zero", "/dev/tty", "pipe"])
@pytest.mark.daily(3)
def test_a_link_to_what_has_no_end_is_refused_at_once(ranks: Client, model: Path, name: str, device: str) -> None:
    if device == "pipe":
        os.mkfifo(device := str(model.parent / "pipe"))
    (model / name).unlink()
    (model / name).symlink_to(device)
    with pytest.raises(InvalidRequest):
        results(ranks, model)


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/self/environ", "/dev/zero", "/dev/null", "/", "..", "a\nb"])
def test_a_path_that_is_no_model_is_refused(ranks: Client, path: str) -> None:
    """The backend reads what its user may read, and nothing that is no model gets further than its first bytes."""
    with pytest.raises(InvalidRequest) as caught:
        results(ranks, Path(path))
    assert "root:" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model_index.json", b"[" * 20_000),
        ("model_index.json", b'{"transformer":["a","b"],"x":' + b"[" * 20_000),
        ("transformer/config.json", b'{"x":' * 20_000),
        ("transformer/config.json", b"\xff\xfe"),
        ("transformer/config.json", b"[]"),
        ("transformer/diffusion_pytorch_model.safetensors.index.json", b'{"weight_map":' + b"[" * 20_000),
        ("transformer/diffusion_pytorch_model.safetensors.index.json", b'{"weight_map":{"a":1}}'),
        ("transformer/diffusion_pytorch_model.safetensors.index.json", b'{"weight_map":{"a":["x"]}}'),
        ("transformer/diffusion_pytorch_model.safetensors.index.json", b'{"weight_map":{"a":"/etc/passwd"}}'),
        ("transformer/diffusion_pytorch_model.safetensors.index.json", b'{"weight_map":{"a":"\\u0000.safetensors"}}'),
    ],
)
@pytest.mark.daily(4)
def test_broken_json_is_refused(ranks: Client, model: Path, name: str, content: bytes) -> None:
    (model / name).write_bytes(content)
    with pytest.raises(InvalidRequest):
        results(ranks, model)


def test_json_of_a_gigabyte_is_refused_unread(model: Path) -> None:
    with (model / "transformer" / "config.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(InvalidRequest, match="has 1073741824 bytes, and 67108864 is the limit"):
        open_checkpoint(model).config("transformer")


def test_every_refusal_left_the_same_ranks(ranks: Client, model: Path) -> None:
    """None of the above ended a set: a refusal is the same on every rank."""
    assert results(ranks, model)
    assert ranks.status().generation == 1
    assert ranks.status().internal_errors == 0
