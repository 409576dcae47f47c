"""What a forward computes: its matrix products, its other attention, and what its other operations move.

The layers themselves say it. They run on torch's meta device, which has shapes and no numbers, so it takes neither
memory nor a GPU, and every family and every file is counted alike.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product of matrices, ``[rows, inner] x [inner, columns]``, ``batch`` times.

    Attributes:
        itemsize: bytes of a value.
        cut: whether tensor parallelism cuts it: it has a row for each token, and not one for each sample.
    """

    rows: int
    inner: int
    columns: int
    batch: int = 1
    itemsize: int = 2
    cut: bool = True

    @property
    def operations(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.batch * self.rows * self.inner * self.columns

    @property
    def moved(self) -> float:
        """Bytes that are read and written once."""
        values = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        return float(self.batch * values * self.itemsize)


@dataclass(frozen=True, kw_only=True)
class Attended:
    """Attention of some heads, of all samples together."""

    heads: int
    queries: int
    keys: int
    head_dim: int

    @property
    def operations(self) -> float:
        """Multiplications and additions."""
        return 4.0 * self.heads * self.queries * self.keys * self.head_dim


@dataclass(frozen=True, kw_only=True)
class Work:
    """What some layers compute.

    Attributes:
        products: how often each product is computed.
        attended: how often each attention that does not pass the attention seam is, such as to text.
        moved: bytes that operations between products read and write, of all features of a token.
        moved_cut: the same of a part of the features, such as heads, which tensor parallelism cuts.
        between: bytes that go into and come out of products and attention: what is moved at least where a compiler
            fuses the operations between them.
        kernels: number of operations that the host gives to a device.
    """

    products: Mapping[Product, int] = field(default_factory=Counter)
    attended: Mapping[Attended, int] = field(default_factory=Counter)
    moved: float = 0.0
    moved_cut: float = 0.0
    between: float = 0.0
    kernels: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            products=Counter(self.products) + Counter(other.products),
            attended=Counter(self.attended) + Counter(other.attended),
            moved=self.moved + other.moved,
            moved_cut=self.moved_cut + other.moved_cut,
            between=self.between + other.between,
            kernels=self.kernels + other.kernels,
        )

    def times(self, count: int) -> "Work":
        """Return so many times the work."""
        return Work(
            products={product: number * count for product, number in self.products.items()},
            attended={attended: number * count for attended, number in self.attended.items()},
            moved=self.moved * count, moved_cut=self.moved_cut * count, between=self.between * count,
            kernels=self.kernels * count,
        )  # fmt: skip

    def cut(self, share: float) -> "Work":
        """Return the part of a rank of tensor parallelism that has this share of columns and heads."""
        if share == 1:
            return self
        products = Counter[Product]()
        for product, number in self.products.items():
            columns = _part(product.columns, share) if product.cut else product.columns
            products[replace(product, columns=columns)] += number
        attended = {replace(each, heads=_part(each.heads, share)): count for each, count in self.attended.items()}
        return replace(
            self, products=products, attended=attended, moved_cut=self.moved_cut * share,
            between=self.between * share,
        )  # fmt: skip

    @property
    def operations(self) -> float:
        """Multiplications and additions of all products and of this attention."""
        products = sum(each.operations * count for each, count in self.products.items())
        return products + sum(each.operations * count for each, count in self.attended.items())


def _part(count: int, share: float) -> int:
    """Return a share in whole units, rounded up. A share such as a third is not exact."""
    return math.ceil(count * share - 1e-9)


def count(run: Callable[[], Any], *, rows: int, widths: Sequence[int]) -> tuple[Work, Any]:
    """Run layers on the meta device; return what they compute, and their result.

    Args:
        run: runs them.
        rows: number of samples. Products with more rows have one for each token.
        widths: features of whole tokens.
    """
    counter = _Counter(rows, frozenset(widths))
    with torch.inference_mode(), _meta_autocast(), _Attention(counter), counter:
        result = run()
    return counter.work(), result


