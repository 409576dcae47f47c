"""Who holds and computes what, for each axis of a layout. Shares are those that the ranks compute."""

from functools import partial

from parallel_backend.layout.partition import Partition
from scripts.docs_pictures.svg import PALE, RANKS, Grid, arrow, legend, picture, text

FOUR = tuple(f"rank {i}" for i in range(4))


def owner(partition: Partition, item: int) -> str:
    """Return the colour of the rank that has an item."""
    return RANKS[next(i for i in range(len(partition.sizes)) if item in range(*_range(partition, i)))]


def _range(partition: Partition, rank: int) -> tuple[int, int]:
    part = partition.slice(rank)
    return part.start, part.stop


def _exchanged(title: str, left: Grid, right: Grid, words: str) -> str:
    """Two grids with an exchange between them."""
    height = 70 + max(left.rows, right.rows) * left.cell[1]
    second = 40 + left.width + 150
    parts = [left.at(40, 62), arrow(40 + left.width + 20, 62 + (height - 70) / 2, 100, words), right.at(second, 62)]
    return picture(second + max(right.width, 170) + 20, height + 34, title, [*parts, legend(40, height + 16, FOUR)])


def ulysses() -> str:
    """Tokens between attention layers, heads in them."""
    tokens, heads = Partition.even(10, 4), Partition.even(5, 4)
    left = Grid(title="other layers: own tokens", rows=10, columns=5, down="tokens", across="heads, features",
                colour=lambda row, column: owner(tokens, row))  # fmt: skip
    right = Grid(title="attention: own heads", rows=10, columns=5, down="tokens", across="heads",
                 colour=lambda row, column: owner(heads, column))  # fmt: skip
    return _exchanged("ulysses=4: ten tokens and five heads on four ranks", left, right, "exchange")


def dsp() -> str:
    """Frames in the layers of a frame, places in the layers of time."""
    frames, places = Partition.even(6, 4), Partition.even(9, 4)
    left = Grid(title="layers of frames: own frames", rows=6, columns=9, down="frames", across="tokens of a frame",
                colour=lambda row, column: owner(frames, row))  # fmt: skip
    right = Grid(title="layers of time: own places", rows=6, columns=9, down="frames", across="tokens of a frame",
                 colour=lambda row, column: owner(places, column))  # fmt: skip
    return _exchanged("dsp=4: six frames of nine tokens on four ranks", left, right, "exchange")


def ring() -> str:
    """Each rank's queries against one rank's keys after another."""

    def grid(turn: int) -> Grid:
        return Grid(
            title=f"turn {turn + 1}", rows=4, columns=4, across="keys and values of", down="queries of rank",
            colour=partial(_met, turn), words=partial(_from, turn),
        )  # fmt: skip

    parts = [grid(turn).at(40 + turn * 150, 62) for turn in range(4)]
    return picture(640, 180, "ring=4: keys and values go from rank to rank", [*parts, legend(40, 164, FOUR)])


def _met(turn: int, row: int, column: int) -> str:
    return RANKS[row] if (row - turn) % 4 == column else PALE


def _from(turn: int, row: int, column: int) -> str:
    return str(column) if (row - turn) % 4 == column else ""


def cfg() -> str:
    """A branch a rank."""
    grid = Grid(title="one step with guidance", rows=2, columns=1, cell=(330, 30),
                colour=lambda row, column: RANKS[row],
                words=lambda row, column: f"{('positive', 'negative')[row]} prompt, all tokens")  # fmt: skip
    joined = [grid.at(40, 56), arrow(390, 86, 100, "once a step"), text(505, 90, "guided prediction")]
    return picture(640, 160, "cfg=2: each rank has one of the two prompts", [*joined, legend(40, 142, FOUR[:2])])


def data() -> str:
    """Samples of a batch."""
    share = Partition.even(5, 2)
    grid = Grid(title="a batch of five", rows=1, columns=5, cell=(90, 40),
                words=lambda row, column: f"image {column + 1}",
                colour=lambda row, column: owner(share, column))  # fmt: skip
    return picture(640, 150, "data=2: five images on two ranks", [grid.at(40, 56), legend(40, 132, FOUR[:2])])


def tensor() -> str:
    """Weight matrices by columns, then by rows."""
    heads = Partition.even(6, 4)
    first = Grid(title="first matrix: by columns", rows=6, columns=6, colour=lambda row, column: owner(heads, column),
                 down="inputs", across="heads, hidden features")  # fmt: skip
    second = Grid(title="second matrix: by rows", rows=6, columns=6, colour=lambda row, column: owner(heads, row),
                  down="heads, hidden features", across="outputs, which the ranks add up")  # fmt: skip
    parts = [first.at(40, 62), arrow(216, 116, 90, "own part"), second.at(346, 62), legend(40, 204, FOUR)]
    return picture(640, 222, "tensor=4: each weight matrix in four parts", parts)


def pipe() -> str:
    """Ranges of layers, and patches that stream through them."""
    layers = Partition.even(8, 4)
    stack = Grid(title="layers", rows=8, columns=1, cell=(70, 15), colour=lambda row, column: owner(layers, row),
                 words=lambda row, column: f"layer {row + 1}")  # fmt: skip
    time = Grid(title="patches in two steps", rows=4, columns=11, cell=(38, 28), across="time", down="",
                colour=lambda row, column: RANKS[row] if _is_busy(row, column) else PALE,
                words=lambda row, column: str((column - row) % 4 + 1) if _is_busy(row, column) else "")  # fmt: skip
    parts = [stack.at(40, 62), time.at(170, 62), legend(40, 212, FOUR)]
    return picture(640, 230, "pipe=4: four patches stream through four ranges of layers", parts)


def _is_busy(rank: int, time: int) -> bool:
    return 0 <= time - rank < 8


def shard_weights() -> str:
    """One copy of the weights, gathered block by block."""
    parts = Partition.even(8, 4)
    kept = Grid(title="kept: a quarter of each block", rows=5, columns=8, down="blocks", across="weights",
                colour=lambda row, column: owner(parts, column))  # fmt: skip
    used = Grid(title="on each rank, at block 3", rows=5, columns=8, down="blocks", across="weights",
                colour=lambda row, column: owner(parts, column) if row == 2 else PALE)  # fmt: skip
    return _exchanged("ulysses=4 shard_weights: one copy of the weights on four ranks", kept, used, "gather")


def combined() -> str:
    """Two axes at once."""
    tokens = Partition.even(7, 2)
    grids = [
        Grid(title=f"{name} prompt", rows=7, columns=6, down="tokens", across="heads, features",
             colour=partial(_of_branch, first, tokens))
        for first, name in ((0, "positive"), (2, "negative"))
    ]  # fmt: skip
    parts = [grids[0].at(40, 62), grids[1].at(300, 62), legend(40, 222, FOUR)]
    return picture(640, 240, "cfg=2 ulysses=2: four ranks, of which two share each prompt", parts)


def _of_branch(first: int, tokens: Partition, row: int, column: int) -> str:
    return RANKS[first + RANKS.index(owner(tokens, row))]


PICTURES = {
    f"layout-{each.__name__.replace('_', '-')}": each
    for each in (ulysses, ring, cfg, data, tensor, pipe, dsp, shard_weights, combined)
}
"""What makes each picture, by its name."""
