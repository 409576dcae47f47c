"""Routing the attention calls of diffusers' modules to an ``Attention``, such as Ulysses, ring or a kernel.

This is the only way in which attention of any family is replaced. diffusers' classes stay as they are: an instance
gets a copy of its processor, or of its ``forward``, whose code finds another function where it looks for torch's
attention or for diffusers' dispatcher. torch's function mode would do the same, and slow down every other call in the
layer.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import cache, update_wrapper, wraps
from types import FunctionType, MethodType
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from ..errors import BackendFailure
from ..operators import Place, attend
from .seam import Seam


class Attention(Protocol):
    """Computes attention in place of ``scaled_dot_product_attention``.

    A module calls it with q, k and v of this rank's tokens, ``[B, heads, local tokens, head_dim]``, and gets the
    attention output in the shape of q. k and v may have fewer heads, each of which successive query heads share.
    ``sample`` is the index in the batch of the single sample that they hold; None
    if they hold the whole batch. Masks are not passed in: the implementation knows all ranks' masks.
    """

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None
    ) -> Tensor: ...


class _Redirect(Seam):
    """Passes attention on, and counts the calls.

    Args:
        attention: held by the caller. A class made for a processor refers to itself, so it and this object are freed
            by gc alone, and the attention holds what has to be freed before: tensors, and groups with their threads.
        each_sample: whether the module calls attention separately for each sample.
    """

    def __init__(self, attention: Attention, each_sample: bool) -> None:
        self.attention, self.each_sample, self.calls = ref(attention), each_sample, 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attend to the whole batch, or to the next sample."""
        self.calls += 1
        attention = self.attention()
        assert attention is not None, "the route is gone"
        return attention(query, key, value, scale=scale, sample=self.calls - 1 if self.each_sample else None)


class _CompiledSeam(Seam):
    """Calls the operator of compiled blocks.

    Args:
        number: of the attention within its block. It is a constant of the compiled code.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Compute attention as the place of this number is routed."""
        return attend(query, key, value, scale, self.number)


PLACES: WeakKeyDictionary[nn.Module, Place] = WeakKeyDictionary()
"""The attention modules of blocks that are compiled."""


