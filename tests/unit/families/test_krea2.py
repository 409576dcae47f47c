"""Krea-2's files in the published names, whose modulation is flat, and references with a timestep of their own."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from parallel_backend.checkpoint import overlay_file
from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.errors import InvalidRequest
from parallel_backend.families.architecture import substituted
from parallel_backend.families.krea2.transformer import Krea2
from parallel_backend.interfaces.geometry import LATENT, TIMESTEP
from parallel_backend.loading.original_weights import read_original
from parallel_backend.loading.weight_source import WeightSource
from tests.support import families
from tests.support.weight_changes import write_overlay

NAME = "Krea2Transformer2DModel"
NAMES = (
    (r"^img_in\.", "first."), (r"^time_embed\.linear_1", "tmlp.0"), (r"^time_embed\.linear_2", "tmlp.2"),
    (r"^time_mod_proj", "tproj.1"), (r"^txt_in\.norm\.weight", "txtmlp.0.scale"),
    (r"^txt_in\.linear_1", "txtmlp.1"), (r"^txt_in\.linear_2", "txtmlp.3"), (r"^text_fusion", "txtfusion"),
    (r"^transformer_blocks\.(\d+)\.scale_shift_table", r"blocks.\1.mod.lin"), (r"^transformer_blocks", "blocks"),
    (r"^final_layer\.scale_shift_table", "last.modulation.lin"), (r"^final_layer\.norm\.weight", "last.norm.scale"),
    (r"^final_layer", "last"), (r"\.to_([qkv])\.", r".w\1."), (r"\.to_out\.0\.", ".wo."), (r"\.to_gate\.", ".gate."),
    (r"\.norm_([qk])\.weight", r".qknorm.\1norm.scale"), (r"\.ff\.", ".mlp."), (r"\.norm1\.weight", ".prenorm.scale"),
    (r"\.norm2\.weight", ".postnorm.scale"),
)  # fmt: skip
"""Regular expressions that turn diffusers' names into the published ones, which ComfyUI's class has."""


def published(tensors):
    """Return a model's weights as the published files have them."""
    flat = {name: tensor.flatten() if name.startswith("transformer_blocks.") and "table" in name else tensor
            for name, tensor in tensors.items()}  # fmt: skip
    return {substituted(name, NAMES): tensor for name, tensor in flat.items()}


@pytest.fixture
def file(tmp_path):
    save_file(published(families.weights(NAME)), tmp_path / "krea2.safetensors")
    return open_checkpoint(tmp_path / "krea2.safetensors")


def read(source, name, like, dim=0, parts=None, rows=None):
    into = torch.empty_like(like)
    source.read(name, dim, parts, rows, into=into)
    return into


def test_a_published_file_says_the_config_and_holds_every_weight(file):
    assert file.components == {"transformer": NAME}
    assert file.stored("transformer").native
    assert file.left_over("transformer") == frozenset()
    described = families.module(NAME, "image").config
    assert file.config("transformer") == {name: described[name] for name in file.config("transformer")} | {
        "axes_dims_rope": [8, 0, 0]  # what the published width of a head would give
    }
    source = WeightSource(file.stored("transformer"), NAME)
    tensors = families.weights(NAME)
    source.check({name: tuple(tensor.shape) for name, tensor in tensors.items()}, counted=True)
    for name, tensor in tensors.items():
        assert torch.equal(read(source, name, tensor), tensor), name


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (2, 6), (5, 6), (6, 6)])
def test_a_rank_reads_its_rows_of_the_flat_modulation(file, start, stop):
    source, name = WeightSource(file.stored("transformer"), NAME), "transformer_blocks.1.scale_shift_table"
    wanted = families.weights(NAME)[name][start:stop]
    assert torch.equal(read(source, name, wanted, rows=slice(start, stop)), wanted)


def test_a_changed_flat_modulation_is_read_and_given_back(file, tmp_path):
    tensors = published(families.weights(NAME))
    name, table = "blocks.0.mod.lin", "transformer_blocks.0.scale_shift_table"
    shapes = {each: tuple(tensor.shape) for each, tensor in tensors.items()}
    (original,) = read_original(file, "transformer", shapes, [name])
    assert torch.equal(original, tensors[name])
    model: Any = SimpleNamespace(state_dict=lambda: tensors)
    overlay, replaced = write_overlay(tmp_path, model, [name])
    changed = replaced[name].reshape(6, -1)
    header = overlay_file.read(Path(overlay.path), overlay.id, "transformer")
    source = WeightSource(file.stored("transformer"), NAME).with_overlay(header)
    assert source.overlaid == {table}
    assert torch.equal(read(source, table, changed), changed)
    assert torch.equal(read(source, table, changed[2:3], rows=slice(2, 3)), changed[2:3])


def test_a_modulation_of_another_size_is_refused(tmp_path):
    tensors = published(families.weights(NAME))
    tensors["blocks.0.mod.lin"] = tensors["blocks.0.mod.lin"][:-1].clone()
    save_file(tensors, tmp_path / "krea2.safetensors")
    checkpoint = open_checkpoint(tmp_path / "krea2.safetensors")
    with pytest.raises(InvalidRequest, match="has one of another shape"):
        WeightSource(checkpoint.stored("transformer"), NAME)


@torch.no_grad()
def predicted(inputs):
    family = families.family(NAME, "references")
    state = families.run(family, family.embed(inputs))
    return family.unpatchify(family.head(state), inputs[LATENT].shape[2:])


def test_references_may_have_another_timestep():
    inputs = families.inputs(NAME, "references", batch=2)
    plain = predicted(inputs)
    assert torch.allclose(predicted({**inputs, "reference_timestep": inputs[TIMESTEP]}), plain, atol=1e-5)
    at_zero = predicted({**inputs, "reference_timestep": torch.zeros(2)})
    assert (at_zero - plain).abs().max() > 0.01 * plain.abs().max()


@torch.no_grad()
def test_each_token_has_the_modulation_of_its_own_timestep():
    family, inputs = families.family(NAME, "references"), families.inputs(NAME, "references", batch=2)
    state = family.embed({**inputs, "reference_timestep": torch.zeros(2)})
    latent, references = 5 * 7, inputs["reference"].shape[1]
    assert state.tables["image"]["is_reference"].tolist() == [[False] * latent + [True] * references]
    assert torch.equal(
        state.context["reference_modulation"],
        family.embed({**inputs, TIMESTEP: torch.zeros(2)}).context["modulation"],
    )


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"reference_timestep": (2,)}, r"reference_timestep of shape \[2\] beside 0 tokens of references"),
        ({"reference": (2, 12, 64), "reference_ids": (2, 12, 3), "reference_timestep": (2, 1)}, r"\[batch\] beside"),
        ({"reference": (2, 12, 60), "reference_ids": (2, 12, 3)}, r"takes \[batch, tokens, 64\]"),
        ({LATENT: (2, 16, 3, 9, 13)}, r"a latent of 3 frames: .* 1 frame would work"),
        ({"encoder_hidden_states": (2, 7, 4, 40)}, r"\[2, 7, 4, 40\] .* takes 3 layers .* \[batch, tokens, 3, 40\]"),
        ({"encoder_hidden_states": (2, 7, 120)}, r"\[2, 7, 120\] does not fit this model"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(shapes, message):
    given = {name: tuple(value.shape) for name, value in families.inputs(NAME, "image", batch=2).items()}
    with pytest.raises(InvalidRequest, match=message):
        Krea2.extent(families.module(NAME, "image").config, {**given, **shapes})
