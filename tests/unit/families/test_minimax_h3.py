"""MiniMax-H3: files whole and pruned, times of rows, given rows, masks, and the sound that a sampler carries."""

import json

import pytest
import torch
from safetensors.torch import save_file

from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.errors import InvalidRequest
from parallel_backend.families.architecture import substituted
from parallel_backend.families.minimax_h3 import times
from parallel_backend.families.minimax_h3.transformer import MiniMaxH3
from parallel_backend.families.modules import module_class_of
from parallel_backend.interfaces.geometry import IMAGE, LATENT, SOUND, TEXT, TIMESTEP
from parallel_backend.loading import partial
from parallel_backend.loading.weight_source import WeightSource
from parallel_backend.protocol.packing import pack, unpack
from tests.support import families

NAME = "MiniMaxH3Transformer3DModel"
NAMES = (
    (r"^token_refiner\.refiner_blocks", "token_refiner.blocks"), (r"^transformer_blocks", "blocks"),
    (r"^proj_in", "video_patch_proj"), (r"^audio_proj_in", "audio_patch_proj"),
    (r"^context_embedder", "condition_proj"), (r"^time_embedder\.table", "adaln_t_table"),
    (r"^time_embedder\.linear_1", "time_embedder.proj_in"), (r"^time_embedder\.linear_2", "time_embedder.proj_out"),
    (r"^proj_out", "final_layer.video_out"), (r"^audio_proj_out", "final_layer.audio_out"),
    (r"^norm_out\.norm", "final_layer.norm"), (r"^norm_out\.(linear|curve)", "final_layer.adaln_proj.linear"),
    (r"adaln_proj\.curve", "adaln_proj.linear"), (r"\.norm_([qk])\.", r".\1_norm."), (r"\.to_out\.0\.", ".out_proj."),
    (r"\.ff\.net\.0\.proj", ".mlp.fc1"), (r"\.ff\.net\.2", ".mlp.fc2"),
)  # fmt: skip
"""Regular expressions that turn diffusers' names into the published ones."""
KINDS = ("t2v", "pruned")
SIGMA = 0.625


def published(tensors):
    """Return a model's weights as the published files have them."""
    named = {"rope.inv_freq": torch.ones(1)}
    for name, tensor in tensors.items():
        if name.endswith(".to_q.weight"):
            parts = [tensors[name.replace("to_q", f"to_{kind}")] for kind in "qkv"]
            named[substituted(name, NAMES).replace("to_q", "qkv_proj")] = torch.cat(parts)
        elif name.endswith(".ff.net.0.proj.weight"):
            named[substituted(name, NAMES)] = torch.cat(tensor.chunk(2)[::-1])
        elif ".to_k." not in name and ".to_v." not in name:
            named[substituted(name, NAMES)] = tensor
    return named


def at(inputs, sigma=SIGMA):
    return {**inputs, TIMESTEP: torch.full((len(inputs[LATENT]),), 1000 * sigma)}


def inputs_of(kind="t2v", batch=1, **changes):
    return {**at(families.inputs(NAME, kind, batch=batch)), **changes}


@torch.no_grad()
def predicted(inputs, family=None):
    """Return the predictions of picture and sound."""
    family = family or families.family(NAME, "t2v")
    state = families.run(family, family.embed(inputs))
    packed = family.prediction(family.head(state), families.sizes(family, inputs))
    return unpack(packed, [inputs[name].shape[1:] for name in family.latents])


def differs(one, other):
    """Whether results differ by far more than rounding would explain."""
    return (one - other).abs().max() > 1e-3 * other.abs().max()


@pytest.mark.parametrize("number", [0, 1], ids=KINDS)
def test_a_published_file_says_the_config_and_holds_every_weight(number, tmp_path):
    tensors = families.weights(NAME, number)
    save_file(published(tensors), tmp_path / "h3.safetensors")
    file = open_checkpoint(tmp_path / "h3.safetensors")
    assert file.components == {"transformer": NAME}
    assert file.stored("transformer").native
    assert file.left_over("transformer") == frozenset()
    described = families.module(NAME, KINDS[number]).config
    found = file.config("transformer")
    assert found == {name: list(described[name]) if name == "patch_size" else described[name] for name in found}
    assert found.get("adaln_curve_grid") == described["adaln_curve_grid"]
    source = WeightSource(file.stored("transformer"), NAME)
    source.check({name: tuple(tensor.shape) for name, tensor in tensors.items()}, counted=True)
    for name, tensor in tensors.items():
        read = torch.empty_like(tensor)
        source.read(name, 0, None, None, into=read)
        assert torch.equal(read, tensor), name


def test_a_file_says_that_it_has_weights_for_sparse_attention(tmp_path):
    gates = {f"blocks.{i}.attn.to_gate_compress.weight": torch.zeros(448, 96) for i in range(2)}
    save_file(published(families.weights(NAME)) | gates, tmp_path / "fast.safetensors")
    assert open_checkpoint(tmp_path / "fast.safetensors").config("transformer")["_sparse"] is True
    save_file(published(families.weights(NAME)), tmp_path / "plain.safetensors")
    assert "_sparse" not in open_checkpoint(tmp_path / "plain.safetensors").config("transformer")


