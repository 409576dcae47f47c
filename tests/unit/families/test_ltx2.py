"""LTX-2's files in the published names, its metadata, and inputs that ComfyUI has and diffusers' class has not."""

import json
import math
from functools import partial
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file

from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.errors import InvalidRequest
from parallel_backend.families.architecture import substituted
from parallel_backend.families.ltx2 import guides
from parallel_backend.families.ltx2.transformer import LTX2
from parallel_backend.interfaces.geometry import AUDIO, IMAGE, SOUND
from parallel_backend.interfaces.state import BIASES
from parallel_backend.loading.weight_source import WeightSource
from tests.support import families

NAME = "LTX2VideoTransformer3DModel"
NAMES = (
    (r"^proj_in", "patchify_proj"), (r"^audio_proj_in", "audio_patchify_proj"), (r"^time_embed", "adaln_single"),
    (r"^audio_time_embed", "audio_adaln_single"), (r"^prompt_adaln", "prompt_adaln_single"),
    (r"^audio_prompt_adaln", "audio_prompt_adaln_single"),
    (r"^av_cross_attn_video_scale_shift", "av_ca_video_scale_shift_adaln_single"),
    (r"^av_cross_attn_audio_scale_shift", "av_ca_audio_scale_shift_adaln_single"),
    (r"^av_cross_attn_video_a2v_gate", "av_ca_a2v_gate_adaln_single"),
    (r"^av_cross_attn_audio_v2a_gate", "av_ca_v2a_gate_adaln_single"),
    (r"video_a2v_cross_attn_scale_shift_table", "scale_shift_table_a2v_ca_video"),
    (r"audio_a2v_cross_attn_scale_shift_table", "scale_shift_table_a2v_ca_audio"),
    (r"\.norm_([qk])\.", r".\1_norm."),
)  # fmt: skip
"""Regular expressions that turn diffusers' names into the published ones, which ComfyUI's class has."""
SAID = {
    "rope_type": "split", "frequencies_precision": "float64", "causal_temporal_positioning": True,
    "use_middle_indices_grid": True, "av_ca_timestep_scale_multiplier": 1000.0, "timestep_scale_multiplier": 1000.0,
}  # fmt: skip
KINDS = ("2", "2.3 keyframes", "2.5")


def save(path, name, **said):
    """Save a whole checkpoint of a variant, with text connectors and parts that are no part of the transformer."""
    tensors = families.module(NAME, name).state_dict()
    start = "model.diffusion_model."
    weights = {start + substituted(key, NAMES): tensor.clone().contiguous() for key, tensor in tensors.items()}
    for kind in ("video", "audio"):
        weights[f"{start}{kind}_embeddings_connector.learnable_registers"] = torch.ones(4, 2)
    if "2.3" in name:  # its one layer belongs before the connectors
        weights[f"{start}caption_projection.linear_1.weight"] = torch.ones(2, 2)
    weights |= {"audio_vae.decoder.conv_in.conv.weight": torch.ones(2, 2), "vocoder.conv_pre.bias": torch.ones(2)}
    save_file(weights, path, {"config": json.dumps({"transformer": SAID | said})})
    return open_checkpoint(path)


@pytest.mark.parametrize("name", KINDS)
def test_a_published_file_says_the_config_and_holds_every_weight(name, tmp_path):
    file = save(tmp_path / "ltx2.safetensors", name)
    assert file.components["transformer"] == NAME
    assert file.stored("transformer").native
    assert file.left_over("transformer") == frozenset()
    found, module = file.config("transformer"), families.module(NAME, name)
    assert {key: module.config[key] for key in found} == found
    source = WeightSource(file.stored("transformer"), NAME)
    for key, tensor in module.state_dict().items():
        into = torch.empty_like(tensor)
        source.read(key, 0, None, None, into=into)
        assert torch.equal(into, tensor), key


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("causal_temporal_positioning", False), ("use_middle_indices_grid", False), ("rope_type", "none"),
        ("positional_embedding_theta", 100.0), ("cross_attention_adaln", True), ("apply_gated_attention", True),
        ("caption_proj_before_connector", True), ("ff_bias", False), ("image_model", "ltxv"),
    ],
)  # fmt: skip
def test_metadata_with_other_settings_is_refused(name, value, tmp_path):
    with pytest.raises(InvalidRequest, match=rf"with {name} {value!r}, which is not supported"):
        save(tmp_path / "ltx2.safetensors", "2", **{name: value})