def _redirected(function: Any, seam: Seam) -> FunctionType:
    """Return a function with the same code that finds the seam where it looks for attention.

    Raises:
        BackendFailure: its code looks for no attention that we know.
    """
    if not isinstance(function, FunctionType):
        raise BackendFailure(f"{function!r} is no function of Python, so its attention cannot be redirected")
    looked_for = {name: seam.stands_for(function.__globals__.get(name)) for name in function.__code__.co_names}
    found = {name: value for name, value in looked_for.items() if value is not None}
    if not found:
        raise BackendFailure(f"{function.__qualname__} computes attention in a way that is not known here")
    names, defaults = function.__globals__ | found, function.__defaults__
    names.pop("__name__", None)  # by which a compiler would look at the module's names instead of these
    copied = FunctionType(function.__code__, names, function.__name__, defaults, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(copied, function)
    return copied


def _counted(function: FunctionType, name: str, redirect: _Redirect) -> Callable[..., Any]:
    """Return a function that refuses what a redirected one returns if it has not called attention as it should.

    A sharded result would be wrong.
    """

    @wraps(function)  # an attention layer of diffusers looks at the parameters of its processor
    def call(*args: Any, **kwargs: Any) -> Any:
        redirect.calls = 0
        result = function(*args, **kwargs)
        if redirect.calls == 0 or (redirect.calls > 1 and not redirect.each_sample):
            raise BackendFailure(f"{name} called torch's attention {redirect.calls} times instead of once")
        return result

    return call


def _replacement(module: nn.Module, attention: Attention, each_sample: bool) -> tuple[str, Any]:
    """Return what to set on a module so that its attention is redirected: its processor, or its ``forward``.

    Raises:
        BackendFailure: it computes attention in a way that is not known.
    """
    redirect, name = _Redirect(attention, each_sample), type(module).__name__
    processor: Any = getattr(module, "processor", None)
    if processor is None:
        forward = _counted(_redirected(type(module).forward, redirect), name, redirect)
        return "forward", MethodType(forward, module)
    call = _counted(_redirected(type(processor).__call__, redirect), name, redirect)
    return "processor", _as_class(processor, _processor_class(type(processor), call))


def _processor_class(kind: type, call: Callable[..., Any]) -> type:
    return type(kind.__name__, (kind,), {"__call__": call})


def _as_class(processor: Any, kind: type) -> Any:
    copied = copy(processor)
    copied.__class__ = kind
    return copied


@cache
def _compilable(kind: Any, number: int) -> Any:
    """Return the ``forward`` of a class of modules, or a class of processors, that calls the operator."""
    seam = _CompiledSeam(number)
    if issubclass(kind, nn.Module):
        return _redirected(kind.forward, seam)
    return _processor_class(kind, _redirected(kind.__call__, seam))


def compile_attention(stack: ExitStack, module: nn.Module, number: int, each_sample: bool) -> Place:
    """Let a module call the operator of compiled blocks until the stack closes.

    Modules of one class get the same code, which is compiled once.

    Args:
        number: of the attention within its block.
        each_sample: whether the module calls attention separately for each sample.

    Returns:
        Where the operator finds what the module is routed to.

    Raises:
        BackendFailure: the module computes attention in a way that is not known.
    """
    processor: Any = getattr(module, "processor", None)
    kind: Any = type(module if processor is None else processor)
    replacement = _compilable(kind, number)
    if processor is None:
        set_until_exit(stack, module, "forward", MethodType(replacement, module))
    else:
        set_until_exit(stack, module, "processor", _as_class(processor, replacement))
    PLACES[module] = place = Place(each_sample)
    stack.callback(PLACES.pop, module)
    return place


class Route:
    """Where the attention of a module goes. What stands in its place is made once, so keep a route for many calls.

    Args:
        each_sample: whether the module calls attention separately for each sample.
        changes_keys: whether the attention may change the keys and values that it gets.
    """

    def __init__(
        self, module: nn.Module, attention: Attention, each_sample: bool, *, changes_keys: bool = True
    ) -> None:
        self.module, self.attention, self.each_sample = module, attention, each_sample
        self.changes_keys = changes_keys
        self._made: tuple[Any, tuple[str, Any]] | None = None

    def replacement(self) -> tuple[str, Any]:
        """Return what to set on the module; made anew where the module has another processor.

        Raises:
            BackendFailure: the module computes attention in a way that is not known.
        """
        processor = getattr(self.module, "processor", None)
        if self._made is None or self._made[0] is not processor:
            self._made = processor, _replacement(self.module, self.attention, self.each_sample)
        return self._made[1]


class Routed:
    """A module's ``forward`` with its attention redirected.

    Args:
        each_sample: whether the module calls attention separately for each sample.

    Raises:
        BackendFailure: the module computes attention in a way that is not known.
    """

    def __init__(self, module: nn.Module, attention: Attention, each_sample: bool) -> None:
        self.module, self.forward, self.attention = module, module.forward, attention
        self.name, self.replacement = _replacement(module, attention, each_sample)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.name == "forward":
            return self.replacement(*args, **kwargs)
        with ExitStack() as stack:
            set_until_exit(stack, self.module, self.name, self.replacement)
            return self.forward(*args, **kwargs)


class WholeRoute(Route):
    """Where a whole module goes: what stands around its ``forward``, in which attention is redirected.

    Args:
        around: returns what to call instead of the ``forward`` that it gets.

    Raises:
        BackendFailure: the module computes attention in a way that is not known.
    """

    def __init__(
        self,
        module: nn.Module,
        attention: Attention,
        each_sample: bool,
        around: Callable[[Callable[..., Tensor]], Callable[..., Tensor]],
    ) -> None:
        super().__init__(module, attention, each_sample)
        self._forward = around(Routed(module, attention, each_sample))

    def replacement(self) -> tuple[str, Any]:
        """Return what to set on the module."""
        assert self.module not in PLACES, "compiled code would not see it"
        return "forward", self._forward


@contextmanager
def routed(routes: Iterable[Route]) -> Iterator[None]:
    """Route the attention of modules; restore them on exit.

    Raises:
        BackendFailure: a module computes attention in a way that is not known.
    """
    with ExitStack() as stack:
        for route in routes:
            place = PLACES.get(route.module)
            if place is None or isinstance(route, WholeRoute):
                set_until_exit(stack, route.module, *route.replacement())
            else:
                set_until_exit(stack, place, "attention", route.attention)
                place.changes_keys = route.changes_keys
        yield


def set_until_exit(stack: ExitStack, module: object, name: str, value: Any) -> None:
    """Set an attribute of an object until the stack closes. What others have set on the instance comes back then."""
    names = vars(module)  # without a module's own slow way, which looks for parameters
    if name in names:
        stack.callback(names.__setitem__, name, names[name])
    else:
        stack.callback(names.__delitem__, name)
    names[name] = value
