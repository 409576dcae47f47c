"""Which layers a VAE may be made of, and what each does where a rank has some of the rows.

A layer works on each row by itself, looks a few rows far (``windows``), or needs all rows (``norms``, ``plane``). What
is made of such layers is split without being known by name; a layer that is not listed is refused.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from ...attention.kernels import Kernel
from ...attention.routing import Routed
from .norms import MergedNorm
from .plane import FrameCausal, Plane
from .rows import Rows
from .watch import Unsplittable, Watch
from .windows import Reach, Windowed

Forward = Callable[..., Any]

ROW_BY_ROW = frozenset({
    "AlphaBlender", "AvgDown3D", "BatchNorm2d", "Dropout", "DupUp3D", "FourierFeatures", "GELU", "Identity",
    "LayerNorm", "Linear", "LpNorm", "Mish", "QwenImageRMS_norm", "QwenImageUpsample", "RMSNorm", "ReLU", "SiLU",
    "Timesteps", "Upsample", "WanRMS_norm", "WanUpsample",
})  # fmt: skip
"""Layers without layers of their own that need nothing of other rows."""

PLANE = ("WanAttentionBlock", "QwenImageAttentionBlock")
"""Layers with attention over whole pictures, besides diffusers' ``Attention``."""


def _conv(layer: Any, above: int | None = None) -> Reach:
    """Of one of torch's convolutions, with what is around it for padding above the picture.

    Raises:
        Unsplittable: its own padding is of a kind that no supported VAE has.
    """
    if isinstance(layer.padding, str) or layer.padding_mode == "circular":
        raise Unsplittable(f"a {type(layer).__name__} pads in a way of which it is not known how to split it by rows")
    height = layer.weight.ndim - 4  # among the dims of the kernel: after time, if there is any
    kernel, stride, dilation = (sizes[height] for sizes in (layer.kernel_size, layer.stride, layer.dilation))
    own = layer.padding[height] if above is None else above
    return Reach(kernel=dilation * (kernel - 1) + 1, stride=stride, above=own)


REACHES: Mapping[str, Callable[[Any], Reach]] = {
    "Conv2d": _conv,
    "Conv3d": _conv,
    "CogVideoXSafeConv3d": _conv,
    "CogVideoXCausalConv3d": lambda layer: _conv(layer.conv, layer.height_pad),
    "CogVideoXDownsample3D": lambda layer: _conv(layer.conv),
    "Downsample2D": lambda layer: _conv(layer.conv) if layer.use_conv else Reach(kernel=2, stride=2, above=0),
    "HunyuanVideoCausalConv3d": lambda layer: _conv(layer.conv, layer.time_causal_padding[2] + layer.conv.padding[1]),
    "LTXVideoCausalConv3d": lambda layer: _conv(layer.conv),
    "QwenImageCausalConv3d": lambda layer: _conv(layer, layer._padding[2]),
    "WanCausalConv3d": lambda layer: _conv(layer, layer._padding[2]),
}
"""How far a layer looks, by the name of its class. It is taken whole, with the padding that it does itself."""


def reach(layer: nn.Module) -> Reach | None:
    """How far a layer looks; None if it is none that looks at neighbours alone.

    Raises:
        Unsplittable: it is a convolution with a padding that is not known.
    """
    kind = type(layer).__name__
    if kind in REACHES:
        return REACHES[kind](layer)
    if isinstance(layer, nn.Sequential) and len(layer) == 2 and isinstance(layer[0], nn.ZeroPad2d):
        return _conv(layer[1], layer[0].padding[2] + _conv(layer[1]).above)
    return None


def walk(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The layers that do something other than on whole pictures, with their names.

    Raises:
        Unsplittable: a layer is not known.
    """
    kind, children = type(module).__name__, list(module.named_children())
    if reach(module) is not None or isinstance(module, nn.GroupNorm):
        yield name, module
    elif kind not in ROW_BY_ROW:
        if kind in (*PLANE, "Attention", "HunyuanVideoMidBlock3D"):
            yield name, module
        elif not children and not isinstance(module, (nn.ModuleList, nn.Sequential)):
            raise Unsplittable(f"{name} is a {kind}, of which it is not known how to split it by rows")
        for child, inner in children:
            yield from walk(inner, f"{name}.{child}" if name else child)


@contextmanager
def split(module: nn.Module, rows: Rows, kernel: Kernel) -> Iterator[None]:
    """Have a VAE compute the own rows while it is entered.

    Raises:
        Unsplittable: a layer is not known, or what is between layers looks at more rows than one.
    """
    watch = Watch(rows)
    with ExitStack() as stack:
        for _, layer in list(walk(module)):
            for attribute, value in _replaced(layer, rows, kernel).items():
                stack.callback(_put_back, layer, attribute, layer.__dict__.get(attribute))
                setattr(layer, attribute, watch.inside(value))
        stack.enter_context(watch)
        yield


def _replaced(layer: Any, rows: Rows, kernel: Kernel) -> dict[str, Forward]:
    """What a layer gets instead of its own."""
    how = reach(layer)
    if how is not None:
        return {"forward": layer.forward if how.local else Windowed(layer, how, rows)}
    if isinstance(layer, nn.GroupNorm):
        return {"forward": MergedNorm(layer, rows)}
    if type(layer).__name__ == "HunyuanVideoMidBlock3D":
        return {"causal": FrameCausal(rows, kernel)}
    if type(layer).__name__ == "Attention" and in_time(layer):
        return {"forward": layer.forward}
    return {"forward": Routed(layer, Plane(rows, kernel), each_sample=False)}


def in_time(attention: Any) -> bool:
    """Whether an ``Attention`` is along time at each place by itself.

    Raises:
        Unsplittable: it has a processor that is not known.
    """
    kind = type(attention.processor).__name__
    if kind not in ("AttnProcessor2_0", "MochiVaeAttnProcessor2_0"):
        raise Unsplittable(f"its attention has a {kind}, of which it is not known how to split it by rows")
    return kind == "MochiVaeAttnProcessor2_0"


def _put_back(layer: nn.Module, attribute: str, before: Any) -> None:
    """Undo what ``split`` has set; ``before`` is None where there was nothing."""
    if before is None:
        delattr(layer, attribute)
    else:
        setattr(layer, attribute, before)
