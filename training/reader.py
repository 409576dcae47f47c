"""Read a scene's attributes back off pixels by plain image analysis: no network, only numpy and scipy.

The background is the colour along the left and right borders, row by row; the shape is the
largest connected region that differs from it; its colour is the nearest of the palette to the
region's core; its form is the template that overlaps best at the region's place and size; its
direction is where the region goes from the first frame to the last. Outlines and palette are those of
``training/scenes.py``, since they are what the words mean; a form that fits none of them reads as none.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from training.scenes import COLOURS, DIRECTIONS, SHAPES, Scene, shape_mask

Image = NDArray[np.float32]
Mask = NDArray[np.bool_]
DIFFERENT = 0.16
SMALLEST_AREA = 0.008
LEAST_OVERLAP = 0.75
LEAST_TRAVEL = 0.08


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was recognised; ``None`` where nothing was."""

    shape: str | None
    colour: str | None
    background: str | None
    direction: str | None

    def hits(self, scene: Scene) -> dict[str, bool]:
        """Whether each attribute that the scene has was read right."""
        wanted = {"shape": scene.shape, "colour": scene.colour, "background": scene.background}
        if scene.direction:
            wanted["direction"] = scene.direction
        return {name: getattr(self, name) == value for name, value in wanted.items()}


def read(clip: Image) -> Reading:
    """Read a clip ``[T, H, W, 3]`` in 0..1; shape and colours off its middle frame."""
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
    """Per row, the median of both borders, smoothed downwards; ``[H, 1, 3]``."""
    margin = max(2, frame.shape[1] // 24)
    borders = np.concatenate([frame[:, :margin], frame[:, -margin:]], axis=1)
    rows = np.median(borders, axis=1)
    smooth: Image = ndimage.median_filter(rows, size=(max(5, frame.shape[0] // 4), 1), mode="nearest")
    return smooth[:, None]


def _region(frame: Image, ground: Image) -> Mask | None:
    """The largest connected region unlike the background."""
    labels, count = ndimage.label(np.linalg.norm(frame - ground, axis=-1) > DIFFERENT)
    if not count:
        return None
    sizes = np.bincount(labels.ravel())[1:]
    if sizes.max() < SMALLEST_AREA * labels.size:
        return None
    region: Mask = ndimage.binary_fill_holes(labels == 1 + sizes.argmax())
    return region


def _core(region: Mask) -> Mask:
    """The region without its soft edge."""
    for width in (3, 2, 1):
        core: Mask = ndimage.binary_erosion(region, iterations=width)
        if core.sum() >= 12:
            return core
    return region


def _nearest_colour(colour: Image) -> str:
    """The palette's nearest name, whatever the shading: brightness may differ by 15 percent."""
    gains = np.linspace(0.85, 1.15, 7)[:, None]

    def distance(name: str) -> float:
        shades = np.clip(np.asarray(COLOURS[name]) / 255.0 * gains, 0, 1)
        return float(np.linalg.norm(shades - colour, axis=1).min())

    return min(COLOURS, key=distance)


def _shape(frame: Image, ground: Image, region: Mask) -> str | None:
    """The template with the largest overlap, tried at a few sizes and places around the region's box."""
    difference = frame - ground
    core = np.median(difference[_core(region)], axis=0)
    coverage = np.clip((difference @ core) / max(float(core @ core), 1e-6), 0, 1)
    coverage = coverage * ndimage.binary_dilation(region, iterations=2)
    rows, columns = (np.flatnonzero(region.any(axis)) for axis in (1, 0))
    box = (columns[0], columns[-1] + 1, rows[0], rows[-1] + 1)
    overlaps = {shape: _best_overlap(coverage, shape, box) for shape in SHAPES}
    best = max(overlaps, key=lambda shape: overlaps[shape])
    return best if overlaps[best] >= LEAST_OVERLAP else None


def _best_overlap(coverage: Image, shape: str, box: tuple[int, int, int, int]) -> float:
    """Largest soft intersection over union of a template fitted to the box."""
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
    """Where the region's centre goes, relative to the canvas' shorter side."""
    centres = []
    for frame in (clip[0], clip[-1]):
        region = _region(frame, _background(frame))
        if region is None:
            return None
        centres.append(np.array(ndimage.center_of_mass(region))[::-1])
    travel = (centres[1] - centres[0]) / min(clip.shape[1:3])
    if np.abs(travel).max() < LEAST_TRAVEL:
        return None
    return max(DIRECTIONS, key=lambda name: float(np.dot(DIRECTIONS[name], travel)))
