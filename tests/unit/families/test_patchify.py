"""Latents become tokens and latents again, in the order of values that a family asks for."""

import pytest
import torch

from parallel_backend.families.shared.patchify import to_latent, to_tokens
from parallel_backend.interfaces.geometry import Geometry


@pytest.mark.parametrize("values", ["c pt ph pw", "pt ph pw c"])
@pytest.mark.parametrize(("patch", "size"), [((1, 2, 2), (3, 5, 7)), ((2, 2, 2), (5, 4, 6)), ((3, 2, 4), (7, 9, 13))])
def test_videos_survive_the_round_trip(patch, size, values):
    latent = torch.randn(2, 4, *size)
    geometry = Geometry(channels=4, out_channels=4, patch=patch, layers=1, sites=(), all_reduces=())
    assert torch.equal(to_latent(to_tokens(latent, patch, values), size, geometry, values), latent)


def test_tokens_are_patches_row_by_row_with_the_values_in_the_order_asked_for():
    latent = torch.arange(2.0 * 4 * 4).view(1, 2, 4, 4)
    second_patch = latent[0, :, :2, 2:]
    assert torch.equal(to_tokens(latent, (2, 2), "c ph pw")[0, 1], second_patch.flatten())
    assert torch.equal(to_tokens(latent, (2, 2), "ph pw c")[0, 1], second_patch.permute(1, 2, 0).flatten())
