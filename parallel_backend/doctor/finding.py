"""What a check finds, and what all checks are told."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["fine", "slow", "broken", "not here"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the doctor.

    Attributes:
        check: what was checked.
        verdict: ``slow`` means that it works, but not as well as it could. ``not here`` means that there is nothing to
            check, such as no GPU.
        text: what was found.
        advice: what to do; "" where nothing is to be done.
    """

    check: str
    verdict: Verdict
    text: str
    advice: str = ""


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
