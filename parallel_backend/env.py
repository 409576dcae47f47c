"""The environment variables of Parallel DiT: name, type, default and meaning of each.

Values are read where they are needed, and never at import. Some may also be chosen in ComfyUI's page (``saved``), and
the environment goes before that. The table in ``docs/reference.md`` is made from this file by
``python -m scripts.generate``.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

from . import saved
from .errors import InvalidRequest

T = TypeVar("T")

MAX_CPU_RANKS = 16

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True, kw_only=True)
class Variable(Generic[T]):
    """An environment variable. Its ``str`` is its name.

    Attributes:
        name: begins with ``PARALLEL_DIT_``.
        type: in words, for the reference page.
        parse: makes the value from a text that is not empty. It raises ``ValueError`` for an invalid text.
        default: the value if the variable is not set, or empty.
        unset: the default in words, for the reference page.
        meaning: a sentence for the reference page.
        wanted: the rule for the text, for the refusal: ``it must be a number``.
        set_by: who sets it.
        in_page: whether ComfyUI's page offers it.
    """

    name: str
    type: str
    parse: Callable[[str], T]
    default: T
    unset: str
    meaning: str
    wanted: str = ""
    set_by: Literal["user", "tests and lab", "backend"] = "user"
    in_page: bool = False

    def __str__(self) -> str:
        return self.name

    def get(self) -> T:
        """Read the environment and the settings of the page, and return the value.

        Raises:
            InvalidRequest: the text is invalid; the sentence names it and what would work.
        """
        return self.of(os.environ.get(self.name) or self.chosen)

    @property
    def chosen(self) -> str:
        """The text that the user has chosen in ComfyUI's page; "" without one."""
        return saved.texts(settings_file()).get(self.name, "") if self.in_page else ""

    def of(self, text: str) -> T:
        """Return the value of a text; the default if it is empty.

        Raises:
            InvalidRequest: the text is invalid; the sentence names it and what would work.
        """
        try:
            return self.parse(text) if text else self.default
        except ValueError as error:
            raise InvalidRequest(f"{self.name}={text}: {self.wanted}") from error

    def is_set(self) -> bool:
        """Whether the environment sets it to a text that is not empty."""
        return bool(os.environ.get(self.name))

    def set(self, text: str) -> None:
        """Set it for this process and its future children."""
        os.environ[self.name] = text


@contextlib.contextmanager
def changed(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the time of a ``with`` block."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


def seconds(text: str) -> float:
    """Return a number of seconds, 0 or more and finite.

    Raises:
        ValueError: the text is not such a number.
    """
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError(text)
    return number


def count(text: str) -> int:
    """Return a whole number, 0 or more.

    Raises:
        ValueError: the text is not such a number.
    """
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


def _cpu_ranks(text: str) -> int:
    number = count(text)
    if not 1 <= number <= MAX_CPU_RANKS:
        raise ValueError(text)
    return number


def _size(text: str) -> int:
    parsed = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?B)?", text, re.IGNORECASE)
    nbytes = int(float(parsed[1]) * _UNITS[(parsed[2] or "").upper()]) if parsed else 0
    if nbytes < 1:
        raise ValueError(text)
    return nbytes


def _collectives(text: str) -> Literal["nccl", "gloo"]:
    if text == "nccl":
        return "nccl"
    if text == "gloo":
        return "gloo"
    raise ValueError(text)


def _factors(text: str) -> Mapping[int, float]:
    factors = {int(rank): float(factor) for rank, _, factor in (word.partition("=") for word in text.split())}
    if any(factor < 1 for factor in factors.values()):
        raise ValueError(text)
    return factors


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(text)
        return text

    return parse


def _devices(text: str) -> str:
    if not re.fullmatch(r"[\w:.@, -]{1,1000}", text):
        raise ValueError(text)
    return text


def _folder(text: str) -> Path:
    return Path(text).absolute()


def _folders(text: str) -> tuple[Path, ...]:
    return tuple(Path(each) for each in text.split(os.pathsep) if each)


