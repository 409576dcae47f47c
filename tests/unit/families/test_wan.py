"""The Wan adapter's three parts equal diffusers' own forward, and its special inputs."""

import pytest
import torch

from parallel_backend.errors import InvalidRequest
from parallel_backend.families.registry import family_of
from parallel_backend.families.shared.patchify import pad_to_patch
from parallel_backend.families.wan.transformer import Wan
from tests.support import families, tiny


def three_parts(family, inputs):
    state = family.embed(inputs)
    state = family.run(state)
    return family.unpatchify(family.head(state), inputs["hidden_states"].shape[2:])


@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("length", [1, 7, 20])
@pytest.mark.parametrize("patch", [(1, 2, 2), (1, 1, 1), (2, 2, 2)])
@torch.no_grad()
def test_equals_stock_forward(frames, length, patch):
    model = tiny.transformer(tiny.Tiny(patch=patch))
    inputs = {
        "hidden_states": torch.randn(2, 16, frames * patch[0], 6, 4),
        "timestep": torch.tensor([900.0, 31.5]),
        "encoder_hidden_states": torch.randn(2, length, 32),
    }
    wanted = model(**inputs, return_dict=False)[0]
    error = (three_parts(Wan(model), inputs) - wanted).abs().max() / wanted.abs().max()
    assert error <= 1e-5


@torch.no_grad()
def test_bfloat16_equals_stock_forward(tmp_path):
    from diffusers import WanTransformer3DModel

    tiny.write(tmp_path / "model")
    model = WanTransformer3DModel.from_pretrained(
        tmp_path / "model", subfolder="transformer", torch_dtype=torch.bfloat16
    )
    latent, text = torch.randn(1, 16, 2, 4, 4), torch.randn(1, 5, 32)
    got = three_parts(
        Wan(model), {"hidden_states": latent, "timestep": torch.tensor([500.0]), "encoder_hidden_states": text}
    )
    wanted = model(latent.bfloat16(), torch.tensor([500.0]), text.bfloat16(), return_dict=False)[0]
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, wanted)


def test_padding_is_circular_and_at_the_end():
    latent = torch.arange(3.0).expand(1, 1, 1, 1, 3)
    assert pad_to_patch(latent, (1, 1, 2))[0, 0, 0, 0].tolist() == [0.0, 1.0, 2.0, 0.0]


@pytest.mark.parametrize("config", [{"image_dim": 8}, {"added_kv_proj_dim": 8}])
def test_half_an_image_embedder_is_refused(config):
    with pytest.raises(InvalidRequest, match="both or neither would work"):
        Wan.describe(config)


def test_unlisted_classes_are_refused_with_the_list():
    with pytest.raises(InvalidRequest, match=r"UNet2DModel is not supported; supported: .*WanTransformer3D"):
        family_of("UNet2DModel")


@torch.no_grad()
def test_frame_weights_apply_once():
    name = "WanTransformer3DModel", "ti2v 5b"
    family, inputs = families.family(*name), families.inputs(*name, batch=2)
    by_frame = inputs["timestep"][:, None] * inputs["frame_weights"]
    weighted = family.embed(inputs).tables["image"]["timestep"]
    assert weighted.shape == (2, 3 * 3 * 4)
    assert torch.equal(family.embed({**inputs, "timestep": by_frame}).tables["image"]["timestep"], weighted)


def test_three_images_in_a_model_for_two_are_refused():
    name = "WanTransformer3DModel", "flf2v 2.1"
    shapes = {key: tuple(value.shape) for key, value in families.inputs(*name, batch=1).items()}
    with pytest.raises(InvalidRequest, match="first and a last image, 10 tokens, and got 15"):
        Wan.extent(families.module(*name).config, {**shapes, "encoder_hidden_states_image": (1, 15, 20)})


@torch.no_grad()
def test_one_image_takes_the_first_positions():
    name = "WanTransformer3DModel", "flf2v 2.1"
    family, inputs = families.family(*name), families.inputs(*name, batch=2)
    both = family.embed(inputs).context["image context"]
    image = inputs["encoder_hidden_states_image"][:, :5]
    one = family.embed({**inputs, "encoder_hidden_states_image": image}).context["image context"]
    assert one.shape == (2, 5, 288)
    assert torch.allclose(one, both[:, :5], atol=1e-6)


@torch.no_grad()
def test_a_text_of_another_length_beside_an_image():
    name = "WanTransformer3DModel", "i2v 2.1"
    family, inputs = families.family(*name), families.inputs(*name, batch=2)
    short = {**inputs, "encoder_hidden_states": inputs["encoder_hidden_states"][:, :64]}
    repeated = {**inputs, "encoder_hidden_states": short["encoder_hidden_states"].repeat(1, 8, 1)}
    wanted = family.stock(repeated)  # eight copies of all keys weigh as much as one
    assert (three_parts(family, short) - wanted).abs().max() <= 1e-5 * wanted.abs().max()