@contextmanager
def _meta_autocast() -> Iterator[None]:
    """Let layers ask for autocast on the meta device (Mochi's do): torch refuses it there, where it changes nothing."""
    autocast = torch.autocast

    def chosen(device_type: str, *given: Any, **options: Any) -> Any:
        return nullcontext() if device_type == "meta" else autocast(device_type, *given, **options)

    torch.autocast = chosen  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch.autocast = autocast  # type: ignore[misc]


class _Counter(TorchDispatchMode):
    """Sees every operation."""

    def __init__(self, rows: int, widths: frozenset[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows, self.widths = rows, widths
        self.products, self.attended = Counter[Product](), Counter[Attended]()
        self.moved, self.moved_cut, self.between, self.kernels = 0.0, 0.0, 0.0, 0

    def work(self) -> Work:
        """Return what has been seen."""
        return Work(
            products=self.products, attended=self.attended, moved=self.moved, moved_cut=self.moved_cut,
            between=self.between, kernels=self.kernels,
        )  # fmt: skip

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _PRODUCTS:
            self.kernels += 1
            product = _PRODUCTS[name](args, result)
            product = replace(product, cut=product.rows > self.rows)
            self.products[product] += 1
            self.between += product.batch * product.rows * (product.inner + product.columns) * product.itemsize
        elif not func.is_view and name not in _NO_WORK:
            self._move([*_tensors(args), *_tensors((kwargs or {}).values()), *_tensors([result])])
        return result

    def attend(self, attended: Attended, itemsize: int) -> None:
        """Note attention that does not pass the seam."""
        self.kernels += 1
        self.attended[attended] += 1
        self.between += itemsize * attended.heads * attended.head_dim * 2 * (attended.queries + attended.keys)

    def _move(self, tensors: Sequence[Tensor]) -> None:
        nbytes = float(sum(tensor.numel() * tensor.itemsize for tensor in tensors))
        if not nbytes:
            return
        self.kernels += 1
        largest = max(tensors, key=Tensor.numel)
        if largest.ndim and largest.shape[-1] in self.widths:
            self.moved += nbytes
        else:
            self.moved_cut += nbytes


class _Attention(TorchFunctionMode):
    """Takes attention as a whole, which torch would take apart on the meta device. All tokens count as unmasked."""

    def __init__(self, counter: _Counter) -> None:
        self.counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        query, key, value = given["query"], given["key"], given["value"]
        batch = math.prod(query.shape[:-2])
        attended = Attended(heads=batch, queries=query.shape[-2], keys=key.shape[-2], head_dim=query.shape[-1])
        self.counter.attend(attended, query.itemsize)
        return query.new_empty(*query.shape[:-1], value.shape[-1])


_NO_WORK = frozenset({"empty", "empty_like", "new_empty", "lift_fresh", "_unsafe_view"})
"""Operations that a device does not carry out."""


def _tensors(values: Any) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [each for each in value if isinstance(each, Tensor)]
    return found


def _linear(args: Any, result: Tensor) -> Product:
    x, weight = args[0], args[1]
    return Product(
        rows=x.numel() // max(x.shape[-1], 1), inner=x.shape[-1], columns=weight.shape[0], itemsize=x.itemsize
    )


def _mm(args: Any, result: Tensor) -> Product:
    a, b = args[-2], args[-1]
    return Product(rows=a.shape[-2], inner=a.shape[-1], columns=b.shape[-1], itemsize=a.itemsize)


def _bmm(args: Any, result: Tensor) -> Product:
    a, b = args[-2], args[-1]
    return Product(batch=a.shape[0], rows=a.shape[-2], inner=a.shape[-1], columns=b.shape[-1], itemsize=a.itemsize)


def _convolution(args: Any, result: Tensor) -> Product:
    weight = args[1]
    channels = result.shape[1]
    return Product(
        rows=result.numel() // max(channels, 1), inner=weight[0].numel(), columns=channels, itemsize=weight.itemsize
    )


_PRODUCTS: Mapping[str, Callable[[Any, Tensor], Product]] = {
    "linear": _linear,
    "mm": _mm,
    "addmm": _mm,
    "bmm": _bmm,
    "baddbmm": _bmm,
    "convolution": _convolution,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
}
"""By the operator's name, the product from its arguments and its result."""
