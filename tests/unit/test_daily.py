"""``daily(n)`` and ``--cases N`` leave so many cases of each test, which meet as many values as they can."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.daily import mark_long


class Case:
    """A test as pytest collects it."""

    def __init__(
        self, name: str, number: int, daily: int = 0, version: str = "", long: bool = False, id: str = ""
    ) -> None:
        self.parent, self.originalname, self.number, self.version = "file", name, number, version
        self.callspec = SimpleNamespace(id=id or str(number))
        self.marks: dict[str, Any] = {"daily": SimpleNamespace(args=(daily,))} if daily else {}
        if long:
            self.add_marker("long")

    def get_closest_marker(self, name: str) -> Any:
        return self.marks.get(name)

    def add_marker(self, name: str) -> None:
        self.marks[name] = SimpleNamespace(args=())


def left(cases: list[Any], at_most: int | None = None) -> list[int]:
    mark_long(cases, version_of=lambda case: case.version, at_most=at_most)
    return [case.number for case in cases if "long" not in case.marks]


@pytest.mark.parametrize(
    ("count", "numbers"), [(1, [0]), (2, [0, 5]), (3, [0, 3, 6]), (10, [*range(10)]), (40, [*range(10)])]
)
def test_cases_at_even_distances_are_left(count, numbers):
    assert left([Case("test", number, count) for number in range(10)]) == numbers


def test_every_value_is_met_where_parametrize_stands_twice():
    names = [f"{layout}-{sampler}" for layout in ("ulysses", "cfg", "ring") for sampler in ("a", "b")]
    cases = [Case("test", number, 3, id=name) for number, name in enumerate(names)]
    met = [names[number].split("-") for number in left(cases)]
    assert {layout for layout, _ in met} == {"ulysses", "cfg", "ring"}
    assert {sampler for _, sampler in met} == {"a", "b"}


def test_each_test_and_each_version_has_its_own():
    cases = [Case(name, number, 1, version) for name in "ab" for version in ("1", "2") for number in range(3)]
    assert left(cases) == [0, 0, 0, 0]


def test_others_are_left_alone_and_long_ones_stay_long():
    assert left([Case("plain", 1), Case("plain", 2), Case("test", 3, 1, long=True), Case("test", 4, 1)]) == [1, 2, 4]


def test_cases_of_the_grid_are_not_counted():
    cases = [Case("test", number, 1) for number in range(3)]
    cases[0].add_marker("grid")
    assert left(cases) == [0, 1]


def test_cases_are_limited_for_every_test_but_those_that_need_all():
    cases = [Case(name, number, daily) for name, daily in (("a", 0), ("b", 1), ("all", 0)) for number in range(4)]
    for case in cases[8:]:
        case.add_marker("every_case")
    assert left(cases, at_most=2) == [0, 2, 0, 0, 1, 2, 3]
