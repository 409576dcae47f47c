"""``verify --reference`` on small folders of references that are made here."""

import itertools
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


def test_a_value_on_the_way_is_compared_or_skipped(folder, capsys):
    tensors = load_file(folder / "v20_forward.safetensors")
    family = families.family(NAME, "i2v")
    embedded = torch.nn.functional.linear(
        tensors["odd.in.txt"], family.module.context_embedder.weight, family.module.context_embedder.bias
    )
    save_file(tensors | {"odd.mid.txt_in": embedded, "odd.mid.other": embedded + 1}, folder / "v20_forward.safetensors")
    status, lines = verify(folder, capsys)
    assert status == 0
    assert any(line.startswith("equal    v20_forward odd txt_in: ") for line in lines)
    assert "skipped  v20_forward odd other: nothing of ours is the same value" in lines
    change(folder, "v20_forward", "odd.mid.txt_in", lambda value: value + 0.01)
    assert verify(folder, capsys)[0] == 1


@pytest.mark.parametrize("name", ["v99_forward", "v20_forwards", "v12_vae_small_names"])
def test_an_unknown_kind_is_skipped(name, folder, capsys):
    write(folder, name, {}, {})
    assert any(line.startswith(f"skipped  {name}") for line in verify(folder, capsys)[1])


def test_a_part_may_say_more_than_its_kind(folder, capsys):
    for ending in ("json", "safetensors"):
        (folder / f"v20_forward.{ending}").rename(folder / f"v20_forward_wide.{ending}")
    change(folder, "v20_forward_wide", "odd.out", lambda value: value + 0.01)
    status, lines = verify(folder, capsys)
    assert status == 1
    assert lines[0].startswith("FAILED   v20_forward_wide odd: ")


def test_a_folder_without_references_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="has no reference of a known kind"):
        list(run.compare(tmp_path))


def test_a_tensor_that_is_missing_is_named(folder):
    described = json.loads((folder / "v20_forward.json").read_text())
    described["tensors"]["even.in.latent"] = {}
    (folder / "v20_forward.json").write_text(json.dumps(described))
    with pytest.raises(InvalidRequest, match=r"lacks even\.in\.latent"):
        list(run.compare(folder))


def test_a_part_without_a_cell_is_refused(folder):
    write(folder, "v20_forward", {"odd.out": torch.zeros(1)}, {"config": CONFIG, "weights": "model.safetensors"})
    with pytest.raises(InvalidRequest, match="has nothing to compare"):
        list(run.compare(folder))


def test_a_config_without_a_number_is_refused(folder):
    described = json.loads((folder / "v20_forward.json").read_text())
    del described["config"]["theta"]
    (folder / "v20_forward.json").write_text(json.dumps(described))
    with pytest.raises(InvalidRequest, match="lack 'theta'"):
        list(run.compare(folder))


def test_another_setting_of_the_authors_class_is_refused(folder):
    described = json.loads((folder / "v20_forward.json").read_text())
    described["config"]["use_liger_rope"] = False
    (folder / "v20_forward.json").write_text(json.dumps(described))
    with pytest.raises(InvalidRequest, match="use_liger_rope False is not supported"):
        list(run.compare(folder))


@pytest.fixture
def prompts(tmp_path):
    pairs = [{"prompt": "rain", "with 16 fps": "rain. 16 FPS.", "and motion score 7": "rain. 16 FPS. 7 motion score."}]
    (tmp_path / "v20_prompts.json").write_text(json.dumps({"tensors": {}, "pairs": pairs}))
    return tmp_path


def test_prompts_are_compared(prompts, capsys):
    assert verify(prompts, capsys)[0] == 0
    file = prompts / "v20_prompts.json"
    file.write_text(file.read_text().replace('7 motion score."', '7 motion score"'))
    status, lines = verify(prompts, capsys)
    assert status == 1
    assert "'rain. 16 FPS. 7 motion score.' != 'rain. 16 FPS. 7 motion score'" in lines[1]


