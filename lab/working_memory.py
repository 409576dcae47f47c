"""Measures what ``parallel_backend/engine/working_memory.py`` knows, and each family's ``values_alive``.

Call it by ``python -m lab working-memory``.

Models of published widths compute on fake tensors, which have shapes but no bytes, so this needs neither
a GPU nor memory. What is counted is the peak of the tensors that are alive, as PyTorch would allocate them.
"""

import argparse
import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from diffusers.utils import logging as diffusers_logging
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lab.verify.vae.kinds import KINDS, Kind
from parallel_backend.attention.kernels import KERNELS
from parallel_backend.attention.routing import routed
from parallel_backend.denoiser.attention_views import FullView
from parallel_backend.distributed.mesh import alone
from parallel_backend.engine.working_memory import first_width, vae_kind
from parallel_backend.families.modules import module_class_of
from parallel_backend.families.registry import FAMILIES, family_of
from parallel_backend.interfaces.geometry import IMAGE
from parallel_backend.interfaces.input_shapes import input_shapes
from parallel_backend.loading.load import SUPPORTED
from parallel_backend.strategies.token_split import TokenSplit
from parallel_backend.vaes import VAES
from parallel_backend.verify import examples

_ROWS, _FRAMES = 32, 5
"""Rows and columns of latents, and frames if they are videos."""
_TOKENS = 512
_TEXT = {"d_model": 4096, "d_ff": 10240, "num_heads": 64, "d_kv": 64}
"""Tokens and widths of the text encoders that published models have."""
_WIDTH = 128
"""Channels of the first level of a published VAE, as ``verify --vae`` counts them."""


_PUBLISHED: dict[str, dict[str, int | str]] = {
    "PixArtTransformer2DModel": {"caption_channels": 4096, "sample_size": 128},
    "MochiTransformer3DModel": {"num_attention_heads": 6, "text_embed_dim": 256},
    "LatteTransformer3DModel": {
        "sample_size": 64, "caption_channels": 4096, "num_attention_heads": 16, "attention_head_dim": 72,
        "cross_attention_dim": 1152, "norm_type": "ada_norm_single", "video_length": _FRAMES,
        "in_channels": 4, "out_channels": 8, "patch_size": 2,
    },
}  # fmt: skip
"""What published models have where diffusers' class has no or another default; a narrow one where it really runs."""


class PeakBytes(TorchDispatchMode):
    """Context that counts the bytes of the tensors that are made in it.

    Attributes:
        peak: the most bytes that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak, self._alive, self._known = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known | given:
                self._count(storage)
        return result

    def _count(self, storage: Any) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self._known.add(key)
        self._alive += nbytes
        self.peak = max(self.peak, self._alive)
        weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._alive -= nbytes


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make modules and tensors in this dtype; a fake module cannot be converted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def transformer_factor(class_name: str, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return the peak bytes of a forward of diffusers' default size, for each value of the streams between blocks."""
    mesh = alone()
    cls, family = module_class_of(class_name), family_of(class_name)
    variant = next(iter(family.variants().values()))
    layers = [name for name in inspect.signature(cls).parameters if name in ("num_layers", "num_single_layers")]
    # Mochi picks out tokens by their values, which fake tensors lack.
    mode = nullcontext() if class_name.startswith("Mochi") else FakeTensorMode()
    with mode, torch.inference_mode(), _default_dtype(dtype):
        module = cls(**dict.fromkeys(layers, 2), **_PUBLISHED.get(class_name, {})).eval()
        config = dict(module.config)
        dims = len(family.describe(config).patch)
        size = (*([min(_FRAMES, variant.size[0])] if dims == 3 else []), _ROWS, _ROWS)
        shapes = input_shapes(family, config, variant.inputs, batch=1, size=size, text=variant.text)
        filled = examples.fill(shapes, 0)
        inputs = {name: each.to(dtype) if each.is_floating_point() else each for name, each in filled.items()}
        part = family(module)
        with PeakBytes() as counted:
            state = part.embed(inputs)
            tokens = sum(stream.shape[0] * stream.shape[1] for stream in state.streams.values())
            lengths = {name: stream.shape[1] for name, stream in state.streams.items()}
            view = FullView(mesh, [TokenSplit.even(lengths, mesh.sequence)])
            with routed(view.routes(part, 0, state, KERNELS["sdpa"])):
                state = part.run(state)
            part.head(state)
    peak: int = counted.peak
    return peak / (tokens * family.describe(config).width(IMAGE) * dtype.itemsize)