@pytest.mark.parametrize(
    ("setting", "message"), [({"hidden_size": 97}, "hidden_size 97"), ({"patch_size": [1, 4, 4]}, r"patch_size \[1")]
)
def test_metadata_of_another_model_is_refused(setting, message, tmp_path):
    save_file(
        published(families.weights(NAME)), tmp_path / "h3.safetensors", {"config": json.dumps({"transformer": setting})}
    )
    with pytest.raises(InvalidRequest, match=message):
        open_checkpoint(tmp_path / "h3.safetensors").config("transformer")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_published_in_float32_stay_so(kind):
    module = partial.empty(module_class_of(NAME), families.module(NAME, kind).config, torch.bfloat16)
    kept = {name for name, tensor in module.state_dict().items() if tensor.dtype == torch.float32}
    layers = {"proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out"}
    curves = {name for name in module.state_dict() if "curve" in name}
    assert kept == {name for name in module.state_dict() if name.split(".")[0] in layers} | curves
    assert bool(curves) == (kind == "pruned")


def pruned_twin():
    """Return a pruned model with the same function as a whole one at the times of its table."""
    whole = families.module(NAME, "t2v")
    config = {**whole.config, "adaln_curve_grid": 1025}
    grid = torch.linspace(0.0, 1.0, 1025)
    curve = torch.nn.functional.silu(whole.time_embedder(whole.time_proj(grid)))
    basis = torch.linalg.svd(curve, full_matrices=False)[2]
    config["time_embed_dim"] = len(basis)
    weights = {name: tensor for name, tensor in whole.state_dict().items() if not name.startswith("time_embedder")}
    for name in [name for name in weights if "adaln_proj" in name or "norm_out.linear" in name]:
        tensor = weights.pop(name)
        weights[name.replace(".linear.", ".curve.")] = tensor @ basis.T if tensor.ndim == 2 else tensor
    twin = module_class_of(NAME)(**config).eval().requires_grad_(False)
    twin.load_state_dict({**weights, "time_embedder.table": curve @ basis.T})
    return MiniMaxH3(twin)


@torch.no_grad()
def test_a_pruned_model_equals_the_whole_one():
    whole, pruned = families.family(NAME, "t2v"), pruned_twin()
    for sigma in (1.0, 0.75, 0.625, 0.25, 0.0):
        inputs = at(inputs_of("references"), sigma)
        for ours, wanted in zip(predicted(inputs, pruned), predicted(inputs, whole), strict=True):
            assert (ours - wanted).abs().max() < 1e-4 * wanted.abs().max()
    early, late = (predicted(at(inputs_of(), sigma), pruned)[0] for sigma in (1.0, 0.25))
    assert differs(early, late)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["references", "masked"])
def test_every_row_has_its_own_time(kind):
    """diffusers' forward gets the same times, and a schedule of the sound that differs from the picture's."""
    inputs = inputs_of(kind, batch=2, sigma_shifts=torch.tensor([[9.0, 2.0]] * 2))
    inputs[TIMESTEP] = torch.tensor([900.0, 300.0])
    if kind == "masked":
        inputs["mask_levels"] = torch.linspace(0.0, 1.0, 10).repeat(2, 1)
        inputs["sound_mask_levels"] = torch.linspace(1.0, 0.1, 10).repeat(2, 1)
    family = families.family(NAME, kind)
    state = families.run(family, family.embed(inputs))
    got, wanted = family.prediction(family.head(state), families.sizes(family, inputs)), family.stock(inputs)
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_times_are_comfyuis():
    """Shifts 12 and 3: sigma 0.625 of the picture is base 0.12195, which is 0.29412 of the sound."""
    inputs = inputs_of("masked", mask_levels=torch.tensor([[0.0, 0.5, 1.0]]), sound_mask_levels=torch.tensor([[0.5]]))
    sound = 3 * (SIGMA / (12 - 11 * SIGMA)) / (1 + 2 * (SIGMA / (12 - 11 * SIGMA)))
    wanted = [1 - SIGMA, 1 - sound, 0.999, 1.0, 0.999, 1 - 0.5 * SIGMA, 1 - SIGMA, 1 - 0.5 * sound]
    assert torch.allclose(times.times(inputs), torch.tensor([wanted]), atol=1e-6)
    late = times.times(at(inputs, 0.0))
    assert torch.allclose(late, torch.ones(1, 8), atol=1e-5)
    given = times.times(inputs | {"conditioning_times": torch.tensor([[0.2, 0.95]])})
    assert torch.allclose(given[0, 2:4], torch.tensor([1 - SIGMA, 0.95]))


