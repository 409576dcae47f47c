"""What a run has computed from tensors that its steps share, so that no step computes it again."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import ref

T = TypeVar("T")
_Key = tuple[Hashable, tuple[int, ...]]
_References = tuple["ref[Any] | None", ...]


class RunCache:
    """Results of one run, by what they come from.

    A run keeps its tensors for all steps, so a tensor is known by its identity: comparing values would make the host
    wait for a GPU. The ranks of a run begin it together and give the same tensors in each step. So all of them compute
    a result in the same step, and it may take collectives.

    A result goes with the first of the objects that it comes from, or with the run.
    """

    def __init__(self) -> None:
        self._results: dict[_Key, tuple[_References, Any]] = {}

    def __len__(self) -> int:
        """Return the number of results."""
        return len(self._results)

    def get(self, name: Hashable, given: Sequence[Any], compute: Callable[[], T]) -> T:
        """Return what ``compute`` returns, or has returned for this name and these objects.

        Args:
            name: what the result is.
            given: the objects, or None, that it comes from. They may not change in place. The result must not refer to
                one of them as it is, which would keep both until the run ends.
        """
        key = name, tuple(map(id, given))
        entry = self._results.get(key)
        if entry is not None and all(_is(each, thing) for each, thing in zip(entry[0], given, strict=True)):
            found: T = entry[1]
            return found
        computed = compute()
        forget = partial(self._forget, ref(self), key)
        self._results[key] = tuple(None if thing is None else ref(thing, forget) for thing in given), computed
        return computed

    @staticmethod
    def _forget(cache: "ref[RunCache]", key: _Key, gone: "ref[Any]") -> None:
        """Drop a result one of whose objects is gone. The key may be another's by now, made of objects at its place."""
        known = cache()
        if known is not None and any(each is gone for each in known._results.get(key, ((), None))[0]):
            del known._results[key]


def _is(reference: "ref[Any] | None", thing: Any) -> bool:
    return thing is None if reference is None else reference() is thing
