"""Which layers and functions can be split by rows. All others are refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallel_backend.autoencoder.spatial import RowSplit, Unsplittable, layers
from parallel_backend.autoencoder.spatial.watch import RowGuard
from parallel_backend.autoencoder.spatial.windows import HaloForward, RowWindow
from parallel_backend.distributed.mesh import Axis
from parallel_backend.layout.partition import Partition

LATENT = Partition.even(7, 3)
ROWS = [
    RowSplit(axis=Axis(name="ring", ranks=(0, 1, 2), index=index, group=None, gloo=True), latent=LATENT)
    for index in range(3)
]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.interpolate(input=x, scale_factor=2.0),
        lambda x: F.interpolate(x, size=(6, 12), mode="nearest-exact"),
        lambda x: F.interpolate(x, scale_factor=(3, 1.5)),
        lambda x: F.pad(input=x, pad=(1, 1)),
        lambda x: torch.mean(input=x, dim=1),
        lambda x: x.softmax(-1),
    ],
)
def test_functions_that_read_one_row_are_allowed(function):
    x = torch.ones(1, 4, 3, 8)
    with RowGuard(ROWS[0]):
        result = function(x)
    assert torch.equal(result, function(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
        lambda x: F.interpolate(input=x, scale_factor=1.5),
        lambda x: F.interpolate(x, size=(4, 8)),
        lambda x: F.pad(input=x, pad=(0, 0, 1, 0)),
        lambda x: torch.mean(input=x),
        lambda x: x.softmax(-2),
        lambda x: x @ x.transpose(-1, -2),
        lambda x: F.conv2d(x, torch.ones(1, 4, 1, 1)),
    ],
)
def test_functions_that_may_read_other_rows_are_refused(function):
    with RowGuard(ROWS[0]), pytest.raises(Unsplittable, match="between its layers"):
        function(torch.ones(1, 4, 3, 8))


def test_random_numbers_are_drawn_for_all_rows_and_cut():
    torch.manual_seed(3)
    whole = torch.randn(2, 14, 5)
    parts = []
    for rows, size in zip(ROWS, LATENT.sizes, strict=True):
        torch.manual_seed(3)
        with RowGuard(rows):
            parts.append(torch.randn(2, 2 * size, 5))
    assert torch.equal(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("shape", [(8,), (1, 8, 1, 1), (2, 4, 5)])
def test_random_numbers_without_rows_are_refused(shape):
    with RowGuard(ROWS[0]), pytest.raises(Unsplittable, match="cannot be cut by rows"):
        torch.randn(shape)


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(1, 1, 3, padding="same"), nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"), nn.AvgPool2d(2)],
)
def test_unknown_layers_are_refused(layer):
    with pytest.raises(Unsplittable, match=f"a {type(layer).__name__}"):
        list(layers.layers_to_replace(nn.Sequential(nn.SiLU(), layer)))


def test_padding_before_a_convolution_counts_as_part_of_it():
    padded = nn.Sequential(nn.ZeroPad2d((0, 0, 2, 1)), nn.Conv2d(1, 1, 5, padding=1))
    assert layers.row_window(padded) == RowWindow(kernel=5, stride=1, padding=3)


def test_a_layer_called_with_unknown_arguments_is_refused():
    forward = HaloForward(nn.Conv2d(1, 1, 3, padding=1), RowWindow(kernel=3, stride=1, padding=1), ROWS[0])
    with pytest.raises(Unsplittable, match="a Conv2d is called with unknown arguments: scale"):
        forward(torch.ones(1, 1, 3, 3), scale=2)
