"""Count how often the host waits for a GPU, and make docs/synchronisations.md: ``python -m lab synchronisations``.

It needs no GPU: small models run on tensors that pretend to be on one (``tests/support/stand_in``).
"""

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from lab.verify.vae.kinds import KINDS
from parallel_backend.verify import examples
from tests.support.stand_in import counts
from tests.support.stand_in.counts import Counts
from tests.support.stand_in.notes import Wait

PAGE = Path(__file__).parents[1] / "docs" / "synchronisations.md"

_REASONS: Mapping[tuple[str, str], tuple[str, str]] = {
    ("distributed/rank_speeds.py", "Stream.synchronize"): (
        "cancel",
        "Before each step of a loop, and after about a tenth of a second of a VAE's parts, rank 0 lets the GPU finish "
        "and then asks whether the request was cancelled. Otherwise the host queues steps ahead, and a cancel takes "
        "effect late. The count is that of a part which takes as long.",
    ),
    ("denoiser/attention_chain.py", "aten._to_copy.default"): (
        "mask",
        "Masked text tokens are left out of attention, and the number of those that are left is a shape. The host "
        "reads the mask once for each batch of branches, before the first block.",
    ),
    ("denoiser/denoiser.py", "aten.equal.default"): (
        "positions",
        "Branches with the same positions of reference images run as one batch. The host compares them once a request, "
        "so a loop does it before its first step.",
    ),
    ("z_image/transformer.py", "aten.index.Tensor"): (
        "text",
        "Z-Image's masked text tokens are taken out before its layers for text, sample by sample, and the number of "
        "those that are left is a shape. A run does it once.",
    ),
    ("autoencoder/codec.py", "Event.synchronize"): (
        "frames",
        "The frames of a part are copied to pinned memory while the GPU computes the next part, so that it never holds "
        "a whole video. The host waits for them when that part is queued, so the GPU does not. VAEs whose parts are "
        "convolutions do it after the last part, which is not counted here. MiniMax-H3's parts are seconds of video, "
        "so the host also asks in each whether it was cancelled.",
    ),
}
"""By the end of a file's name and what waits there: a word for it, and why it is needed."""

_INTRODUCTION = """\
# Where the host waits for a GPU

A GPU works through a queue that the host fills. When the host has to know something that the GPU computes, it waits \
until the queue is empty, and the GPU then waits for new work. Each such wait is counted here, on one rank. Other \
layouts add none, but for `pipe`, which reads the mask of each sample by itself, once a request, and `ulysses`, whose \
ranks wait once in the first layers when they choose a way to exchange.

The models are small, with two samples, and with two branches whose texts differ in length in a step and are equal in \
a forward. They run without a GPU, on tensors that hold their numbers on the CPU and say that they are on a GPU. \
`python -m lab synchronisations --write` makes this page, and a test counts again and fails where there \
are more: four models each time, and all of them with `bash scripts/test.sh --long`.

A forward also waits for the copy of each input to the GPU, before there is other work, and for that of each \
prediction to the CPU, after all of it. Neither these nor the copies of a model that loads are counted.
"""


def count_all() -> Iterator[tuple[str, Counts]]:
    """Yield the counts of every variant of every family, and of every VAE, by a name."""
    with tempfile.TemporaryDirectory(prefix="synchronisations-") as folder:
        for class_name, variant in examples.variants():
            name = f"{examples.short_name(class_name)} {variant}"
            yield name, counts.of_family(class_name, variant, Path(folder) / name)
        for kind in KINDS:
            yield f"vae {kind}", counts.of_vae(kind, Path(folder) / f"vae {kind}")


def page(counted: Iterable[tuple[str, Counts]]) -> str:
    """Return the text of the page."""
    rows = [(name, each) for name, each in counted]
    waits = [wait for _, each in rows for work in each.by_work.values() for wait in work]
    used = {_reason(wait) for wait in waits}
    families = [row for row in rows if "step" in row[1].by_work]
    vaes = [row for row in rows if "step" not in row[1].by_work]
    return "\n".join(
        [
            _INTRODUCTION,
            *_table("| model | a forward | a step |", ("forward", "step"), families),
            "",
            *_table("| VAE | a part of a decode | a part of an encode |", ("decode", "encode"), vaes),
            "",
            *(f"- **{word}**: {why}" for word, why in _REASONS.values() if (word, why) in used),
            "",
        ]
    )


def _table(heading: str, works: Sequence[str], rows: Iterable[tuple[str, Counts]]) -> list[str]:
    cells = ((name, *(_cell(each.by_work[work]) for work in works)) for name, each in rows)
    return [heading, "|---" * (1 + len(works)) + "|", *(f"| {' | '.join(row)} |" for row in cells)]


def _cell(waits: Sequence[Wait]) -> str:
    words = Counter(_reason(wait)[0] for wait in waits)
    return f"{len(waits)}: {', '.join(f'{count} {word}' for word, count in words.items())}" if waits else "0"


def _reason(wait: Wait) -> tuple[str, str]:
    for line in reversed(wait.where.split(", ")):
        for (file, op), reason in _REASONS.items():
            if op == wait.op and line.rpartition(":")[0].endswith(file):
                return reason
    raise LookupError(f"nothing says why the host waits: {wait}. Make it wait no more, or give a reason for it here")


def numbers(text: str) -> dict[str, tuple[int, int]]:
    """Return both counts of every row of the page."""
    rows = re.findall(r"^\| (.+?) \| (\d+)(?::[^|]*)? \| (\d+)(?::[^|]*)? \|$", text, re.MULTILINE)
    return {name: (int(first), int(second)) for name, first, second in rows}


def grown(text: str, counted: Iterable[tuple[str, Counts]]) -> list[str]:
    """Return the waits of every row with more than the page says."""
    known = numbers(text)
    return [
        f"{name}, {work}: {len(waits)} waits instead of {limit}: {'; '.join(map(str, waits))}"
        for name, each in counted
        for (work, waits), limit in zip(each.by_work.items(), known.get(name, (0, 0)), strict=True)
        if len(waits) > limit
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} instead of printing it")


def run(options: argparse.Namespace) -> int:
    """Print the page, or write it; return the exit status."""
    text = page(count_all())
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0