PYTHON = Variable[str](
    name="PARALLEL_DIT_PYTHON", type="program", parse=str, default="", unset="ComfyUI's",
    meaning="The Python of the backend, with `requirements.txt` installed there. ComfyUI's Python then needs neither "
    "diffusers nor transformers for these nodes.",
)  # fmt: skip
IDLE_TIMEOUT = Variable[float | None](
    name="PARALLEL_DIT_IDLE_TIMEOUT", type="seconds", parse=seconds, default=None, unset="600; with `--listen` 0",
    meaning="After this time without work the backend ends; 0 for never.",
    wanted="it must be a number of seconds, 0 or more", in_page=True,
)  # fmt: skip
DEVICES = Variable[str](
    name="PARALLEL_DIT_DEVICES", type="as in the nodes", parse=_devices, default="all", unset="`all`",
    meaning="The devices that `all` in a node means, such as `0,1` where other programs use the other GPUs. With "
    "several hosts `all` still means all of them.",
    wanted="write all, or numbers such as 0,1", in_page=True,
)  # fmt: skip
MODE = Variable[str](
    name="PARALLEL_DIT_MODE", type="`auto` or `memory`", parse=_one_of("auto", "memory"), default="auto",
    unset="`auto`",
    meaning="How the ranks share the work where no Parallel Layout says it. `auto`: the weights whole on each rank if "
    "they fit, and otherwise shared. `memory`: always one copy of the weights, shared by all ranks.",
    wanted="it must be auto or memory", in_page=True,
)  # fmt: skip
PREVIEWS = Variable[str](
    name="PARALLEL_DIT_PREVIEWS", type="`on` or `off`", parse=_one_of("on", "off"), default="on", unset="`on`",
    meaning="Whether Parallel Sampler sends previews, of the kind that ComfyUI is set to. `off` spares the transfer.",
    wanted="it must be on or off", in_page=True,
)  # fmt: skip
LOG_LEVEL = Variable[str](
    name="PARALLEL_DIT_LOG_LEVEL", type="`DEBUG`, `INFO` or `WARNING`",
    parse=_one_of("DEBUG", "INFO", "WARNING"), default="INFO", unset="`INFO`",
    meaning="What a backend that starts writes into its logs.",
    wanted="it must be DEBUG, INFO or WARNING", in_page=True,
)  # fmt: skip
SETTINGS = Variable[Path | None](
    name="PARALLEL_DIT_SETTINGS", type="file", parse=_folder, default=None,
    unset="`parallel-dit/settings.json` in `$XDG_CONFIG_HOME` or `~/.config`",
    meaning="What is chosen in ComfyUI's settings. The variables of this table go before it.",
)  # fmt: skip
SPARES = Variable[int | None](
    name="PARALLEL_DIT_SPARES", type="number", parse=count, default=None, unset="as many as fit",
    meaning="The number of spare ranks on this machine; 0 for none. Without it there are as many as the last set had "
    "ranks here, or as the last prompt that began without ranks asks for, or before both as there are GPUs (of another "
    "host, those that its `--devices` names), if all of them take at most a sixteenth of the machine's memory, at 400 "
    "MiB each, and a tenth of it stays free. Otherwise there are none.",
    wanted="it must be a number, 0 or more",
)  # fmt: skip
CPU_RANKS = Variable[int](
    name="PARALLEL_DIT_CPU_RANKS", type="number", parse=_cpu_ranks, default=2, unset="2",
    meaning="The number of ranks that `all` means where there is no GPU; beside other accelerators it has to be set.",
    wanted=f"it must be a number from 1 to {MAX_CPU_RANKS}",
)  # fmt: skip
MEMORY_LIMIT = Variable[int | None](
    name="PARALLEL_DIT_MEMORY_LIMIT", type="size", parse=_size, default=None, unset="all",
    meaning="The most memory that one rank may use, in bytes or with a unit (`20GB`). A CPU rank counts weights, and a "
    "GPU rank all that PyTorch allocates. What has no room streams from the machine's memory. A limit of the container "
    "or Slurm job counts, too: the machine's memory is what its control group leaves.",
    wanted="write a rank's memory in bytes, or with a unit, such as 20GB",
)  # fmt: skip
COLLECTIVES = Variable[Literal["nccl", "gloo"]](
    name="PARALLEL_DIT_COLLECTIVES", type="`nccl` or `gloo`", parse=_collectives, default="nccl", unset="`nccl`",
    meaning="With `gloo`, GPU ranks talk through gloo and the CPU's memory instead of NCCL, for tests on one GPU.",
    wanted="it must be nccl or gloo",
)  # fmt: skip
RUNTIME = Variable[Path | None](
    name="PARALLEL_DIT_RUNTIME", type="folder", parse=_folder, default=None, unset="`$XDG_RUNTIME_DIR/parallel-dit`",
    meaning="The folder of the socket. Where there can be none, or its path is too long for a socket, it is "
    "`/tmp/parallel-dit-<uid>`, which the log and `status` then say.",
)  # fmt: skip
LOGS = Variable[Path | None](
    name="PARALLEL_DIT_LOGS", type="folder", parse=_folder, default=None, unset="`logs` in the folder above",
    meaning="The folder of the logs; one for each backend. A reboot or a logout empties the default.",
)  # fmt: skip
MODELS = Variable[tuple[Path, ...]](
    name="PARALLEL_DIT_MODELS", type="folders, separated by `:`", parse=_folders, default=(),
    unset="`models` of the ComfyUI around the extension",
    meaning="On [further hosts](hosts.md), and for ComfyUI on another machine: where ranks look for a model by its "
    "name and content.",
)  # fmt: skip
BACKEND = Variable[str](
    name="PARALLEL_DIT_BACKEND", type="`HOST:PORT` or `unix:/PATH`", parse=str, default="",
    unset="this machine's",
    meaning="A backend on [another machine](machines.md), which this one then uses and never starts.",
)  # fmt: skip
CERTIFICATES = Variable[Path | None](
    name="PARALLEL_DIT_CERTIFICATES", type="folder", parse=_folder, default=None,
    unset="`parallel-dit/certificates` in `$XDG_CONFIG_HOME` or `~/.config`",
    meaning="The folder of the certificates for that.",
)  # fmt: skip
HANDICAP = Variable[Mapping[int, float]](
    name="PARALLEL_DIT_HANDICAP", type="`RANK=FACTOR` with spaces between", parse=_factors, default={}, unset="none",
    meaning="Ranks that sleep, to try unequal devices on equal ones: with `1=2` rank 1 takes twice as long.",
    wanted="write RANK=FACTOR with factors of at least 1, such as 1=2", set_by="tests and lab",
)  # fmt: skip
HOST = Variable[str](
    name="PARALLEL_DIT_HOST", type="name", parse=str, default="", unset="the first host",
    meaning="The host of a rank.", set_by="backend",
)  # fmt: skip
LAB = Variable[str](
    name="PARALLEL_DIT_LAB", type="module", parse=str, default="", unset="none",
    meaning="The module whose class `LabEngine` ranks use instead of `Engine`. The lab's commands set it.",
    set_by="tests and lab",
)  # fmt: skip


def settings_file() -> Path:
    """Return the file of what is chosen in ComfyUI's page."""
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return SETTINGS.get() or Path(config) / "parallel-dit" / "settings.json"


def variables() -> list["Variable[object]"]:
    """Return all of them, in the order of this file."""
    return [each for each in globals().values() if isinstance(each, Variable)]
