"""The icon and the banner: one picture in four parts, which four ranks make together."""

from scripts.docs_pictures.svg import PAPER, RANKS, box, picture, text

NIGHT = "#171a2b"


def tiles(x: float, y: float, size: float, gap: float) -> list[str]:
    """Return a picture of a hill under the sun, cut in four, a colour a rank."""
    half, parts = (size - gap) / 2, []
    for i, colour in enumerate(RANKS):
        left, top = x + (i % 2) * (half + gap), y + (i // 2) * (half + gap)
        parts.append(box(left, top, half, half, colour, radius=size / 14))
    # Shapes over all tiles; the gaps between them stay.
    corners = ((0.16, 0.82), (0.5, 0.3), (0.84, 0.82))
    peak = " ".join(f"{x + size * right:g},{y + size * down:g}" for right, down in corners)
    parts.append(f"<polygon points='{peak}' fill='{PAPER}' fill-opacity='0.92'/>")
    parts.append(f"<circle cx='{x + size * 0.76:g}' cy='{y + size * 0.24:g}' r='{size * 0.09:g}' fill='{PAPER}'/>")
    middle = (size - gap) / 2
    parts.append(box(x + middle, y, gap, size, NIGHT, radius=0))
    parts.append(box(x, y + middle, size, gap, NIGHT, radius=0))
    return parts


def icon() -> str:
    """A square of 400."""
    background = box(0, 0, 400, 400, NIGHT, radius=72)
    return picture(400, 400, "Parallel DiT", [background, *tiles(60, 60, 280, 16)], paper=False)


def banner() -> str:
    """21 to 9."""
    words = [
        text(560, 250, "Parallel DiT", size=92, colour=PAPER),
        text(564, 318, "Diffusion transformers on several GPUs,", size=32, colour="#b9c0d8"),
        text(564, 364, "as ordinary ComfyUI nodes.", size=32, colour="#b9c0d8"),
    ]
    background = box(0, 0, 1260, 540, NIGHT, radius=0)
    return picture(1260, 540, "Parallel DiT", [background, *tiles(120, 105, 330, 18), *words], paper=False)


PICTURES = {"icon": icon, "banner": banner}
"""What makes each, by its name."""
