"""The thumbnail of an example workflow whose model is not included: its name above a small drawing of its graph."""

from typing import Any

from PIL import Image, ImageColor, ImageDraw, ImageFont

from scripts import workflow_layout, workflow_note

SIDE, MARGIN = 400, 24
"""Pixels of the square, and around what it shows."""
GRAPH_TOP = 150
BACKGROUND, WIRES, TEXT, QUIET = "#20242b", "#8f98a5", "#ffffff", "#b9c1cc"
OVERSAMPLED = 2
"""The drawing is this many times larger, so that its edges become smooth."""


def draw(name: str, graph: dict[str, Any]) -> Image.Image:
    """Return the thumbnail of a graph.

    Args:
        name: the model, a comma, and what it does.
        graph: the workflow in the page's format.
    """
    image = Image.new("RGB", (SIDE * OVERSAMPLED, SIDE * OVERSAMPLED), BACKGROUND)
    pen = ImageDraw.Draw(image)
    model, _, does = name.partition(", ")
    _line(pen, model, top=30, size=46, colour=TEXT)
    _line(pen, does, top=92, size=26, colour=QUIET)
    nodes = [node for node in graph["nodes"] if node["type"] != workflow_note.NOTE]
    _graph(pen, nodes, graph["links"])
    return image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def _line(pen: ImageDraw.ImageDraw, text: str, *, top: int, size: int, colour: str) -> None:
    """Write a line, smaller where it is too long."""
    room = (SIDE - 2 * MARGIN) * OVERSAMPLED
    font = ImageFont.load_default(size * OVERSAMPLED)
    while pen.textlength(text, font=font) > room:
        size -= 1
        font = ImageFont.load_default(size * OVERSAMPLED)
    pen.text((MARGIN * OVERSAMPLED, top * OVERSAMPLED), text, fill=colour, font=font)


def _graph(pen: ImageDraw.ImageDraw, nodes: list[dict[str, Any]], links: list[list[Any]]) -> None:
    """Draw nodes in the colours of their groups, and their links, in the room below the texts."""
    boxes = {node["id"]: (*node["pos"], *node["size"]) for node in nodes}
    left, top = min(box[0] for box in boxes.values()), min(box[1] for box in boxes.values())
    width = max(box[0] + box[2] for box in boxes.values()) - left
    height = max(box[1] + box[3] for box in boxes.values()) - top
    scale = min((SIDE - 2 * MARGIN) / width, (SIDE - MARGIN - GRAPH_TOP) / height) * OVERSAMPLED

    def at(x: float, y: float) -> tuple[float, float]:
        return MARGIN * OVERSAMPLED + (x - left) * scale, GRAPH_TOP * OVERSAMPLED + (y - top) * scale

    for _, source, _, target, _, _ in links:
        begin, end = boxes[source], boxes[target]
        pen.line([at(begin[0] + begin[2], begin[1] + 40), at(end[0], end[1] + 40)], fill=WIRES, width=OVERSAMPLED)
    colours = {title: colour for title, colour, _ in workflow_layout.GROUPS}
    for node in nodes:
        x, y, across, down = boxes[node["id"]]
        colour = ImageColor.getrgb(colours[workflow_layout.group_of(node["type"])])
        pen.rounded_rectangle([at(x, y), at(x + across, y + down)], radius=4 * OVERSAMPLED, fill=colour)
