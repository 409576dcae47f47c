"""Open-Sora 2.0 beyond its forward: names, rotation, given frames, guidance, times and prompts."""

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor, FluxPosEmbed

from parallel_backend.checkpoint.architectures import recognise
from parallel_backend.errors import InvalidRequest
from parallel_backend.families.open_sora2.files import ARCHITECTURE
from parallel_backend.families.open_sora2.given_frames import are_images, given_frames, put_back
from parallel_backend.families.open_sora2.guidance import Guidance
from parallel_backend.families.open_sora2.module import HalfSplitAttnProcessor, HalfSplitPosEmbed
from parallel_backend.families.open_sora2.prompt import with_frame_rate, with_motion_score
from parallel_backend.families.open_sora2.times import shift, times
from parallel_backend.families.open_sora2.transformer import OpenSora2
from parallel_backend.families.registry import architectures
from tests.support import families, open_sora2

NAME = ARCHITECTURE.class_name


@pytest.mark.parametrize("names", [dict, open_sora2.fused], ids=["separate", "fused"])
def test_the_authors_names_are_converted(names):
    ours = families.weights(NAME)
    converted = ARCHITECTURE.to_diffusers(names(open_sora2.authors_weights(ours)))
    assert converted.keys() == ours.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in ours.items())


@pytest.mark.parametrize("names", [dict, open_sora2.fused], ids=["separate", "fused"])
def test_the_authors_names_are_recognised_before_flux(names):
    theirs = names(open_sora2.authors_weights(families.weights(NAME)))
    found = recognise({name: tuple(tensor.shape) for name, tensor in theirs.items()}, {}, architectures())
    config = families.module(NAME, "t2v").config
    assert (found.class_name, found.native, found.left_over) == (NAME, True, frozenset())
    wanted = {**config, "axes_dims_rope": list(config["axes_dims_rope"])}
    different = {key for key, value in found.config.items() if value != wanted[key]}
    assert different == {"out_channels"}  # which is in_channels if None
    assert found.config["out_channels"] == config["in_channels"]


def _shapes():
    return {name: tuple(t.shape) for name, t in open_sora2.authors_weights(families.weights(NAME)).items()}


@pytest.mark.parametrize(("head_dim", "axes"), [(16, [4, 6, 6]), (24, [4, 10, 10]), (128, [16, 56, 56])])
def test_the_axes_follow_from_the_width_of_a_head(head_dim, axes):
    found = recognise(_shapes() | _norms(head_dim), {}, architectures())
    assert found.config["axes_dims_rope"] == axes


def test_an_odd_width_of_a_head_is_refused():
    with pytest.raises(InvalidRequest, match="with 15 features a head, and an even number"):
        recognise(_shapes() | _norms(15), {}, architectures())


def _norms(head_dim):
    return {name: (head_dim,) for name in _shapes() if name.endswith("_norm.scale")}


def test_the_model_for_the_other_vae_is_refused():
    with pytest.raises(InvalidRequest, match=r"^Open-Sora 2\.0 for the video DC-AE .* \(cond_in takes 65"):
        recognise(_shapes() | {"cond_in.weight": (384, 65)}, {}, architectures())


def test_a_distilled_model_is_refused():
    with pytest.raises(InvalidRequest, match="guidance_embeds is not supported"):
        OpenSora2.describe({"guidance_embeds": True})


@torch.no_grad()
def test_the_rotation_pairs_the_halves_of_a_head():
    """Interleaved rotation of reordered queries and keys gives the same attention."""
    torch.manual_seed(0)
    halves = FluxAttention(96, heads=4, dim_head=24, out_dim=96, bias=True, pre_only=True)
    for parameter in halves.parameters():
        parameter.normal_(std=0.3)
    order = torch.arange(24).unflatten(0, (2, 12)).T.flatten()  # entry 2p is p, entry 2p + 1 is p + 12
    pairs = FluxAttention(96, heads=4, dim_head=24, out_dim=96, bias=True, pre_only=True)
    weights = halves.state_dict()
    for name, tensor in weights.items():
        if "norm" in name:
            weights[name] = tensor[order]
        elif "to_v" not in name:
            weights[name] = tensor.unflatten(0, (4, 24))[:, order].flatten(0, 1)
    pairs.load_state_dict(weights)
    tokens, ids = torch.randn(2, 11, 96), torch.randint(0, 9, (11, 3)).float()
    results = []
    for attention, processor, embed in (
        (halves, HalfSplitAttnProcessor, HalfSplitPosEmbed), (pairs, FluxAttnProcessor, FluxPosEmbed)
    ):  # fmt: skip
        attention.set_processor(processor())
        results.append(attention(tokens, image_rotary_emb=embed(theta=10000, axes_dim=(4, 10, 10))(ids)))
    assert (results[0] - results[1]).abs().max() < 1e-5 * results[0].abs().max()
    still = halves(tokens, image_rotary_emb=HalfSplitPosEmbed(theta=10000, axes_dim=(4, 10, 10))(ids * 0))
    assert (still - results[0]).abs().max() > 0.01 * results[0].abs().max()


