"""Routing the attention calls of diffusers' modules to an ``Attention``, such as Ulysses, ring or a kernel.

This is the only way in which attention of any family is replaced. diffusers' classes stay as they are: an instance
gets a copy of its processor, or of its ``forward``, whose code finds another function where it looks for torch's
attention or for diffusers' dispatcher. torch's function mode would do the same, and slow down every other call in the
layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import cached_property, update_wrapper, wraps
from types import FunctionType, MethodType, ModuleType
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import BackendFailure
from ..operators import Place


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


class Seam(ABC):
    """Takes the calls of torch's attention and of diffusers' dispatcher."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Compute attention; see ``Attention``."""

    def sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Stands for ``torch.nn.functional.scaled_dot_product_attention``."""
        if attn_mask is not None or dropout_p or is_causal:
            raise BackendFailure(
                "a module called attention with a mask, dropout or is_causal, which is not supported here"
            )
        return self.attend(query, key, value, scale)

    def dispatch(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **options: Any
    ) -> Tensor:
        """Stands for diffusers' ``dispatch_attention_fn``, whose tensors are ``[B, tokens, heads, head_dim]``."""
        for name in ("attention_kwargs", "backend", "parallel_config"):  # they choose another attention
            options.pop(name, None)
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return self.sdpa(q, k, v, attn_mask, *args, **options).transpose(1, 2)

    def stands_for(self, value: object) -> Callable[..., Tensor] | ModuleType | None:
        """Return what a module finds in the place of a global value of its code; None if that is not attention."""
        if value is F:
            return self._functional
        return self.dispatch if getattr(value, "__name__", "") == "dispatch_attention_fn" else None

    @cached_property
    def _functional(self) -> ModuleType:
        """Stands for ``torch.nn.functional``. It is a module, since a compiler looks into modules alone."""
        functional = ModuleType(F.__name__)
        vars(functional).update(vars(F) | {"scaled_dot_product_attention": self.sdpa})
        return functional


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


PLACES: WeakKeyDictionary[nn.Module, Place] = WeakKeyDictionary()
"""The attention modules of blocks that are compiled."""


def redirected(function: Any, seam: Seam) -> FunctionType:
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
        forward = _counted(redirected(type(module).forward, redirect), name, redirect)
        return "forward", MethodType(forward, module)
    call = _counted(redirected(type(processor).__call__, redirect), name, redirect)
    return "processor", as_class(processor, processor_class(type(processor), call))


def processor_class(kind: type, call: Callable[..., Any]) -> type:
    """Return a class of processors that differs from ``kind`` by what a call does."""
    return type(kind.__name__, (kind,), {"__call__": call})


def as_class(processor: Any, kind: type) -> Any:
    """Return a copy of a processor that has another class."""
    copied = copy(processor)
    copied.__class__ = kind
    return copied


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
