"""The page's modules: small, with the same texts in each language, and of this origin alone."""

import json
import re
from pathlib import Path

import pytest

from scripts import registry

ROOT = Path(__file__).parents[2]
WEB = ROOT / "web"
MODULES = sorted(WEB.rglob("*.js"))
LANGUAGES = sorted((WEB / "texts").glob("*.js"))
KEY = re.compile(r'^  "?([\w. ]+)"?: "(.*)",$', re.MULTILINE)


def texts(file: Path) -> dict[str, str]:
    return dict(KEY.findall(file.read_text(encoding="utf-8")))


def test_there_are_modules_and_languages() -> None:
    assert len(MODULES) > 15
    assert [file.stem for file in LANGUAGES] == ["en", "zh"]


@pytest.mark.parametrize("file", LANGUAGES, ids=lambda file: file.stem)
def test_every_language_has_every_text_with_the_same_values(file: Path) -> None:
    english, other = texts(WEB / "texts" / "en.js"), texts(file)
    assert len(english) > 100
    assert other.keys() == english.keys()
    for key, text in english.items():
        assert set(re.findall(r"\{\w+\}", other[key])) == set(re.findall(r"\{\w+\}", text)), key


def test_every_text_that_a_module_asks_for_is_there_and_every_text_is_asked_for() -> None:
    code = "".join(file.read_text(encoding="utf-8") for file in MODULES if file.parent.name != "texts")
    english = texts(WEB / "texts" / "en.js")
    asked = set(re.findall(r'\bt\(\s*"([\w. ]+)"', code)) | set(re.findall(r'(?:doing|known)\("([\w. ]+)"', code))
    assert asked - english.keys() == set()
    prefixes = tuple(re.findall(r"`([\w.]+\.)\$\{", code))
    assert "state." in prefixes
    quoted = set(re.findall(r'"([\w. ]+)"', code))
    assert [key for key in english if key not in quoted and not key.startswith(prefixes)] == []


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(WEB)))
def test_a_module_is_small_says_what_it_is_and_stays_here(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 300
    assert text.startswith("/**")
    assert re.findall(r"""(?:import|from)\s*\(?["'](?!\.)""", text) == []
    addresses = set(re.findall(r"https?://[\w./-]+", text))
    ours = registry.repository(registry.PROJECT.read_text(encoding="utf-8"))
    assert addresses <= {ours, "http://www.w3.org/2000/svg"}
    assert "innerHTML" not in text
    assert "eval(" not in text


@pytest.mark.parametrize("name", ["main", "nodeDefs", "commands", "settings"])
def test_english_and_chinese_have_the_same_keys(name: str) -> None:
    assert locale_keys("en", name) == locale_keys("zh", name)


@pytest.mark.parametrize("language", ["ja", "ko"])
def test_other_languages_have_names_and_tooltips_of_all_nodes(language: str) -> None:
    assert locale_keys(language, "nodeDefs") == locale_keys("en", "nodeDefs")


def locale_keys(language: str, name: str) -> set[str]:
    def keys(value: object, path: str = "") -> set[str]:
        if not isinstance(value, dict):
            return {path}
        return {found for key, inner in value.items() for found in keys(inner, f"{path}/{key}")}

    return keys(json.loads((ROOT / "locales" / language / f"{name}.json").read_text(encoding="utf-8")))


def test_the_locales_name_every_setting_and_command() -> None:
    code = "".join(file.read_text(encoding="utf-8") for file in MODULES)
    settings = set(re.findall(r'"(ParallelDiT\.Backend\.\w+)"', code))
    commands = set(re.findall(r'"(ParallelDiT\.MakeParallel)"', code))
    for kind, ids in (("settings", settings), ("commands", commands)):
        named = json.loads((ROOT / "locales" / "en" / f"{kind}.json").read_text())
        assert {each.replace(".", "_") for each in ids} == named.keys()
