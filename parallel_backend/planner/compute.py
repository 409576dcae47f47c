"""Seconds that a device takes to compute, with what it loses where its share is small.

A product of matrices is cut into tiles, which the processors of a GPU share. A tile at the edge takes as long as a
whole one, and a last round in which few processors work as long as a full one: tile and wave quantisation, see
https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/. So small shares compute slower.
Nothing is faster than its bytes are read and written (the roofline model).
"""

import bisect
import math
from collections.abc import Sequence

from .hardware.description import Curve, Device
from .work import Attended, Product, Work

_TILES = ((256, 128), (128, 256), (128, 128), (64, 128))
"""Rows and columns of a tile. Libraries have kernels of several sizes, and take the fastest."""
_QUERIES = 128
"""Queries of one head that a processor attends with at once."""


def seconds(work: Work, device: Device, *, compiled: bool = False) -> float:
    """Return the seconds of layers on a device, without the host's."""
    moved = work.between if compiled else work.moved + work.moved_cut
    products = sum(product_seconds(product, device) * count for product, count in work.products.items())
    attended = sum(attention_seconds(each, device) * count for each, count in work.attended.items())
    return products + attended + moved / device.bandwidth


def product_seconds(product: Product, device: Device) -> float:
    """Return the seconds of one product."""
    computing = min(_tiled(product, device, *tile) for tile in _TILES)
    return max(computing, product.moved / device.bandwidth)


def _tiled(product: Product, device: Device, rows: int, columns: int) -> float:
    if device.units == 1:
        return product.operations / device.matrix
    tiles = product.batch * math.ceil(product.rows / rows) * math.ceil(product.columns / columns)
    # With fewer tiles than processors, libraries split the sum of a tile over several (split-K).
    rounds = _rounds(tiles, device.units) if tiles > device.units else tiles / device.units
    return rounds * 2.0 * rows * columns * product.inner / (device.matrix / device.units)


def attention_seconds(attended: Attended, device: Device) -> float:
    """Return the seconds of one attention."""
    if not attended.operations:
        return 0.0
    if device.attends:
        return interpolated(device.attends, attended.operations)
    if device.units == 1:
        return attended.operations / device.attention
    tiles = attended.heads * math.ceil(attended.queries / _QUERIES)
    each = 4.0 * _QUERIES * attended.keys * attended.head_dim / (device.attention / device.units)
    return _rounds(tiles, device.units) * each


def _rounds(tiles: int, units: int) -> float:
    """Return the rounds in which processors compute tiles: whole ones, since a round takes as long as its last tile."""
    return float(math.ceil(tiles / units))


def interpolated(curve: Curve, at: float) -> float:
    """Return the seconds at a place of a measured curve, along a line between neighbouring points.

    Below the first and beyond the last point, seconds grow in proportion to the place.
    """
    points = sorted(curve)
    places = [place for place, _ in points]
    index = bisect.bisect_left(places, at)
    if index < len(points) and places[index] == at:
        return points[index][1]
    if index == 0 or index == len(points):
        place, taken = points[min(index, len(points) - 1)]
        return taken * at / place if index else _towards(points, at)
    (low, first), (high, second) = points[index - 1], points[index]
    return first + (second - first) * (at - low) / (high - low)


def _towards(points: Sequence[tuple[float, float]], at: float) -> float:
    """Return the seconds below the first point: on the line of the first two, and never less than in proportion."""
    (low, first), *rest = points
    share = first * at / low
    if not rest:
        return share
    high, second = rest[0]
    return max(share, first + (second - first) * (at - low) / (high - low))
