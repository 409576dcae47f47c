"""Pictures of the page for the documentation: ``PARALLEL_DIT_SCREENS=docs/screens pytest tests/browser -k screens``."""

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from scripts.comfy_paths import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Page

MOST = 150_000
"""Bytes of a picture."""
QUALITIES = (90, 82, 74, 66)
READABLE = """async () => {
    await window.app.extensionManager.setting.set("LiteGraph.Canvas.MinFontSizeForLOD", 0)
    window.app.canvas.setDirty(true, true)
}"""
"""Draws the texts of nodes, which the page leaves out where they are small."""


def save(page: "Page", name: str, **options: Any) -> None:
    """Save what the page shows, if pictures are wanted.

    Args:
        page: the page.
        name: of the file, without its end.
        options: Playwright's, such as the part to show.
    """
    folder = os.environ.get("PARALLEL_DIT_SCREENS")
    if not folder:
        return
    page.evaluate(READABLE)
    page.wait_for_timeout(700)
    target = ROOT / folder / f"{name}.jpg"
    target.parent.mkdir(parents=True, exist_ok=True)
    _write(Image.open(io.BytesIO(page.screenshot(**options))).convert("RGB"), target)


def _write(picture: Image.Image, target: Path) -> None:
    for quality in QUALITIES:
        picture.save(target, quality=quality, optimize=True, progressive=True)
        if target.stat().st_size <= MOST:
            return
    raise AssertionError(f"{target} has {target.stat().st_size} bytes")