def predicted(name, **changed):
    """Return the prediction of a variant's first inputs, some of them changed."""
    family = families.family(NAME, name)
    inputs = families.inputs(NAME, name, batch=2) | changed
    with torch.inference_mode():
        tokens = family.head(family.run(family.embed(inputs)))
        return family.prediction(tokens, families.sizes(family, inputs))


def difference(one, other):
    return float((one - other).abs().max() / other.abs().max())


def test_equal_weights_of_gates_change_nothing_and_others_do():
    name = "2"
    plain = predicted(name)
    assert difference(predicted(name, gate_weights=torch.ones(2, 2)), plain) < 1e-6
    for i in range(2):
        halved = torch.ones(2, 2)
        halved[:, i] = 0.5
        assert difference(predicted(name, gate_weights=halved), plain) > 1e-3


def test_the_sound_attends_to_what_the_picture_has_heard_only_if_it_should():
    plain, name = predicted("2"), "2"
    assert torch.equal(predicted(name, heard_share=torch.zeros(2)), plain)
    both = predicted(name, heard_share=torch.tensor([0.0, 1.0]))
    assert difference(both[:1], plain[:1]) < 1e-6
    assert difference(both[1:], plain[1:]) > 1e-3
    assert torch.equal(predicted(name), plain), "a call leaves nothing behind"


def test_a_reference_is_heard_and_not_predicted():
    generator = torch.Generator().manual_seed(1)
    tokens, seconds = torch.randn(2, 6, 20, generator=generator), -torch.rand(2, 6, 2, generator=generator)
    name, plain = "2", predicted("2")
    heard = predicted(name, reference_sound=tokens, reference_seconds=seconds)
    assert heard.shape == plain.shape
    assert difference(heard, plain) > 1e-3
    family, inputs = families.family(NAME, name), families.inputs(NAME, name, batch=2)
    state = family.embed(inputs | {"reference_sound": tokens, "reference_seconds": seconds})
    assert state.streams[AUDIO].shape[1] == 17
    assert not state.tables[AUDIO]["timestep"][:, 11:].any(), "a reference is clean"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"audio_num_attention_heads": 16}, "audio_num_attention_heads 16 is not supported: 32"),
        ({"patch_size": 2}, "patch_size 2 is not supported: 1 would work"),
        ({"audio_out_channels": 64}, "audio_out_channels 64"),
        ({"audio_cross_attention_dim": 64}, "audio_cross_attention_dim 64"),
    ],
)
def test_models_that_the_adapter_does_not_know_are_refused(config, message):
    with pytest.raises(InvalidRequest, match=message):
        LTX2.describe(LTX2.variants()["2"].config | config)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({SOUND: (2, 5, 11, 3)}, r"takes \[batch, channels, tokens, bins\] with 20 channels times bins"),
        ({"token_weights": (2, 4)}, "the latent has 105 tokens"),
        ({"audio_token_weights": (2, 4)}, "the sound has 11 tokens"),
        ({"guide_weights": (2, 4)}, "the latent has 105 tokens"),
        ({"kept_mask": (2, 4)}, "the latent has 105 tokens"),
        ({"attending_layers": (2, 3)}, "the model has 2 layers"),
        ({"across_shares": (2, 1)}, "one number for the picture and one for the sound"),
        ({"reference_sound": (2, 6, 20)}, "need each other"),
        ({"reference_sound": (2,), "reference_seconds": (2, 0, 2)}, r"reference_sound of shape \[2\] does not fit"),
        ({"encoder_hidden_states": (2, 7, 30)}, r"gives \[batch, tokens, 24\]"),
        ({"audio_encoder_hidden_states": (2, 6, 24)}, "text has 7 tokens and the sound's 6"),
    ],
)
def test_inputs_of_other_shapes_are_refused(changed, message):
    shapes = {name: tuple(tensor.shape) for name, tensor in families.inputs(NAME, "2", batch=2).items()}
    with pytest.raises(InvalidRequest, match=message):
        LTX2.extent(LTX2.variants()["2"].config, shapes | changed)


