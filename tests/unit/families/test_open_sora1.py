"""What is Open-Sora 1.2's alone: its files, positions, times, prompts and given frames."""

import json

import pytest
import torch
from safetensors.torch import save_file

from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.errors import InvalidRequest
from parallel_backend.families.open_sora1.given_frames import Clip, placed
from parallel_backend.families.open_sora1.prompt import cleaned, with_scores
from parallel_backend.families.open_sora1.times import add_noise, generated, latent_frames, shift
from parallel_backend.families.registry import family_of
from parallel_backend.verify import examples
from tests.support import families

NAME = "STDiT3"
PUBLISHED = {"model_type": NAME, "architectures": [NAME], "input_sq_size": 256, "qk_norm_legacy": False}


def write(folder, variant="video", described=None, beside="config.json", **changed):
    weights = dict(families.module(NAME, variant).state_dict())
    weights |= {"rope.freqs": torch.ones(4)} | changed
    save_file({name: each for name, each in weights.items() if each is not None}, folder / "model.safetensors")
    if described is not None:
        (folder / beside).write_text(json.dumps(described))
    return folder / "model.safetensors"


@pytest.mark.parametrize("variant", family_of(NAME).variants())
def test_the_config_follows_from_names_and_shapes(tmp_path, variant):
    checkpoint = open_checkpoint(write(tmp_path, variant))
    assert checkpoint.components == {"transformer": NAME}
    wanted = dict(families.module(NAME, variant).config)
    found = checkpoint.config("transformer")
    assert {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()} == {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in wanted.items() if not name.startswith("_")
    }  # fmt: skip


@pytest.mark.parametrize("beside", ["config.json", "model.json"])
def test_a_config_beside_the_file_says_what_shapes_do_not(tmp_path, beside):
    path = write(tmp_path, "without norms", PUBLISHED | {"num_heads": 8}, beside)
    checkpoint = open_checkpoint(path)
    config, stamp, content = checkpoint.config("transformer"), checkpoint.stamp(), checkpoint.content()
    assert (config["input_sq_size"], config["num_heads"], config["depth"]) == (256, 8, 2)
    (tmp_path / beside).write_text(json.dumps(PUBLISHED | {"num_heads": 4}))
    changed = open_checkpoint(path)
    assert changed.config("transformer")["num_heads"] == 4
    assert changed.stamp() != stamp
    assert changed.content() != content


@pytest.mark.parametrize(
    "described", [{"_class_name": "FluxTransformer2DModel", "input_sq_size": 7}, [1], "text", {"input_sq_size": 7}]
)
def test_a_config_of_another_model_does_not_count(tmp_path, described):
    assert open_checkpoint(write(tmp_path, described=described)).config("transformer")["input_sq_size"] == 512


@pytest.mark.parametrize(
    ("described", "changed", "message"),
    [
        ({"qk_norm_legacy": True}, {}, "config.json beside the file has qk_norm_legacy True"),
        ({"skip_y_embedder": True}, {}, "has skip_y_embedder True"),
        ({}, {"x_embedder.proj.weight": torch.zeros(128, 16, 1, 2, 2)}, "16 channels, as 1.3 has"),
        ({}, {"final_layer.linear.weight": torch.zeros(20, 128)}, "gives 20 values a token: 16 or 32 would fit"),
        ({}, {"spatial_blocks.0.mlp.fc1.weight": None}, "lacks a weight"),
    ],
)
def test_other_versions_are_refused(tmp_path, described, changed, message):
    with pytest.raises(InvalidRequest, match=message):
        open_checkpoint(write(tmp_path, described=PUBLISHED | described, **changed))


def test_a_pickle_is_refused(tmp_path):
    (tmp_path / "OpenSora-v1-HQ-16x512x512.pth").write_bytes(b"")
    with pytest.raises(InvalidRequest, match=r"opening one can run code: choose the model's safetensors file"):
        open_checkpoint(tmp_path / "OpenSora-v1-HQ-16x512x512.pth")


@torch.no_grad()
def test_height_and_width_in_pixels_count():
    family, inputs = families.family(NAME, "video"), families.inputs(NAME, "video", batch=2)
    sized = inputs | {"resolution": torch.tensor([[72.0, 104.0]] * 2)}
    results = [family.stock(each) for each in (inputs, sized, inputs | {"resolution": sized["resolution"] + 4})]
    assert torch.equal(results[0], results[1])
    assert (results[2] - results[0]).abs().max() > 1e-3


@torch.no_grad()
def test_padding_of_a_text_does_not_count():
    family, inputs = families.family(NAME, "video"), families.inputs(NAME, "video", batch=1)
    inputs["encoder_hidden_states_mask"] = torch.tensor([[True] * 4 + [False] * 3])
    reference = family.stock(inputs)
    short = inputs | {"encoder_hidden_states": inputs["encoder_hidden_states"][:, :4]}
    del short["encoder_hidden_states_mask"]
    torch.testing.assert_close(family.stock(short), reference, atol=1e-5, rtol=1e-5)
    other = inputs["encoder_hidden_states"].clone()
    other[:, 4:] += 10.0
    assert torch.equal(family.stock(inputs | {"encoder_hidden_states": other}), reference)


