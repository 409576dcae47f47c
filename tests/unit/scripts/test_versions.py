"""What says which versions work says the same everywhere."""

from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[3]


def bounds(file: str) -> dict[str, Version]:
    """The version behind a package's first operator, ``>=`` or ``==``, by the package's name."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    parsed = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {
        canonicalize_name(each.name): Version(next(iter(each.specifier)).version) for each in parsed if each.specifier
    }


def test_every_package_that_is_needed_has_a_lowest_version_which_is_tested():
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").split()
    needed, lowest, newest = map(bounds, ("requirements.txt", "constraints-lowest.txt", "constraints.txt"))
    assert [line for line in lines if ">=" not in line] == []
    assert {name: lowest[name] for name in needed} == needed
    assert [name for name in needed if newest[name] < needed[name]] == []


def test_the_lowest_versions_are_enough_for_the_tests():
    lowest, dev = bounds("constraints-lowest.txt"), bounds("requirements-dev.txt")
    assert [name for name in dev if lowest[name] < dev[name]] == []


def test_torchvision_fits_torch():
    for file in ("constraints-lowest.txt", "constraints.txt"):
        found = bounds(file)
        assert found["torchvision"].minor == found["torch"].minor + 15


def test_the_readme_names_torch_as_the_requirements_do():
    torch = bounds("requirements.txt")["torch"]
    assert f"asks for torch {torch} or newer" in (ROOT / "README.md").read_text(encoding="utf-8")
