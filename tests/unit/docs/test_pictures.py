"""The pictures and tables of the documentation are those that the scripts make from code and from the pages."""

import xml.etree.ElementTree as ElementTree

import pytest

from scripts import models_table
from scripts.docs_pictures import files, plots, tables

PICTURES = files.pictures()


@pytest.mark.parametrize("file", PICTURES, ids=lambda file: file.name)
def test_picture_is_the_one_that_the_script_draws(file):
    assert file.read_text(encoding="utf-8") == PICTURES[file], "run python -m scripts.docs_pictures"


def test_no_other_picture_is_there():
    assert set(files.FOLDER.iterdir()) == set(PICTURES)


@pytest.mark.parametrize("file", PICTURES, ids=lambda file: file.name)
def test_picture_is_svg_with_a_title_and_loads_nothing(file):
    root = ElementTree.fromstring(PICTURES[file])
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.findtext("{http://www.w3.org/2000/svg}title")
    assert not [each for each in root.iter() if each.tag.endswith(("script", "image", "use", "foreignObject"))]


def test_every_picture_but_icon_and_banner_is_on_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in tables.DOCS.glob("*.md"))
    assert [file.name for file in PICTURES if f"(pictures/{file.name})" not in text] == ["icon.svg", "banner.svg"]


def test_a_plot_follows_its_table(tmp_path, monkeypatch):
    for page in ("benchmarks.md", "vae.md", "approximate.md"):
        text = (tables.DOCS / page).read_text(encoding="utf-8")
        (tmp_path / page).write_text(text.replace("1.71x", "1.31x").replace("| 15.8 |", "| 9.8 |"), encoding="utf-8")
    before = plots.speedups()
    monkeypatch.setattr(tables, "DOCS", tmp_path)
    assert "1.71x" in before
    assert "1.31x" in plots.speedups()
    assert "1.71x" not in plots.speedups()


def test_a_table_that_is_gone_is_named(tmp_path, monkeypatch):
    (tmp_path / "vae.md").write_text("# A VAE\n", encoding="utf-8")
    monkeypatch.setattr(tables, "DOCS", tmp_path)
    with pytest.raises(ValueError, match=r"vae\.md has no table that begins with"):
        plots.vae()


def test_the_table_of_model_files_is_that_of_the_templates():
    text = models_table.PAGE.read_text(encoding="utf-8")
    assert models_table.page(text) == text, "run python -m scripts.generate"
    assert "`models/diffusion_models/z_image_turbo_bf16.safetensors`" in text


SCREENS = sorted(files.FOLDER.with_name("screens").iterdir())


def test_every_picture_of_the_page_is_small_and_shown():
    pages = [*tables.DOCS.glob("*.md"), tables.DOCS.parent / "README.md"]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert len(SCREENS) >= 9
    assert [file.name for file in SCREENS if file.stat().st_size > 150_000] == []
    assert [file.name for file in SCREENS if f"screens/{file.name})" not in text] == []
