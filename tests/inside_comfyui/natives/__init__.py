"""Tiny native models of the families, by family and kind."""

from natives import flux
from natives.case import Case

CASES: dict[str, Case] = {
    f"{family.__name__.rpartition('.')[2]} {kind}": case for family in (flux,) for kind, case in family.CASES.items()
}
