"""Recognize a scene's attributes in its pixels by plain image analysis, with numpy and scipy and without a network.

- The background is the colour along the left and right borders, row by row.
- The region is the largest connected area that differs from the background.
- The colour is the palette's nearest to that of the region's core.
- The shape is the template that overlaps best with the region at its position and size, or None if none fits.
- The direction is that of the region's motion from the first frame to the last.

Outlines and palette come from ``training/scenes.py``, since they define what the words mean.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from training.scenes import COLOURS, DIRECTIONS, SHAPES, Scene, shape_mask

Image = NDArray[np.float32]
Mask = NDArray[np.bool_]
MIN_DIFFERENCE = 0.16
"""Distance in RGB from the background at which a pixel belongs to the region."""
MIN_AREA = 0.008
"""Of the region, as a share of the picture."""
MIN_OVERLAP = 0.75
"""Intersection over union at which a template fits."""
MIN_TRAVEL = 0.08
"""Of the region, as a share of the picture's shorter side."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The recognized attributes; None for those that were not recognized."""

    shape: str | None
    colour: str | None
    background: str | None
    direction: str | None

    def hits(self, scene: Scene) -> dict[str, bool]:
        """Return, for each attribute that the scene has, whether it was recognized correctly."""
        expected = {"shape": scene.shape, "colour": scene.colour, "background": scene.background}
        if scene.direction:
            expected["direction"] = scene.direction
        return {name: getattr(self, name) == value for name, value in expected.items()}


def read(clip: Image) -> Reading:
    """Read a clip ``[T, H, W, 3]`` in 0..1; shape and colours come from its middle frame."""
    middle = clip[len(clip) // 2]
    ground = _background(middle)
    region = _region(middle, ground)
    background = _nearest_colour(np.median(ground, axis=(0, 1)))
    if region is None:
        return Reading(shape=None, colour=None, background=background, direction=None)
    return Reading(
        shape=_shape(middle, ground, region),
        colour=_nearest_colour(np.median(middle[_core(region)], axis=0)),
        background=background,
        direction=_direction(clip) if len(clip) > 1 else None,
    )


def _background(frame: Image) -> Image:
    """Return the median colour of both borders by row, smoothed over rows, ``[H, 1, 3]``."""
    margin = max(2, frame.shape[1] // 24)
    borders = np.concatenate([frame[:, :margin], frame[:, -margin:]], axis=1)
    rows = np.median(borders, axis=1)
    smooth: Image = ndimage.median_filter(rows, size=(max(5, frame.shape[0] // 4), 1), mode="nearest")
    return smooth[:, None]


def _region(frame: Image, ground: Image) -> Mask | None:
    """Return the largest connected region that differs from the background; None if it is too small."""
    labels, count = ndimage.label(np.linalg.norm(frame - ground, axis=-1) > MIN_DIFFERENCE)
    if not count:
        return None
    sizes = np.bincount(labels.ravel())[1:]
    if sizes.max() < MIN_AREA * labels.size:
        return None
    region: Mask = ndimage.binary_fill_holes(labels == 1 + sizes.argmax())
    return region


def _core(region: Mask) -> Mask:
    """Return the region without its anti-aliased edge."""
    for width in (3, 2, 1):
        core: Mask = ndimage.binary_erosion(region, iterations=width)
        if core.sum() >= 12:
            return core
    return region


def _nearest_colour(colour: Image) -> str:
    """Return the name of the palette's nearest colour; brightness may differ by 15 %, to allow for shading."""
    gains = np.linspace(0.85, 1.15, 7)[:, None]

    def distance(name: str) -> float:
        shades = np.clip(np.asarray(COLOURS[name]) / 255.0 * gains, 0, 1)
        return float(np.linalg.norm(shades - colour, axis=1).min())

    return min(COLOURS, key=distance)


def _shape(frame: Image, ground: Image, region: Mask) -> str | None:
    """Return the shape whose template overlaps most with the region; None if no template fits."""
    difference = frame - ground
    core = np.median(difference[_core(region)], axis=0)
    coverage = np.clip((difference @ core) / max(float(core @ core), 1e-6), 0, 1)
    coverage = coverage * ndimage.binary_dilation(region, iterations=2)
    rows, columns = (np.flatnonzero(region.any(axis)) for axis in (1, 0))
    box = (columns[0], columns[-1] + 1, rows[0], rows[-1] + 1)
    overlaps = {shape: _best_overlap(coverage, shape, box) for shape in SHAPES}
    best = max(overlaps, key=lambda shape: overlaps[shape])
    return best if overlaps[best] >= MIN_OVERLAP else None


def _best_overlap(coverage: Image, shape: str, box: tuple[int, int, int, int]) -> float:
    """Return the largest soft intersection over union of a template that is fitted to the box in three sizes."""
    outline = np.asarray(SHAPES[shape])
    low, high = outline.min(0), outline.max(0)
    left, right, top, bottom = box
    sides = ((right - left) / (high[0] - low[0]), (bottom - top) / (high[1] - low[1]))
    best = 0.0
    for radius in (sides[0], sides[1], sum(sides) / 2):
        x = (left + right) / 2 - radius * (low[0] + high[0]) / 2
        y = (top + bottom) / 2 - radius * (low[1] + high[1]) / 2
        template = shape_mask(shape, x, y, radius, *coverage.shape)
        union = np.maximum(template, coverage).sum()
        best = max(best, float(np.minimum(template, coverage).sum() / max(union, 1e-6)))
    return best


def _direction(clip: Image) -> str | None:
    """Return the direction in which the region's centre moves; None if it moves too little or is not found."""
    centres = []
    for frame in (clip[0], clip[-1]):
        region = _region(frame, _background(frame))
        if region is None:
            return None
        centres.append(np.array(ndimage.center_of_mass(region))[::-1])
    travel = (centres[1] - centres[0]) / min(clip.shape[1:3])
    if np.abs(travel).max() < MIN_TRAVEL:
        return None
    return max(DIRECTIONS, key=lambda name: float(np.dot(DIRECTIONS[name], travel)))
