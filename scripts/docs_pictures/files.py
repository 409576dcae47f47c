"""Every picture by its file."""

from pathlib import Path

from scripts.docs_pictures import brand, layouts, measured, plots

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"


def pictures() -> dict[Path, str]:
    """Return the text of every picture by its file."""
    made = {**brand.PICTURES, **layouts.PICTURES, **plots.PICTURES}
    drawn = {name: make() for name, make in made.items()} | measured.pictures()
    return {FOLDER / f"{name}.svg": text for name, text in drawn.items()}


def write() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for file, text in pictures().items():
        file.write_text(text, encoding="utf-8")