def test_the_sound_is_whole_and_both_are_predicted():
    shapes = {name: tuple(tensor.shape) for name, tensor in families.inputs(NAME, "2", batch=2).items()}
    extent = LTX2.extent(LTX2.variants()["2"].config, shapes)
    assert (extent.whole, extent.predicted) == (frozenset({AUDIO}), (IMAGE, AUDIO))


def stock(name, inputs, **options):
    """Return diffusers' own prediction, with its options for the guidance of a call."""
    family = families.family(NAME, name)
    with patch.object(family.module, "forward", partial(family.module.forward, **options)), torch.inference_mode():
        return family.stock(inputs)


def test_layers_that_pass_on_their_values_equal_diffusers():
    name, batch = "2.3 keyframes", 2
    inputs = families.inputs(NAME, name, batch=batch)
    wanted = stock(name, inputs, spatio_temporal_guidance_blocks=[1], perturbation_mask=torch.tensor([0.0, 1.0]))
    ours = predicted(name, attending_layers=torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    assert difference(ours, wanted) < 1e-5
    assert difference(predicted(name)[:1], wanted[:1]) > 1e-2


def test_streams_that_hear_and_see_nothing_of_each_other_equal_diffusers():
    name = "2.3 keyframes"
    inputs = families.inputs(NAME, name, batch=2)
    wanted = stock(name, inputs, isolate_modalities=True)
    assert difference(predicted(name, across_shares=torch.zeros(2, 2)), wanted) < 1e-5
    both, plain = predicted(name, across_shares=torch.ones(2, 2)), predicted(name)
    assert difference(both, plain) < 1e-6
    for i in range(2):
        shares = torch.ones(2, 2)
        shares[:, i] = 0.0
        one = predicted(name, across_shares=shares)
        assert difference(one, plain) > 1e-3
        assert difference(one, wanted) > 1e-3
    later = predicted(name, across_shares=torch.zeros(2, 2), heard_share=torch.ones(2))
    assert difference(later, wanted) < 1e-5, "the sound sees nothing, whatever the picture has heard"


def test_gaps_are_not_predicted():
    name = "2.3 keyframes"
    kept = torch.ones(2, 105, dtype=torch.bool)
    kept[:, 90:] = False
    flat, plain = (predicted(name, **each).flatten(1) for each in ({"kept_mask": kept}, {}))
    picture, before = (each[:, : 20 * 105].unflatten(1, (20, 105)) for each in (flat, plain))
    assert not picture[:, :, 90:].any()
    assert before[:, :, 90:].all()
    assert torch.equal(flat[:, 20 * 105 :], plain[:, 20 * 105 :])


def test_strengths_bias_the_pairs_of_a_guide_and_of_others():
    tables = guides.biases(torch.tensor([[-1.0, 0.5, 0.0, 2.0, -1.0]]))
    queries, keys = (tables[name] for name in BIASES)
    half, none, double = math.log(0.5), -1e4, math.log(2.0)
    own, rows = [0.0, half, none, double, 0.0], []
    for value in (None, half, none, double, None):
        rows.append(own if value is None else [value, 0.0, 0.0, 0.0, value])
    torch.testing.assert_close(queries @ keys.mT, torch.tensor([rows]))
