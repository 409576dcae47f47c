"""The Wan adapter in three parts against diffusers' own forward."""

import pytest
import torch

from parallel_backend.errors import InvalidRequest
from parallel_backend.models import family_of, wan
from parallel_backend.models.patches import pad_to_patch
from parallel_backend.models.wan import Wan
from tests import families, tiny


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


def test_unlisted_classes_are_refused_with_the_list():
    with pytest.raises(InvalidRequest, match=r"UNet2DModel is not supported; supported: .*WanTransformer3D"):
        family_of("UNet2DModel")


def test_numbers_that_a_config_leaves_out_are_those_of_the_class():
    import inspect

    from diffusers import WanTransformer3DModel

    signature = inspect.signature(WanTransformer3DModel.__init__).parameters
    assert {name: signature[name].default for name in wan._DEFAULTS} == wan._DEFAULTS
    assert Wan.describe({}).sites[0].heads == 40


@torch.no_grad()
def test_frames_are_weighed_once():
    name = "WanTransformer3DModel", "ti2v 5b"
    family, inputs = families.family(*name), families.inputs(*name, batch=2)
    weighed = inputs["timestep"][:, None] * inputs["frame_weights"]
    once = family.embed(inputs).tables["image"]["timestep"]
    assert once.shape == (2, 3 * 3 * 4)
    assert torch.equal(family.embed({**inputs, "timestep": weighed}).tables["image"]["timestep"], once)


def test_one_image_where_two_are_needed():
    name = "WanTransformer3DModel", "flf2v 2.1"
    shapes = {key: tuple(value.shape) for key, value in families.inputs(*name, batch=1).items()}
    with pytest.raises(InvalidRequest, match="first and the last image, 10 tokens, and got 5"):
        Wan.extent(families.module(*name).config, {**shapes, "encoder_hidden_states_image": (1, 5, 20)})
