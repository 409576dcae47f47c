"""What a person may ask of a layout that nobody names."""

from dataclasses import dataclass

from ..errors import InvalidRequest

MODES: tuple[str, ...] = ("auto", "fastest", "fit memory", "fit memory over slow links", "allow approximate")
AUTO, FASTEST, FIT, FIT_SLOW, APPROXIMATE = MODES


@dataclass(frozen=True, kw_only=True)
class LayoutMode:
    """What stands for a layout where the ranks choose one.

    Attributes:
        name: one of ``MODES``.

    Raises:
        InvalidRequest: there is no such mode.
    """

    name: str

    def __post_init__(self) -> None:
        if self.name not in MODES:
            raise InvalidRequest(f"mode {self.name!r}: choose one of {', '.join(MODES)}")
