"""Qwen-Image's positions as an input, ``start_ids``."""

import pytest
import torch

from parallel_backend.errors import InvalidRequest
from parallel_backend.families.qwen_image.transformer import QwenImage
from tests.support import families

NAME = "QwenImageTransformer2DModel"


@torch.no_grad()
def test_given_positions_of_diffusers_give_its_tables():
    family, inputs = families.family(NAME, "edit"), families.inputs(NAME, "edit", batch=2)
    # Position 0 is the centre of each of the 5 x 7, 4 x 5 and 3 x 8 patches. Text starts after the widest, at 8 // 2.
    starts = torch.tensor([[4, 4, 4], [0, -3, -4], [1, -2, -3], [2, -2, -4]])
    default, given = family.embed(inputs), family.embed({**inputs, "start_ids": starts.float().expand(2, 4, 3)})
    for stream in default.tables:
        assert torch.allclose(given.tables[stream]["rope"], default.tables[stream]["rope"], atol=1e-6)


@torch.no_grad()
def test_image_positions_follow_start_ids():
    family, inputs = families.family(NAME, "image"), families.inputs(NAME, "image", batch=1)
    tables = []
    for row in (-2.0, -3.0):
        starts = torch.tensor([[[3.0] * 3, [0.0, row, -3.0]]])
        tables.append(family.embed({**inputs, "start_ids": starts}).tables["image"]["rope"])
    # The latent has 7 columns of patches: starting one row higher moves each position by 7 tokens.
    assert torch.equal(tables[0][:, :-7], tables[1][:, 7:])
    assert not torch.allclose(tables[0], tables[1], atol=0.1)


def test_positions_of_too_few_images_are_refused():
    shapes = {name: tuple(value.shape) for name, value in families.inputs(NAME, "edit", batch=1).items()}
    with pytest.raises(InvalidRequest, match=r"start_ids of shape \[1, 3, 3\] does not fit: .* takes \[batch, 4, 3\]"):
        QwenImage.extent(families.module(NAME, "edit").config, {**shapes, "start_ids": (1, 3, 3)})
