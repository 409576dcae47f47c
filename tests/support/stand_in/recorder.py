"""Runs operators on stand-in tensors, and notes what CUDA and NCCL would make of them."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_backend.protocol.messages import Progress

from . import rules
from .exchanges import parts_of
from .generators import is_on_gpu
from .kernels import REPLACED
from .notes import Exchange, Notes, Part, Wait, here
from .streams import Order
from .tensor import StandIn

_CPU = torch.device("cpu")


class Recorder(TorchDispatchMode):
    """Runs operators on the CPU, gives their results the GPU's name, and notes what happens, while it is entered.

    Args:
        device: this rank's GPU.

    Attributes:
        device: the GPU.
        notes: what was noted.
        order: what is complete before what starts.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.notes = device, Notes()
        self.order = Order(partial(self.waits, "waits for the GPU"))
        self._first = self._started = 0
        self._batch: list[tuple[dist.ProcessGroup, Part, Tensor]] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and importing dynamo takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, options, asked = self._with_devices(args, kwargs or {})
        if options.get("pin_memory"):  # which a CPU build has not
            options = {**options, "pin_memory": False}
        if func is torch.ops.prim.device.default:
            return args[0].device
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **options)  # DTensor asks for shapes alone
        if any(each is not StandIn and each not in (Tensor, torch.nn.Parameter) for each in types):
            return NotImplemented  # a DTensor, which runs the operator on what it holds
        tensors = _tensors((args, options))
        on_gpu = [tensor for tensor in tensors if isinstance(tensor, StandIn)]
        if not on_gpu and not _is_gpu(asked) and func.namespace != "c10d":
            return func(*args, **options)
        if func not in REPLACED and _is_composite(func):
            with self:
                return func.decompose(*args, **options)
        self._note(func, args, options, tensors, on_gpu)
        device = asked or (self.device if on_gpu else _CPU)
        return _run(REPLACED.get(func, func), args, options, tensors, device)

    def begin(self) -> None:
        """Note in a new ``Notes`` from now on. What was started before is complete."""
        self.notes, self._first = Notes(), self._started

    def report(self, progress: Progress, _: object) -> None:
        """Note a progress report of anything but loading."""
        if progress.phase != "loading":
            self.notes.marks.append(len(self.notes.waits))

    def waits(self, why: str, op: str) -> None:
        """Note that the host waits for the GPU."""
        self.notes.waits.append(Wait(why=why, op=op, where=here()))

    def batched(self, start: Callable[[list[dist.P2POp]], list[Any]], ops: list[dist.P2POp]) -> list[Any]:
        """Start sends and receives, which count as one exchange and are waited for together."""
        works, waited = self._started_as_one(partial(start, ops))
        return [_Waited(works, waited)]

    def all_to_all_single(self, start: Callable[..., Any], *args: Any, async_op: bool = False, **options: Any) -> Any:
        """Carry out an all-to-all. If it is asynchronous, it counts as complete when it is waited for."""
        if not async_op:
            return start(*args, **options)
        _, waited = self._started_as_one(partial(start, *args, **options))
        return _Waited([], waited)

    def _started_as_one(self, start: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Note what ``start`` starts as one exchange; return its result, and what to call when it is waited for."""
        self._batch = []
        try:
            result = start()
        finally:  # also of what gloo refuses
            batch, self._batch = self._batch, None
            if batch:
                number = self._exchange(batch[0][0], [(part, tensor) for _, part, tensor in batch])
        if not batch:
            return result, lambda: None
        return result, partial(self.order.waited, number, on_gpu=batch[0][2].is_cuda)

    def _note(
        self, func: Any, args: Any, options: Mapping[str, Any], tensors: Sequence[Tensor], on_gpu: Sequence[StandIn]
    ) -> None:
        if func.namespace == "c10d":
            self._note_exchange(func, args)
            return
        self.notes.operators += 1
        on_cpu = [each for each in tensors if not isinstance(each, StandIn) and each.device.type == "cpu"]
        generator = options.get("generator")
        if rules.is_mixed(func, on_gpu, on_cpu) or any(each.claimed != self.device for each in on_gpu):
            self._note_mixed(func, tensors)
        elif generator is not None and not is_on_gpu(generator):
            self._note_mixed(f"{func} with a generator on the CPU", tensors)
        why = rules.wait_of(func, args, options) or rules.copy_of(func, args, options, on_gpu, on_cpu)
        if why:
            self.order.synchronised(self.order.current)
            self.waits(why, str(func))

    def _note_mixed(self, what: Any, tensors: Sequence[Tensor]) -> None:
        shapes = ", ".join(f"{tensor.device} {list(tensor.shape)}" for tensor in tensors)
        self.notes.mixed.append(f"{what} on {shapes} in {here()}")

    def _note_exchange(self, func: Any, args: Any) -> None:
        group, parts = parts_of(rules.name_of(func), args)
        if self._batch is not None:
            self._batch += [(group, part, tensor) for part, tensor in parts]
            return
        if not parts:
            return
        number = self._exchange(group, parts)
        self.order.waited(number, on_gpu=parts[0][1].is_cuda)

    def _exchange(self, group: dist.ProcessGroup, parts: Sequence[tuple[Part, Tensor]]) -> int:
        number = self._started
        self._started += 1
        after = self.order.start(number, on_gpu=parts[0][1].is_cuda)
        self.notes.exchanges.append(
            Exchange(
                group=group.group_name,
                ranks=tuple(dist.get_process_group_ranks(group)),
                devices=frozenset(str(tensor.device) for _, tensor in parts),
                parts=tuple(part for part, _ in parts),
                after=frozenset(each - self._first for each in after if each >= self._first),
                where=here(),
            )
        )
        return number

    def _with_devices(
        self, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], torch.device | None]:
        """Return arguments whose GPU has a number, and the device that they ask for."""
        asked = options.get("device") or next((each for each in args if isinstance(each, torch.device)), None)
        if asked is None:
            return args, options, None
        if asked.type == "cuda" and asked.index is None:
            args = tuple(self.device if isinstance(each, torch.device) else each for each in args)
            options = {name: self.device if name == "device" and each else each for name, each in options.items()}
            asked = self.device
        return args, options, asked


class _Waited:
    """The works of a batch. Tells when they are waited for."""

    def __init__(self, works: Sequence[Any], waited: Callable[[], None]) -> None:
        self._works, self._waited = works, waited

    def wait(self) -> None:
        """Wait for all."""
        for work in self._works:
            work.wait()
        self._waited()


def _run(func: Any, args: Any, options: Any, tensors: Sequence[Tensor], device: torch.device) -> Any:
    """Run an operator on the CPU. Tensors that it makes are on ``device``."""
    known = {id(each.held) if isinstance(each, StandIn) else id(each): each for each in tensors}
    held_args, held_options = _mapped((args, options), _held)
    if _is_gpu(options.get("device")):
        held_options["device"] = _CPU
    result = func(*held_args, **held_options)

    def named(tensor: Tensor) -> Tensor:
        given = known.get(id(tensor))
        if given is not None:
            return given
        return StandIn(tensor, device) if device.type == "cuda" else tensor

    return _mapped(result, named)


def _held(tensor: Tensor) -> Tensor:
    return tensor.held if isinstance(tensor, StandIn) else tensor


def _mapped(values: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to all tensors in nested lists, tuples and dicts."""
    if isinstance(values, Tensor):
        return function(values)
    if isinstance(values, (list, tuple)):
        return type(values)([_mapped(each, function) for each in values])
    if isinstance(values, dict):
        return {name: _mapped(each, function) for name, each in values.items()}
    return values


def _tensors(values: Any) -> list[Tensor]:
    """Return all tensors in nested lists, tuples and dicts."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    return [tensor for each in values for tensor in _tensors(each)]


def _is_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


@cache
def _is_composite(func: Any) -> bool:
    """Whether torch runs an operator as others, on every device."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
