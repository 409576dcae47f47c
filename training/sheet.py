"""Draw an overview of what a pipeline can do: stills with their prompts, and clips as film strips.

python -m training.sheet --pipeline checkpoints/shapes --to docs/shapes.png
"""

import argparse
from pathlib import Path

import numpy as np
from diffusers import WanPipeline
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from training.sampling import load, sample
from training.scenes import DIRECTIONS, Scene, held_out

STILL, COLUMNS, ROWS = 160, 5, 2
FRAME, STRIPS = 128, 2
GAP, LINE = 8, 30
PAPER, INK = (250, 250, 250), (40, 40, 46)


def chosen_stills() -> list[Scene]:
    """Choose unseen scenes such that neighbours share neither shape, nor colour, nor background."""
    scenes: list[Scene] = []
    for shape, colour, background in held_out():
        recent = scenes[-3:]
        if all(shape != s.shape and background != s.background and colour != s.colour for s in recent):
            scenes.append(Scene(shape=shape, colour=colour, background=background))
    return scenes[: COLUMNS * ROWS]


def chosen_clips() -> list[Scene]:
    """Choose unseen scenes that move, each in another direction."""
    triples = [t for t in held_out() if t[0] in ("star", "heart")][:STRIPS]
    directions = ["right", *(direction for direction in DIRECTIONS if direction != "right")]
    return [Scene(shape=s, colour=c, background=b, direction=directions[i]) for i, (s, c, b) in enumerate(triples)]


def _picture(pixels: NDArray[np.float32]) -> Image.Image:
    return Image.fromarray((pixels * 255).round().astype(np.uint8))


def _label(sheet: Image.Image, x: int, y: int, text: str) -> None:
    ImageDraw.Draw(sheet).text((x, y), text, fill=INK, font=ImageFont.load_default(10))


def sheet_of(pipeline: WanPipeline, *, seed: int) -> Image.Image:
    """Sample all scenes and arrange them on one sheet."""
    stills, clips = chosen_stills(), chosen_clips()
    pictures = sample(pipeline, [s.caption for s in stills], height=STILL, width=STILL, seed=seed)
    films = sample(pipeline, [s.caption for s in clips], height=FRAME, width=FRAME, frames=17, seed=seed)
    width = GAP + COLUMNS * (STILL + GAP)
    frames = np.linspace(0, 16, (width - GAP) // (FRAME + GAP)).round().astype(int)
    height = GAP + ROWS * (STILL + LINE + GAP) + STRIPS * (FRAME + LINE + GAP)
    sheet = Image.new("RGB", (width, height), PAPER)
    for i, (scene, picture) in enumerate(zip(stills, pictures, strict=True)):
        x, y = GAP + i % COLUMNS * (STILL + GAP), GAP + i // COLUMNS * (STILL + LINE + GAP)
        sheet.paste(_picture(picture[0]), (x, y))
        _label(sheet, x, y + STILL + 2, scene.caption.replace(" on ", "\non "))
    top = GAP + ROWS * (STILL + LINE + GAP)
    for i, (scene, film) in enumerate(zip(clips, films, strict=True)):
        y = top + i * (FRAME + LINE + GAP)
        for k, frame in enumerate(frames):
            sheet.paste(_picture(film[frame]), (GAP + k * (FRAME + GAP), y))
        _label(sheet, GAP, y + FRAME + 2, f"{scene.caption} (17 frames)")
    return sheet


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.to.parent.mkdir(parents=True, exist_ok=True)
    sheet_of(load(args.pipeline), seed=args.seed).save(args.to, optimize=True)


if __name__ == "__main__":
    main()