TIMES = [1.0, 0.7, 0.4, 0.0]


@pytest.fixture
@torch.no_grad()
def samplings(folder):
    """The folder with a sampling of two videos with given first frames, as explicit steps compute it."""
    family, noise = families.family(NAME, "i2v"), torch.randn(2, 16, 3, 4, 6)
    text, pooled = torch.randn(3, 5, 64), torch.randn(3, 32)
    clips = [torch.randn(1, 16, 1, 4, 6) for _ in range(2)]
    given = torch.zeros(2, 17, 3, 4, 6)
    given[:, :, :1] = torch.stack([torch.cat([torch.ones(1, 1, 4, 6), clip[0]]) for clip in clips])
    latent = noise
    ramps = [[1.0, 2.0, 3.0], [1.0, 1 + 2 / 3, 1 + 4 / 3], [1.0, 1 + 1 / 3, 1 + 2 / 3]]
    for step, (now, then) in enumerate(itertools.pairwise(TIMES)):
        positive, negative, empty = (
            family.stock({
                "hidden_states": latent, "timestep": torch.full((2,), now) * 1000, "concat": concat,
                "encoder_hidden_states": text[rows], "pooled_projections": pooled[rows],
            })
            for rows, concat in (([0, 1], given), ([2, 2], given), ([2, 2], torch.zeros_like(given)))
        )  # fmt: skip
        ramp = torch.tensor(ramps[step]).reshape(1, 1, 3, 1, 1)
        velocity = empty + ramp * (negative - empty) + 5.0 * (positive - negative)
        latent = latent + (then - now) * velocity
    latent[0, :, 0] = clips[0][0, :, 0]
    tensors = {"two.in.noise": noise, "two.out": latent}
    tensors |= {f"two.in.reference.{i}": clip for i, clip in enumerate(clips)}
    for name, values in (("t5", text), ("clip", pooled)):
        tensors |= {f"two.in.{name}.{key}": values[i] for i, key in enumerate(("positive.0", "positive.1", "negative"))}
    run = {
        "kind": "i2v_head", "steps": 3, "times": TIMES, "guidance": {"text": [5.0] * 3, "image": ramps},
    }  # fmt: skip
    write(folder, "v20_sampling", tensors, {"config": CONFIG, "weights": "model.safetensors", "runs": {"two": run}})
    (folder / "v20_forward.json").unlink()
    return folder


def test_a_sampling_is_compared(samplings, capsys):
    _, lines = verify(samplings, capsys)
    failed = [line for line in lines if line.startswith("FAILED")]
    assert [line.partition(": ")[0] for line in failed] == ["FAILED   v20_sampling two times"]  # they are made up here
    assert any(line.startswith("equal    v20_sampling two: ") for line in lines)


@pytest.mark.parametrize("key", ["in.noise", "in.reference.0", "in.t5.negative", "in.clip.positive.1", "out"])
def test_a_changed_sampling_fails(key, samplings, capsys):
    change(samplings, "v20_sampling", f"two.{key}", lambda value: value + 0.01)
    _, lines = verify(samplings, capsys)
    assert any(line.startswith("FAILED   v20_sampling two: ") for line in lines)


def test_a_model_for_the_other_vae_is_to_be_refused(folder, capsys):
    (folder / "v20_dcae.json").write_text(json.dumps({"tensors": {}, "weights": "model.safetensors"}))
    assert verify(folder, capsys)[0] == 1
    weights = load_file(folder / "model.safetensors")
    weights["cond_in.weight"] = torch.zeros(384, 65)
    save_file(weights, folder / "model.safetensors")
    (folder / "v20_forward.json").unlink()
    status, lines = verify(folder, capsys)
    assert status == 0
    assert "model.safetensors: Open-Sora 2.0 for the video DC-AE is not supported (cond_in takes 65 values)" in lines[0]