@torch.no_grad()
def test_rotary_frequencies_and_positions_stay_in_float32(tmp_path):
    module = families.module(NAME, "video")
    half = type(module)(**module.config).bfloat16()
    assert half.embed_time(torch.tensor([999.0]), torch.tensor([24.0]), 1, None).embedded.dtype == torch.bfloat16
    checkpoint = open_checkpoint(write(tmp_path))
    from parallel_backend.loading import partial

    loaded = partial.empty(type(module), checkpoint.config("transformer"), torch.bfloat16)
    frequencies = loaded.get_buffer("rope.freqs")
    assert frequencies.dtype == torch.float32
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(frequencies, module.rope.freqs)


@torch.no_grad()
def test_all_frames_generated_is_no_mask():
    family, inputs = families.family(NAME, "video"), families.inputs(NAME, "video", batch=2)
    all_frames = inputs | {"generated": torch.ones(2, 3)}
    assert torch.equal(family.stock(all_frames), family.stock(inputs))
    assert not torch.equal(
        family.stock(inputs | {"generated": torch.tensor([[0.0, 1.0, 1.0]] * 2)}), family.stock(inputs)
    )


def test_a_long_prompt_is_refused():
    shapes = {"hidden_states": (1, 4, 1, 4, 4), "timestep": (1,), "encoder_hidden_states": (1, 301, 4096)}
    with pytest.raises(InvalidRequest, match="a prompt of 301 tokens is too long: Open-Sora takes at most 300"):
        family_of(NAME).extent({}, shapes)


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ((512, 512, 1), 1.0),
        ((512, 512, 17), 5**0.5),
        ((512, 512, 33), 5**0.5),
        ((512, 512, 34), 10**0.5),
        ((256, 1024, 51), 15**0.5),
        ((256, 256, 51), 15**0.5 / 2),
        ((512, 512, 2), 1.0),
        ((512, 512, 16), 2.0),
    ],
)
def test_the_shift_follows_the_size(size, wanted):
    assert shift(*size) == pytest.approx(wanted)


def test_latent_frames():
    assert [latent_frames(count) for count in (1, 4, 5, 16, 17, 18, 34, 51, 102, 408)] == [
        1, 1, 2, 4, 5, 6, 10, 15, 30, 120
    ]  # fmt: skip


def test_a_frame_is_generated_from_its_part_of_the_times_on():
    values = torch.tensor([[1.0, 0.0, 0.5]])
    wanted = {
        1004.0: [True, False, False],
        501.0: [True, False, False],
        500.0: [True, False, True],
        1.0: [True, False, True],
    }
    for time, frames in wanted.items():
        assert generated(values, torch.tensor([time])).tolist() == [frames]


def test_noise_belongs_to_the_timestep():
    latent, noise = torch.randn(2, 4, 3, 2, 2), torch.randn(2, 4, 3, 2, 2)
    got = add_noise(latent, noise, torch.tensor([250.0, 1000.0]))
    torch.testing.assert_close(got[0], 0.75 * latent[0] + 0.25 * noise[0])
    torch.testing.assert_close(got[1], noise[1])


def clip(frames, edit=0.0, seed=0):
    return Clip(latent=torch.full((1, 4, frames, 2, 3), 1.0 + seed), edit=edit)


def test_clips_lie_at_both_ends():
    latent, mask = placed(clip(2, 0.25), clip(1, seed=1), (5, 2, 3), 4)
    assert latent[0, 0, :, 0, 0].tolist() == [1, 1, 0, 0, 2]
    assert mask.flatten().tolist() == [0.25, 0.25, 1, 1, 0]
    latent, mask = placed(None, None, (5, 2, 3), 4)
    assert (float(latent.abs().max()), float(mask.min())) == (0.0, 1.0)


def test_clips_have_to_leave_something_to_make():
    placed(clip(5, 0.5), None, (5, 2, 3), 4)
    with pytest.raises(InvalidRequest, match="take 5 latent frames, and the video has 5: make a longer video"):
        placed(clip(3), clip(2), (5, 2, 3), 4)
    with pytest.raises(InvalidRequest, match="take 6 latent frames, and the video has only 5"):
        placed(clip(6, 0.5), None, (5, 2, 3), 4)


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("A <b>bold</b>  Fox", "a bold fox"),
        ("a fox&#39;s den &amp; more", "a fox's den more"),
        ("a fox, 1200x800, by @someone", "a fox, , by"),
        ("a\\nfox", "a fox"),
        ("a ... fox", "a fox"),
        ("<script>run()</script>a fox", "a fox"),
        ("\uff41 \ufb01ne fox", "a fine fox"),
        ("fox #12 jc6640", "fox"),
        ("2+2 and 100%25", "2 2 and 100%"),
        ("", ""),
    ],
)
def test_a_prompt_is_cleaned(prompt, wanted):
    assert cleaned(prompt) == wanted


def test_a_score_that_a_prompt_has_stays():
    prompt = "a cat. aesthetic score: 5.0."
    assert with_scores(prompt, aesthetic=6.5, motion=2, camera="") == f"{prompt} motion score: 2.0."
    assert with_scores(prompt, aesthetic=None, motion=None, camera="static") == f"{prompt} camera motion: static."


def test_examples_have_two_texts_of_different_lengths():
    mask = examples.inputs(NAME, "video", batch=2)["encoder_hidden_states_mask"]
    assert len(set(mask.sum(1).tolist())) == 2