def test_rows_are_modulated_as_what_they_are():
    labels = torch.ones(1, 7, dtype=torch.int64)
    labels[:, 2:4] = 0
    inputs = inputs_of("references", text_labels=labels)
    tables = families.family(NAME, "references").embed(inputs).tables
    assert tables[TEXT]["modulation"].tolist() == labels.tolist()
    assert tables[IMAGE]["modulation"].tolist() == [[0] * 60 + [3 + 2] * 14 + [6] * 12 + [9 + 2] * 6]
    for ours, plain in zip(predicted(inputs), predicted(inputs_of("references")), strict=True):
        assert differs(ours, plain)


@pytest.mark.parametrize("missing", ["video_rows", "sound_rows"])
def test_given_rows_change_picture_and_sound(missing):
    inputs = inputs_of("references")
    fewer = {name: tensor for name, tensor in inputs.items() if not name.startswith(missing)}
    for ours, plain in zip(predicted(inputs), predicted(fewer), strict=True):
        assert differs(ours, plain)


def test_text_may_be_refined_already():
    family, inputs = families.family(NAME, "t2v"), inputs_of()
    refined = family.embed(inputs).streams[TEXT]
    assert refined.shape[2] == family.config["hidden_size"]
    assert torch.equal(family.embed({**inputs, "encoder_hidden_states": refined}).streams[TEXT], refined)


@pytest.mark.parametrize("batch", [1, 2])
def test_the_sound_that_a_sampler_carries_is_comfyuis(batch):
    """What the outer forward of ComfyUI's class does, with its own formulas."""
    inputs, scale = inputs_of(batch=batch), torch.full((batch,), 4.0)
    sigma = torch.tensor(SIGMA)
    base = sigma / (12.0 + sigma * (1.0 - 12.0))
    sigma_a = 3.0 * base / (1.0 + 2.0 * base)
    own = inputs[SOUND] * (sigma_a / sigma)
    video, sound = predicted({**inputs, SOUND: own})
    family, shapes = families.family(NAME, "t2v"), [inputs[name].shape[1:] for name in (LATENT, SOUND)]
    carried = {**inputs, "sound_scale": scale}
    followed = family.followed(carried, shapes)
    assert followed is not None
    of_out, of_input = followed
    packed = [pack(each)[:, 0] for each in (predicted(carried), [inputs[LATENT], inputs[SOUND]])]
    ours = unpack((of_out * packed[0] + of_input * packed[1])[:, None], shapes)
    assert torch.allclose(ours[0], video, atol=1e-4)
    wanted = (1.0 - 4.0) * own + (1.0 + 3.0 * sigma_a) * sound
    assert (ours[1] - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert differs(ours[1], sound)
    assert family.followed(inputs, shapes) is None


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({SOUND: (1, 32, 1, 7)}, r"sound of shape \[1, 32, 1, 7\] .* takes \[batch, 32, 2, times\]: use Empty MiniMax"),
        ({SOUND: (1, 32, 14)}, r"sound of shape \[1, 32, 14\] does not fit"),
        ({SOUND: (1, 32, 2, 8)}, r"sound_ids of shape \[1, 14, 3\] .* \[batch, 16, 3\] would work"),
        ({"encoder_hidden_states": (1, 7, 41)}, r"takes \[batch, tokens, 40\] from its text encoder, or .* 96\]"),
        ({"video_ids": (1, 61, 3)}, r"video_ids of shape \[1, 61, 3\] .* \[batch, 60, 3\] would work"),
        ({"video_rows": (1, 12, 96)}, "video_rows and video_rows_ids go together, and only one of them is given"),
        ({"video_rows": (1, 12, 95), "video_rows_ids": (1, 12, 3)}, r"video_rows .* \[batch, 12, 96\] would work"),
        ({"sound_rows": (1, 12, 32), "sound_rows_ids": (1, 11, 3)}, r"sound_rows_ids .* \[batch, 12, 3\] would work"),
        ({"video_rows": (1,), "video_rows_ids": (1, 12, 3)}, r"video_rows of shape \[1\] does not fit"),
        ({"mask_labels": (1, 60)}, "mask_levels and mask_labels go together"),
        ({"mask_labels": (1, 60), "mask_levels": (1,)}, r"mask_levels of shape \[1\] does not fit"),
        ({"mask_labels": (1, 59), "mask_levels": (1, 3)}, r"mask_labels .* \[batch, 60\] would work"),
        ({"text_labels": (1, 8)}, r"text_labels .* \[batch, 7\] would work"),
        ({"sigma_shifts": (1, 3)}, r"sigma_shifts .* \[batch, 2\] would work"),
        ({"sound_scale": (1, 1)}, r"sound_scale .* \[batch\] would work"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(shapes, message):
    given = {name: tuple(value.shape) for name, value in inputs_of().items()}
    with pytest.raises(InvalidRequest, match=message):
        MiniMaxH3.extent(families.module(NAME, "t2v").config, {**given, **shapes})
