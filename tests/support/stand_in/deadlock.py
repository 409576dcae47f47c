"""Whether exchanges that NCCL runs one after another ever end."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .notes import Exchange


class Place(NamedTuple):
    """An exchange of a rank, by its number."""

    rank: int
    number: int


def stuck(exchanges: Sequence[Sequence[Exchange]]) -> list[str]:
    """Return the first exchange of each rank that never ends; empty if all end.

    An exchange starts when all that it comes after are complete. On GPUs these include the one before it in the same
    group, because NCCL runs the exchanges of a communicator one after another. It is complete when the other side of
    each of its messages has started, or, of a collective, all ranks. Nothing is buffered: NCCL sends small messages
    ahead of their receiver, but does not promise it.

    Args:
        exchanges: by rank. Messages and collectives are the same on all of their sides.
    """
    before, needed = _before(exchanges), _needed(exchanges)
    started, complete = set[Place](), set[Place]()
    waiting, count = list(before), -1
    while len(started) + len(complete) > count:
        count = len(started) + len(complete)
        started |= {place for place in waiting if before[place] <= complete}
        complete |= {place for place in waiting if place in started and needed[place] <= started}
        waiting = [place for place in waiting if place not in complete]
    firsts = {place.rank: place.number for place in reversed(waiting)}
    return [f"rank {rank} never ends {_text(exchanges[rank][number])}" for rank, number in sorted(firsts.items())]


def _text(exchange: Exchange) -> str:
    parts = sorted({f"{part.kind} with {part.peer}" if part.is_message else part.kind for part in exchange.parts})
    return f"{' and '.join(parts)} in group {exchange.group} in {exchange.where}"


def _before(exchanges: Sequence[Sequence[Exchange]]) -> Mapping[Place, set[Place]]:
    """What is complete before each exchange starts."""
    found: dict[Place, set[Place]] = {}
    for rank, own in enumerate(exchanges):
        last: dict[str, set[Place]] = defaultdict(set)
        for number, exchange in enumerate(own):
            found[Place(rank, number)] = {Place(rank, each) for each in exchange.after}
            if exchange.on_gpu:
                found[Place(rank, number)] |= last[exchange.group]
                last[exchange.group] = {Place(rank, number)}
    return found


def _needed(exchanges: Sequence[Sequence[Exchange]]) -> Mapping[Place, set[Place]]:
    """Which exchanges have a side of the same messages or collective."""
    sides: dict[tuple[object, ...], list[Place]] = defaultdict(list)
    for rank, own in enumerate(exchanges):
        counts: dict[tuple[object, ...], int] = defaultdict(int)
        for number, exchange in enumerate(own):
            for what, side in _sides(exchange, rank):
                sides[what, counts[side]].append(Place(rank, number))
                counts[side] += 1
    needed: dict[Place, set[Place]] = defaultdict(set)
    for places in sides.values():
        for place in places:
            needed[place] |= set(places)
    return needed


def _sides(exchange: Exchange, rank: int) -> Iterator[tuple[tuple[object, ...], tuple[object, ...]]]:
    """Yield each message or collective of a group, alike on all its sides, and this rank's side of it."""
    lane = (exchange.group, exchange.on_gpu)
    if not exchange.parts[0].is_message:
        yield lane, lane
        return
    for part in exchange.parts:
        way = (rank, part.peer) if part.kind == "send" else (part.peer, rank)
        yield (lane, way), (lane, way, part.kind)
