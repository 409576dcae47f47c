"""Every family has every step of ``docs/adding-a-family.md``, which quotes what is said when one is missing."""

import re
import shutil
from pathlib import Path

import pytest

from tests.support import recipe

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/adding-a-family.md").read_text(encoding="utf-8")
FLUX = next(family for family in recipe.families(ROOT) if family.folder == "flux")


def test_no_family_lacks_a_step():
    assert list(recipe.missing(ROOT)) == []


@pytest.fixture
def copy(tmp_path):
    """A copy of what the steps of Flux.1 look at, without the other families' rows."""
    files = {recipe.REGISTRY, *(recipe.filled(step.file, ROOT, FLUX) for step in recipe.STEPS)}
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    registry = tmp_path / recipe.REGISTRY
    rows = re.sub(r'    ".*": Row\((?!folder="flux",).*\n', "", registry.read_text(encoding="utf-8"))
    registry.write_text(rows, encoding="utf-8")
    assert list(recipe.missing(tmp_path)) == []
    return tmp_path


@pytest.mark.parametrize("step", recipe.STEPS, ids=lambda step: step.sentence)
def test_a_step_that_is_taken_away_is_missed_in_the_recipes_words(step, copy):
    path = copy / recipe.filled(step.file, copy, FLUX)
    text = path.read_text(encoding="utf-8")
    path.write_text(re.sub(recipe.filled(step.pattern, copy, FLUX, escape=True), "", text), encoding="utf-8")
    sentence = recipe.filled(step.sentence, copy, FLUX)
    assert list(recipe.missing(copy)) == [sentence]
    assert sentence in PAGE


def test_a_row_that_is_taken_away_is_missed_in_the_recipes_words(copy):
    registry = copy / recipe.REGISTRY
    registry.write_text(re.sub(r'    ".*": Row\(.*\n', "", registry.read_text(encoding="utf-8")), encoding="utf-8")
    sentence = recipe.NO_ROW.format(folder="flux")
    assert list(recipe.missing(copy)) == [sentence]
    assert sentence in PAGE


def test_the_recipe_names_every_file():
    for step in recipe.STEPS:
        assert step.file.format(folder="flux") in PAGE, step.file
