"""Procedural scenes with captions: one flat shape on a plain background, still or moving.

Everything that the checkpoint knows comes from here. ``training/reader.py`` recognizes the same attributes in pixels.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (216, 44, 44),
    "green": (46, 160, 74),
    "blue": (44, 88, 214),
    "yellow": (244, 208, 52),
    "purple": (136, 60, 176),
    "orange": (246, 136, 32),
    "white": (238, 238, 238),
    "black": (28, 28, 34),
}
DIRECTIONS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
THIN = ("star", "cross")
"""Shapes with thin parts, which are learned last."""
STILL_RADIUS, MOVING_RADIUS = (0.28, 0.4), (0.25, 0.33)
"""Range of the radius, relative to the canvas's shorter side."""
SUPERSAMPLE = 4
HELD_OUT_COUNT = 64
Point = tuple[float, float]


def _regular(points: int, *, radii: Sequence[float] = (1.0,), turn: float = -90.0) -> list[Point]:
    step = 360.0 / points
    angles = [math.radians(turn + i * step) for i in range(points)]
    return [(radii[i % len(radii)] * math.cos(a), radii[i % len(radii)] * math.sin(a)) for i, a in enumerate(angles)]


def _heart(points: int = 64) -> list[Point]:
    outline = []
    for i in range(points):
        t = 2 * math.pi * i / points
        y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        outline.append((16 * math.sin(t) ** 3 / 16.0, -(y + 2.5) / 15.0))
    return outline


def _cross(arm: float = 0.34) -> list[Point]:
    a = arm
    return [(-a, -1), (a, -1), (a, -a), (1, -a), (1, a), (a, a), (a, 1), (-a, 1), (-a, a), (-1, a), (-1, -a), (-a, -a)]


SHAPES: dict[str, list[Point]] = {
    "circle": _regular(64),
    "square": [(-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)],
    "triangle": [(0.0, -0.92), (1.0, 0.8), (-1.0, 0.8)],
    "star": _regular(10, radii=(1.08, 0.46)),
    "heart": _heart(),
    "cross": _cross(),
}


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What a caption names: a shape, its colour, the background's colour, and for clips the direction of motion."""

    shape: str
    colour: str
    background: str
    direction: str | None = None

    @property
    def caption(self) -> str:
        """The full caption, such as ``a red circle moving left on a blue background``."""
        motion = f" moving {self.direction}" if self.direction else ""
        return f"{_with_article(self.colour)} {self.shape}{motion} on {_with_article(self.background)} background"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Position and size of the shape.

    Attributes:
        x: of the centre in the middle of the clip, relative to the canvas's width.
        y: of the centre in the middle of the clip, relative to the canvas's height.
        radius: relative to the canvas's shorter side.
        travel: distance moved over the clip, relative to the canvas's side in the direction of motion.
    """

    x: float
    y: float
    radius: float
    travel: float


def _with_article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _all_combinations() -> list[tuple[str, str, str]]:
    return [(s, c, b) for s in SHAPES for c in COLOURS for b in COLOURS if b != c]


def held_out() -> list[tuple[str, str, str]]:
    """Return the (shape, colour, background) triples that training never sees, in a fixed order."""
    combinations = _all_combinations()
    random.Random(2026).shuffle(combinations)
    return combinations[:HELD_OUT_COUNT]


@cache
def training_combinations() -> list[tuple[str, str, str]]:
    """Return all triples that are not held out; those with a thin shape appear twice."""
    excluded = set(held_out())
    return [t for t in _all_combinations() if t not in excluded for _ in range(2 if t[0] in THIN else 1)]


def random_scene(rng: random.Random, *, moving: bool) -> Scene:
    """Draw a scene from the training combinations."""
    shape, colour, background = rng.choice(training_combinations())
    direction = rng.choice(list(DIRECTIONS)) if moving else None
    return Scene(shape=shape, colour=colour, background=background, direction=direction)


def random_placement(rng: random.Random, scene: Scene, height: int, width: int, *, spread: float = 1.0) -> Placement:
    """Draw a placement that keeps the shape inside the canvas for the whole clip.

    A moving shape starts near the middle and ends near the border, so that its average position already distinguishes
    left from right.

    Args:
        rng: the source of randomness.
        scene: the scene.
        height: of the canvas in pixels.
        width: of the canvas in pixels.
        spread: how far the shape may be from that path, or in a still from the middle, as a share of the free space.
    """
    short = min(height, width)
    dx, dy = DIRECTIONS[scene.direction] if scene.direction else (0, 0)
    radius = rng.uniform(*(MOVING_RADIUS if scene.direction else STILL_RADIUS)) * short
    room_x, room_y = (1 - 2 * (radius * 1.1 + 2) / side for side in (width, height))
    room = abs(dx) * room_x + abs(dy) * room_y
    travel = rng.uniform(0.55, 0.7) * room
    ahead = (room - travel) / 2 * rng.uniform(1 - spread, 1)
    return Placement(
        x=0.5 + dx * ahead + (0 if dx else spread * rng.uniform(-0.5, 0.5) * room_x),
        y=0.5 + dy * ahead + (0 if dy else spread * rng.uniform(-0.5, 0.5) * room_y),
        radius=radius / short,
        travel=travel,
    )


def shape_mask(shape: str, x: float, y: float, radius: float, height: int, width: int) -> NDArray[np.float32]:
    """Return the anti-aliased coverage ``[H, W]`` in 0..1 of a shape centred at ``(x, y)``; lengths are in pixels."""
    s = SUPERSAMPLE
    canvas = Image.new("L", (width * s, height * s))
    outline = [((x + px * radius) * s, (y + py * radius) * s) for px, py in SHAPES[shape]]
    ImageDraw.Draw(canvas).polygon(outline, fill=255)
    small = canvas.resize((width, height), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float32) / 255.0


def draw(
    scene: Scene, place: Placement, *, height: int, width: int, frames: int = 1, stride: int = 1
) -> NDArray[np.float32]:
    """Render every ``stride``-th frame of a clip, ``[T, H, W, 3]`` in 0..1.

    The shape is shaded, and the background darkens towards the bottom.
    """
    dx, dy = DIRECTIONS[scene.direction] if scene.direction else (0, 0)
    rows = np.linspace(0.0, 1.0, height, dtype=np.float32)[:, None, None]
    background = np.asarray(COLOURS[scene.background], np.float32) / 255.0 * (1.05 - 0.17 * rows)
    colour = np.asarray(COLOURS[scene.colour], np.float32) / 255.0
    radius = place.radius * min(height, width)
    rendered = range(0, frames, stride)
    clip = np.empty((len(rendered), height, width, 3), np.float32)
    for i, t in enumerate(rendered):
        time = t / (frames - 1) - 0.5 if frames > 1 else 0.0
        x, y = (place.x + dx * place.travel * time) * width, (place.y + dy * place.travel * time) * height
        mask = shape_mask(scene.shape, x, y, radius, height, width)[..., None]
        depth = np.clip((rows * height - y) / radius, -1.0, 1.0)
        clip[i] = background * (1 - mask) + colour * (1.0 - 0.10 * depth) * mask
    return np.clip(clip, 0.0, 1.0)