@torch.no_grad()
def test_no_given_frame_equals_zeros_and_each_part_counts():
    family, inputs = families.family(NAME, "i2v"), families.inputs(NAME, "i2v", batch=1)
    concat = inputs.pop("concat")
    none = family.stock(inputs)
    assert torch.equal(family.stock(inputs | {"concat": torch.zeros_like(concat)}), none)
    for part in (slice(0, 1), slice(1, None)):
        some = torch.zeros_like(concat)
        some[:, part] = concat[:, part]
        assert (family.stock(inputs | {"concat": some}) - none).abs().max() > 0.01


@torch.no_grad()
def test_every_axis_of_positions_counts():
    family, inputs = families.family(NAME, "t2v"), families.inputs(NAME, "t2v", batch=1, size=(4, 8, 12))
    plain = family.stock(inputs)
    for dim in (2, 3, 4):
        flipped = family.stock(inputs | {"hidden_states": inputs["hidden_states"].flip(dim)}).flip(dim)
        assert (flipped - plain).abs().max() > 1e-3


@pytest.mark.parametrize("shape", [(1, 16, 3, 9, 13), (1, 17, 2, 9, 13)])
def test_given_frames_of_another_size_are_refused(shape):
    shapes = {"hidden_states": (1, 16, 3, 9, 13), "encoder_hidden_states": (1, 7, 64), "pooled_projections": (1, 32)}
    config = families.module(NAME, "t2v").config
    with pytest.raises(InvalidRequest, match=r"given frames of shape .* \[batch, 17, 3, 9, 13\] would work"):
        OpenSora2.extent(config, shapes | {"concat": shape})


def test_frames_are_placed_and_put_back():
    start, end = torch.full((1, 2, 1, 3, 4), 5.0), torch.full((1, 2, 2, 3, 4), 7.0)
    frames = given_frames(start, end, (5, 3, 4), 2)
    assert frames.given[0, 0, :, 0, 0].tolist() == [1, 0, 0, 1, 1]
    assert frames.latent[0, :, :, 1, 1].tolist() == [[5, 0, 0, 7, 7]] * 2
    result = put_back(torch.ones(3, 2, 5, 3, 4), frames)
    assert result[2, 1, :, 2, 3].tolist() == [5, 1, 1, 7, 7]
    with pytest.raises(InvalidRequest, match="take 3 latent frames, and the video has 3: make a longer video"):
        given_frames(start, end, (3, 3, 4), 2)


@pytest.mark.parametrize(
    ("marked", "images"),
    [([1, 0, 0], True), ([0, 0, 1], True), ([1, 0, 1], True), ([1, 1, 0], False), ([0] * 3, False)],
)
def test_images_are_told_from_clips(marked, images):
    assert are_images(torch.tensor(marked).reshape(1, 1, 3, 1, 1).expand(1, 1, 3, 2, 2)) == images


@pytest.mark.parametrize(("frames", "branches"), [(False, 80), (True, 110)])
def test_half_of_the_later_steps_need_one_branch(frames, branches):
    guidance = Guidance(text=7.5, frames=3.0, oscillates=True, ramp=frames)
    scales = [guidance.at(step, 50, 33) for step in range(50)]
    counted = [1 + each.needs_negative + (frames and each.needs_without_frames) for each in scales]
    assert sum(counted) == branches
    steady = Guidance(text=7.5, frames=3.0, oscillates=False, ramp=frames)
    assert all(steady.at(step, 50, 33).text == 7.5 for step in range(50))


def test_the_scale_of_images_falls_over_steps_and_rises_over_frames():
    guidance = Guidance(text=7.5, frames=3.0, oscillates=True, ramp=True)
    first, last = (torch.as_tensor(guidance.at(step, 4, 3).frames).flatten() for step in (0, 3))
    assert first.tolist() == [1.0, 2.0, 3.0]
    assert last.tolist() == [1.0, 1.25, 1.5]
    assert Guidance(text=7.5, frames=1.0, oscillates=True, ramp=True).at(0, 4, 3).frames == 1.0


def test_a_step_is_combined_from_its_branches():
    scales = Guidance(text=5.0, frames=2.0, oscillates=True, ramp=False).at(0, 4, 3)
    combined = scales.combine(*(torch.full((1,), value) for value in (3.0, 2.0, 1.0)))
    assert combined.item() == 1 + 2 * (2 - 1) + 5 * (3 - 2)


def test_the_shift_follows_tokens_and_frames():
    assert shift((1, 32, 32)) == pytest.approx(1.0)
    assert shift((9, 128, 128)) == pytest.approx(9.0)
    assert shift((1, 31, 31)) == pytest.approx(1.0)  # padded to whole patches
    assert times(2, (4, 32, 32)) == pytest.approx([1.0, 2 / 3, 0.0])


@pytest.mark.parametrize(
    ("prompt", "rated"),
    [
        ("a cat.", "a cat. 24 FPS."), ("a cat", "a cat. 24 FPS."), ("rain, 16 FPS.", "rain, 16 FPS."),
        ("16 FPS", "16 FPS."), ("16 FPS. rain", "16 FPS. rain. 24 FPS."), ("what?", "what?. 24 FPS."),
    ],
)  # fmt: skip
def test_a_prompt_says_rate_and_motion(prompt, rated):
    assert with_frame_rate(prompt, 24) == rated
    assert with_motion_score(rated, "4") == f"{rated} 4 motion score."
