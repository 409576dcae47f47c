"""The parts of the check, the most valuable first. To add one, add an entry to ``PARTS``."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from parallel_backend import env

LIMIT = 480.0
"""Seconds that a part may take."""

ONE_CARD = {env.COLLECTIVES.name: "gloo"}
"""Lets two ranks share a card, which NCCL refuses."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One command of a part.

    Attributes:
        title: what the command shows.
        command: arguments of the Python interpreter. Its last line may be a JSON object with figures.
        environment: variables that it needs.
        cards: number of GPUs with which it shows everything.
        rest: what it shows with fewer GPUs; empty if it does not run then.
    """

    title: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    cards: int = 1
    rest: str = ""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Checks that run one after another within ``LIMIT``.

    Attributes:
        number: what ``--part`` takes.
        title: its subject.
        checks: its commands.
    """

    number: int
    title: str
    checks: tuple[Check, ...]


def _module(name: str, *options: str) -> tuple[str, ...]:
    return "-m", f"lab.gpu_check.{name}", *options


PARTS: tuple[Part, ...] = (
    Part(number=1, title="Kernels, and what TF32 costs", checks=(
        Check(title="tests/gpu", command=("-m", "pytest", "-q", "tests/gpu")),
        Check(title="float32 with and without TF32, heads up to 512", command=_module("precision"),
              rest="float32 on the CPU"),
    )),
    Part(number=2, title="Every family and VAE on two ranks of one card", checks=(
        Check(title="families in float32 and bfloat16", command=_module("families"), environment=ONE_CARD,
              rest="two CPU ranks"),
        Check(title="VAEs in float32 and half precision", command=_module("vaes"), environment=ONE_CARD,
              rest="two CPU ranks"),
    )),
    Part(number=3, title="NCCL with one rank", checks=(
        Check(title="exchanges, groups and out of memory", command=_module("nccl"), rest="gloo with one CPU rank"),
    )),
    Part(number=4, title="Host time against GPU time", checks=(
        Check(title="a forward on rank 0 of 1, 4 and 8", command=_module("host_time"),
              rest="the time of small models on the CPU"),
    )),
    Part(number=5, title="Attention kernels at real shapes", checks=(
        Check(title="milliseconds with and without log-sum-exp", command=_module("attention"),
              rest="the CPU's kernel with a 32nd of the tokens"),
    )),
    Part(number=6, title="A VAE's dtype and memory format", checks=(
        Check(title="seconds, memory and error of a decode", command=_module("vae_formats"),
              rest="small VAEs on the CPU, without TF32 and memory"),
    )),
    Part(number=7, title="Failures", checks=(
        Check(title="out of memory, killed and stopped ranks, cancel, memory afterwards", command=_module("failures"),
              environment=ONE_CARD, rest="two CPU ranks, without the card's memory"),
    )),
    Part(number=8, title="Two cards or more", checks=(
        Check(title="every exchange on every axis of every layout", command=_module("several.exchanges"), cards=2,
              rest="gloo between four CPU ranks"),
        Check(title="exchanges under computation", command=_module("several.overlap"), cards=2,
              rest="small shapes on two CPU ranks"),
        Check(title="a step against other projects", command=_module("several.peers"), cards=2,
              rest="a small shape on two CPU ranks"),
        Check(title="unlike cards", command=_module("several.unlike"), cards=2,
              rest="two CPU ranks, one of which sleeps, or has less memory"),
    )),
    Part(number=9, title="A model file in ComfyUI", checks=(
        Check(title="seconds of a prompt, and how far its latent is from ComfyUI's own", command=_module("comfyui"),
              rest="a small model on one CPU rank"),
    )),
    Part(number=10, title="Compiled blocks, and the planner", checks=(
        Check(title="a step with and without compiled blocks", command=_module("compiled"),
              rest="small blocks on one CPU rank"),
        Check(title="a probe, and predicted and measured steps", command=_module("planned"),
              rest="a small shape on two CPU ranks"),
    )),
)  # fmt: skip
"""By number."""