def vae_factors(kind: Kind, *, encode: bool) -> tuple[float, float, float]:
    """Return the peak bytes of a decode or encode for each first-level feature of a pixel.

    That of one frame, and of a video what is fixed and what each frame adds.
    """
    single, _ = _vae_peak(kind, 1, encode=encode)
    few, many = (_vae_peak(kind, frames, encode=encode) for frames in (_FRAMES, 2 * _FRAMES))
    per_frame = max(many[0] - few[0], 0.0) / max(many[1] - few[1], 1)
    return single, few[0] - per_frame * few[1], per_frame


def _vae_peak(kind: Kind, frames: int, *, encode: bool) -> tuple[float, int]:
    """Return the peak bytes for each first-level feature of a pixel, and the number of pixel frames."""
    with FakeTensorMode(), torch.inference_mode():
        module = kind.module(_WIDTH)
        config = dict(module.config)
        vae = VAES[kind.class_name](config)
        vae.prepare(module)
        # Of a VAE that works in tiles of its own, the peak is that of a tile.
        rows = min(_ROWS, vae.own_tile // vae.scale.spatial or _ROWS)
        size, times = rows * vae.scale.spatial, vae.pixel_frames(frames) if vae.scale.video else 1
        with PeakBytes() as counted:
            if encode:
                pixels = torch.empty(1, 3, *([times] if vae.scale.video else []), size, size)
                vae.encode(module, pixels, lambda: None)
            else:
                latent = torch.empty(1, vae.scale.channels, *([frames] if vae.scale.video else []), rows, rows)
                vae.decode(module, latent, lambda frames: None, lambda: None)
    return counted.peak / (size * size * first_width(config)), times


def text_factors(class_name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[float, float]:
    """Return the values that are alive at once for each hidden feature of a token, and for each head of two tokens."""
    short, long = (_text_peak(class_name, tokens, dtype) / dtype.itemsize for tokens in (_TOKENS // 2, _TOKENS))
    by_pair = (long - 2 * short) / (_TEXT["num_heads"] * _TOKENS**2 / 2)
    return (long - by_pair * _TEXT["num_heads"] * _TOKENS**2) / (_TEXT["d_ff"] * _TOKENS), by_pair


def _text_peak(class_name: str, tokens: int, dtype: torch.dtype) -> int:
    import transformers

    with FakeTensorMode(), torch.inference_mode(), _default_dtype(dtype):
        encoder_class = getattr(transformers, class_name)
        config = encoder_class.config_class(num_layers=2, feed_forward_proj="gated-gelu", **_TEXT)
        encoder = encoder_class(config).eval()
        ids = torch.ones(1, tokens, dtype=torch.int64)
        with PeakBytes() as counted:
            encoder(input_ids=ids, attention_mask=ids)
    peak: int = counted.peak
    return peak


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run(options: argparse.Namespace) -> int:
    """Print the tables as Python; return the exit status."""
    diffusers_logging.set_verbosity_error()
    for name in FAMILIES:
        place = f"parallel_backend/families/{FAMILIES[name].folder}/transformer.py"
        print(f"{place}: values_alive: ClassVar[float] = {transformer_factor(name):.1f}")
    print("parallel_backend/engine/working_memory.py:")
    for kind in KINDS.values():
        for encode in (False, True):
            name = vae_kind(kind.class_name, kind.config(_WIDTH))
            factors = ", ".join(f"{each:.1f}" for each in vae_factors(kind, encode=encode))
            print(f'    ("{name}", {encode}): ({factors}),')
    for name in SUPPORTED["text_encoder"]:
        print(f'    "{name}": ({", ".join(f"{each:.1f}" for each in text_factors(name))}),')
    return 0
