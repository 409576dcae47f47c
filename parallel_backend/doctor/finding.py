"""What a check finds, and what all checks are told."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["fine", "slow", "broken", "not here"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the doctor.

    Attributes:
        check: the name of the check, which whoever runs it fills in.
        verdict: as the class methods say.
        text: what was found.
        advice: what to do; "" where nothing is to be done.
    """

    check: str = ""
    verdict: Verdict
    text: str
    advice: str = ""

    @classmethod
    def fine(cls, text: str) -> "Finding":
        """All is well."""
        return cls(verdict="fine", text=text)

    @classmethod
    def slow(cls, text: str, advice: str) -> "Finding":
        """It works, but not as well as it could."""
        return cls(verdict="slow", text=text, advice=advice)

    @classmethod
    def broken(cls, text: str, advice: str) -> "Finding":
        """It does not work."""
        return cls(verdict="broken", text=text, advice=advice)

    @classmethod
    def not_here(cls, text: str) -> "Finding":
        """There is nothing to check."""
        return cls(verdict="not here", text=text)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all checks are told.

    Attributes:
        folder: a temporary folder.
        devices: the option ``--devices``.
        comfyui: the option ``--comfyui``.
    """

    folder: str
    devices: str | None = None
    comfyui: str | None = None


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check.

    Attributes:
        name: what it checks.
        target: module and function, as ``"package.module:function"``. The function takes a ``Setting`` and returns
            findings.
        seconds: its deadline.
    """

    name: str
    target: str
    seconds: float
