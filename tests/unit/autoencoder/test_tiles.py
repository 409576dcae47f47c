"""Where the tiles of a latent lie, and how they are blended."""

import pytest
import torch

from parallel_backend.autoencoder.tiles import Tiles, TileSpace

PIXELS = TileSpace(dims=(-3, -2), scale=8)


@pytest.mark.parametrize(
    ("plane", "tile", "places"),
    [
        ((9, 10), 10, [(0, 0)]),
        ((9, 10), 8, [(0, 0), (0, 2), (1, 0), (1, 2)]),
        ((20, 8), 8, [(0, 0), (6, 0), (12, 0)]),
        ((21, 8), 8, [(0, 0), (6, 0), (12, 0), (13, 0)]),
    ],
)
def test_places(plane, tile, places):
    assert Tiles(plane, tile).places == places


@pytest.mark.parametrize(("plane", "tile"), [((9, 10), 8), ((21, 30), 8), ((40, 17), 11), ((5, 5), 8)])
@pytest.mark.parametrize("side", [PIXELS, TileSpace(dims=(-2, -1), scale=1)])
def test_blending_the_tiles_of_an_image_gives_the_image(plane, tile, side):
    tiles, shape = Tiles(plane, tile), [2, 3, 4, 5, 6]
    for dim, length in zip(side.dims, plane, strict=True):
        shape[dim] = length * side.scale
    image = torch.randn(shape)
    blended = tiles.zeros(tiles.crop(image, tiles.places[0], side), side)
    for place in tiles.places:
        tile = tiles.crop(image, place, side)
        weight = tiles.weight(place, side, tile.ndim)
        assert ((weight > 0) & (weight <= 1)).all()
        tiles.crop(blended, place, side).add_(tile * weight)
    torch.testing.assert_close(blended, image)
