"""Loading components of a checkpoint to a device: safetensors and GGUF only, nothing is downloaded.

diffusers and transformers are imported at the first load: that takes seconds, and a rank must respond before it.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.weight_headers import read_files, weights_under
from ..errors import InvalidRequest
from ..families.registry import FAMILIES, family_of
from ..progress import PROGRESS
from ..protocol.model_spec import DType
from ..protocol.tensors import DTYPES
from ..vaes import VAE, VAES, module_class_of, vae_of
from .weight_source import WeightSource

SUPPORTED: dict[str, tuple[str, ...]] = {
    "transformer": tuple(FAMILIES),
    "transformer_2": tuple(FAMILIES),
    "text_encoder": ("T5EncoderModel", "UMT5EncoderModel"),
    "vae": tuple(VAES),
}
"""Supported classes of each component."""


def resolve_dtype(checkpoint: Checkpoint, dtype: DType, device: torch.device, *, bfloat16: bool) -> torch.dtype:
    """Return the dtype to compute in, the same on all ranks.

    ``auto`` is float32 on a CPU. On a GPU it is the dtype in which most of the transformer's weights are stored, except
    that float32, and any dtype that torch or the family cannot compute in, becomes bfloat16. Without bfloat16 it is
    float16, or float32 for families that float16 has too small a range for.

    Args:
        bfloat16: whether the devices of all ranks have bfloat16.
    """
    if dtype != "auto":
        return DTYPES[dtype]
    if device.type == "cpu":
        return torch.float32
    class_name = checkpoint.components.get("transformer", "")
    float16 = class_name not in FAMILIES or family_of(class_name).float16
    if bfloat16 and not (float16 and checkpoint.stored_dtype("transformer") == "F16"):
        return torch.bfloat16
    return torch.float16 if float16 else torch.float32


def resolve_vae_dtype(vae: VAE, dtype: DType, device: torch.device, *, bfloat16: bool) -> torch.dtype:
    """Return the dtype that a VAE computes in, the same on all ranks.

    ``auto`` is float32 on a CPU, and on a GPU what ComfyUI would choose: the first of the VAE's ``working_dtypes`` that
    torch does not have to emulate, else float32.

    Args:
        bfloat16: whether the devices of all ranks have bfloat16.
    """
    if dtype != "auto":
        return DTYPES[dtype]
    if device.type == "cpu":
        return torch.float32
    return next((each for each in vae.working_dtypes if bfloat16 or each != torch.bfloat16), torch.float32)


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Refuse bfloat16 on a GPU where torch does not even emulate it.

    Raises:
        InvalidRequest: the message names the GPU and what would work.
    """
    if dtype == torch.bfloat16 and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        name = torch.cuda.get_device_name(device)
        raise InvalidRequest(f"dtype bf16 cannot be used: this {name} does not compute in it; fp16 or fp32 would work")


def check_component(checkpoint: Checkpoint, component: str) -> None:
    """Refuse a component that is missing, of an unsupported class, or stored in a way that cannot be read.

    Raises:
        InvalidRequest: the message says what is wrong and what would work.
    """
    name = checkpoint.components.get(component)
    if name is None:
        raise InvalidRequest(
            f"{checkpoint.path} has no {component} (its parts: {', '.join(checkpoint.components)}); "
            "use another loader for it, or a checkpoint that has one"
        )
    if name not in SUPPORTED[component]:
        listed = ", ".join(SUPPORTED[component])
        raise InvalidRequest(f"{component} class {name} is not supported; supported: {listed}")
    for key in _IMPLEMENTATIONS:
        value = checkpoint.config(component).get(key)
        if value not in (None, "eager", "sdpa"):
            raise InvalidRequest(
                f"the config of {component} in {checkpoint.path} has {key} {value!r}, for which transformers may "
                "download and run a program: remove the entry"
            )
    checkpoint.stored(component)  # refuses what cannot be read


_IMPLEMENTATIONS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
"""Entries of a config whose values transformers may look up on the Hub, and run what it finds (``hub_kernels``)."""


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a module, by name."""
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def load_vae(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """Load the VAE, a module of diffusers, with all its weights in one dtype."""
    vae_class = module_class_of(checkpoint.components["vae"])
    if checkpoint.path.is_dir():
        module = _load(vae_class, checkpoint, "vae", device, torch_dtype=dtype)
    else:
        module = load_whole(vae_class, checkpoint, "vae", device, dtype)
    vae_of(checkpoint).prepare(module)
    return module


def load_whole(
    model_class: Any, checkpoint: Checkpoint, component: str, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """Load a diffusers model with all its weights; some classes keep a part of them in float32."""
    from . import partial

    source = WeightSource(checkpoint.stored(component), model_class.__name__)
    module = partial.empty(model_class, checkpoint.config(component), dtype)
    source.check(shapes_of(module))
    partial.fill(module, source, device)
    return module.eval().requires_grad_(False)


def transformer_bytes(checkpoint: Checkpoint, component: str) -> int:
    """Return the most bytes that a transformer may take: float32, in which a family may keep some of its weights."""
    return _stored_values(checkpoint, component) * torch.float32.itemsize


def text_encoder_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Return the bytes that the text encoder takes in a dtype, according to the files' headers."""
    return _stored_values(checkpoint, "text_encoder") * dtype.itemsize


def vae_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Return the bytes that the VAE takes in a dtype, according to the files' headers."""
    return _stored_values(checkpoint, "vae") * dtype.itemsize


def _stored_values(checkpoint: Checkpoint, component: str) -> int:
    stored = checkpoint.stored(component)
    weights = weights_under(stored.prefix, read_files(stored.files))
    return sum(math.prod(tensor.shape) for tensor in weights.values())


def load_text_encoder(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
    """Load the text encoder."""
    import transformers

    encoder_class = getattr(transformers, checkpoint.components["text_encoder"])
    return _load(encoder_class, checkpoint, "text_encoder", device, dtype=dtype)


def _load(model_class: Any, checkpoint: Checkpoint, component: str, device: torch.device, **options: Any) -> nn.Module:
    with _counted_parameters():
        module, found = model_class.from_pretrained(
            str(checkpoint.path),
            subfolder=component,
            local_files_only=True,
            use_safetensors=True,
            low_cpu_mem_usage=False,  # else diffusers needs accelerate; transformers has no such choice
            output_loading_info=True,
            **options,
        )
    if missing := sorted(found["missing_keys"]):
        raise InvalidRequest(
            f"{checkpoint.path / component} lacks {len(missing)} weights ({missing[0]}, ...): download it again"
        )
    loaded: nn.Module = module.to(device)
    return loaded.eval().requires_grad_(False)


@contextmanager
def _counted_parameters() -> Iterator[None]:
    """Count every parameter that a module gets while the context lasts, as transformers sets one after it is read."""
    hook = register_module_parameter_registration_hook(lambda module, name, parameter: PROGRESS.tick())
    try:
        yield
    finally:
        hook.remove()
