"""CUDA's streams and events, for what they say about order: which exchanges are complete before another one starts."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Order:
    """Which exchanges of a rank are known to be complete, in each stream and on the host.

    Exchanges have numbers. Only those are kept that no other one kept comes after.

    Args:
        on_wait: called when the host waits for a stream or an event, with the name of the function.

    Attributes:
        current: number of the stream that operators run in.
    """

    def __init__(self, on_wait: Callable[[str], None]) -> None:
        self.current, self.on_wait = 0, on_wait
        self._by_stream: defaultdict[int, set[int]] = defaultdict(set)
        self._host: set[int] = set()
        self._before: dict[int, frozenset[int]] = {}

    def start(self, number: int, *, on_gpu: bool) -> frozenset[int]:
        """Return what an exchange that starts now comes after."""
        self._before[number] = frozenset(self._host | (self._by_stream[self.current] if on_gpu else set()))
        return self._before[number]

    def waited(self, number: int, *, on_gpu: bool) -> None:
        """Note that the current stream, or without a GPU the host, waits for an exchange."""
        waiting = self._by_stream[self.current] if on_gpu else self._host
        waiting -= self._before[number]
        waiting.add(number)

    def synchronised(self, stream: int | None = None) -> None:
        """Note that the host waits for a stream, or for all."""
        for each in list(self._by_stream) if stream is None else [stream]:
            self._host |= self._by_stream[each]

    def of(self, stream: int) -> frozenset[int]:
        """Return what is complete before the next operator in a stream."""
        return frozenset(self._by_stream[stream])

    def add(self, stream: int, complete: frozenset[int]) -> None:
        """Note that a stream waits for what was complete at an event."""
        self._by_stream[stream] |= complete


class Streams:
    """The streams and events of one GPU, as ``torch.cuda`` has them.

    Attributes:
        Stream: in the place of ``torch.cuda.Stream``.
        Event: in the place of ``torch.cuda.Event``.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._made: list[_Stream] = []
        self.Stream = type("Stream", (_Stream,), {"order": order, "made": self._made})
        self.Event = type("Event", (_Event,), {"order": order})
        self.Stream()

    def current(self, *_: Any) -> "_Stream":
        """Return the current stream."""
        return self._made[self._order.current]

    @contextmanager
    def entered(self, stream: "_Stream") -> Iterator[None]:
        """Make a stream the current one."""
        before, self._order.current = self._order.current, stream.number
        try:
            yield
        finally:
            self._order.current = before

    def synchronize(self, *_: Any) -> None:
        """Let the host wait for the GPU."""
        self._order.synchronised()
        self._order.on_wait("cuda.synchronize")


class _Stream:
    order: Order
    made: list["_Stream"]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = len(self.made)
        self.made.append(self)

    def wait_stream(self, other: "_Stream") -> None:
        self.order.add(self.number, self.order.of(other.number))

    def wait_event(self, event: "_Event") -> None:
        self.order.add(self.number, event.complete)

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        event = event or type("Event", (_Event,), {"order": self.order})()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.order.synchronised(self.number)
        self.order.on_wait("Stream.synchronize")


class _Event:
    order: Order

    def __init__(self, *_: Any, **__: Any) -> None:
        self.complete: frozenset[int] = frozenset()
        self._recorded = 0.0

    def record(self, stream: _Stream | None = None) -> None:
        self._recorded = time.perf_counter()
        self.complete = self.order.of(self.order.current if stream is None else stream.number)

    def wait(self, stream: _Stream | None = None) -> None:
        self.order.add(self.order.current if stream is None else stream.number, self.complete)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.order.on_wait("Event.synchronize")

    def elapsed_time(self, end: "_Event") -> float:
        return (end._recorded - self._recorded) * 1e3
