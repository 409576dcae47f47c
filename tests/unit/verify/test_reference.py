"""``verify --reference`` on small folders of references that are made here."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lab import __main__ as lab
from lab.verify.reference import run
from parallel_backend.errors import InvalidRequest
from parallel_backend.families.shared.patchify import to_tokens
from tests.support import families, open_sora2

NAME = "OpenSora2Transformer3DModel"
CONFIG = {
    "in_channels": 64, "mlp_ratio": 4.0, "theta": 10000, "qkv_bias": True, "guidance_embed": False, "cond_embed": True,
    "fused_qkv": False, "use_liger_rope": True, "patch_size": 2, "hidden_size": 384, "num_heads": 24,
    "axes_dim": [4, 6, 6], "depth": 2, "depth_single_blocks": 2, "context_in_dim": 64, "vec_in_dim": 32,
}  # fmt: skip


@pytest.fixture
@torch.no_grad()
def folder(tmp_path):
    """A folder with one forward of a random model, as diffusers' own forward computes it."""
    family = families.family(NAME, "i2v")
    save_file(contiguous(open_sora2.authors_weights(family.module.state_dict())), tmp_path / "model.safetensors")
    inputs = families.inputs(NAME, "i2v", batch=2) | {
        "hidden_states": torch.randn(2, 16, 3, 4, 6), "concat": torch.randn(2, 17, 3, 4, 6)
    }  # fmt: skip
    tensors = {
        "odd.in.latent": inputs["hidden_states"],
        "odd.in.timesteps": inputs["timestep"] / 1000,
        "odd.in.txt": inputs["encoder_hidden_states"],
        "odd.in.y_vec": inputs["pooled_projections"],
        "odd.in.mask": inputs["concat"][:, :1],
        "odd.in.reference": inputs["concat"][:, 1:],
        "odd.out": to_tokens(family.stock(inputs), (1, 2, 2), "c pt ph pw"),
    }
    write(tmp_path, "v20_forward", tensors, {"config": CONFIG, "weights": "model.safetensors"})
    return tmp_path


def contiguous(tensors):
    return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}


def write(folder, name, tensors, described):
    save_file(contiguous(tensors), folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps({"tensors": {key: {} for key in tensors}, **described}))


def change(folder, name, key, value):
    tensors = load_file(folder / f"{name}.safetensors")
    tensors[key] = value(tensors[key])
    save_file(tensors, folder / f"{name}.safetensors")


def verify(folder, capsys):
    status = lab.main(["verify", "--reference", str(folder)])
    return status, capsys.readouterr().out.splitlines()


def test_an_equal_forward_is_equal(folder, capsys):
    status, lines = verify(folder, capsys)
    assert status == 0
    assert lines[0].startswith("equal    v20_forward odd: ")
    assert lines[-1] == "1 compared, 0 failed, 0 skipped"


@pytest.mark.parametrize("key", ["odd.in.mask", "odd.in.reference", "odd.in.txt", "odd.in.y_vec", "odd.out"])
def test_a_changed_tensor_fails(key, folder, capsys):
    change(folder, "v20_forward", key, lambda value: value + 0.01)
    status, lines = verify(folder, capsys)
    assert status == 1
    assert lines[0].startswith("FAILED   v20_forward odd: ")


def test_a_result_that_is_no_number_fails(folder, capsys):
    change(folder, "v20_forward", "odd.out", lambda value: value * float("nan"))
    assert verify(folder, capsys)[0] == 1


def test_an_unknown_kind_is_skipped(folder, capsys):
    write(folder, "v99_forward", {}, {})
    assert "skipped  v99_forward" in verify(folder, capsys)[1][-2]


def test_a_folder_without_references_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="has no reference of a known kind"):
        list(run.compare(tmp_path))


def test_a_tensor_that_is_missing_is_named(folder):
    described = json.loads((folder / "v20_forward.json").read_text())
    described["tensors"]["even.in.latent"] = {}
    (folder / "v20_forward.json").write_text(json.dumps(described))
    with pytest.raises(InvalidRequest, match=r"lacks even\.in\.latent"):
        list(run.compare(folder))


def test_another_setting_of_the_authors_class_is_refused(folder):
    described = json.loads((folder / "v20_forward.json").read_text())
    described["config"]["use_liger_rope"] = False
    (folder / "v20_forward.json").write_text(json.dumps(described))
    with pytest.raises(InvalidRequest, match="use_liger_rope False is not supported"):
        list(run.compare(folder))
