"""Loading components of a checkpoint to a device: safetensors and GGUF only, nothing is downloaded.

diffusers and transformers are imported at the first load: that takes seconds, and a rank must respond before it.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.weight_headers import read_files, weights_under
from ..distributed.mesh import DeviceMesh
from ..distributed.rank_speeds import handicap, slowed
from ..errors import InvalidRequest
from ..interfaces.family import Family
from ..interfaces.state import State
from ..interfaces.tensor_cuts import Slices
from ..models import FAMILIES, family_of
from ..progress import PROGRESS
from ..protocol.model_spec import DType
from ..protocol.tensors import DTYPES
from ..strategies import stage_cut
from ..vaes import VAES, vae_of
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
        checkpoint: the model.
        dtype: as requested.
        device: this rank's device.
        bfloat16: whether the devices of all ranks have bfloat16.
    """
    if dtype != "auto":
        return DTYPES[dtype]
    if device.type == "cpu":
        return torch.float32
    family = FAMILIES.get(checkpoint.components.get("transformer", ""), Family)
    if bfloat16 and not (family.float16 and checkpoint.stored_dtype("transformer") == "F16"):
        return torch.bfloat16
    return torch.float16 if family.float16 else torch.float32


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
    checkpoint.stored(component)  # refuses what cannot be read


@dataclass(frozen=True, kw_only=True)
class PlannedTransformer:
    """This rank's part of a transformer before its weights are read; it takes no memory.

    Attributes:
        family: the part on the meta device, cut and sharded.
        source: the weights of the files.
        component: diffusers' name of the component.
        class_name: diffusers' class.
        slices: the slices of parameters that were cut.
        device: where the weights go.
    """

    family: Family
    source: WeightSource
    component: str
    class_name: str
    slices: Slices
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes that the part takes on the device."""
        from . import partial

        return partial.local_bytes(self.family.module)

    def fill(self) -> Family:
        """Read the weights. What is half read after an error is of no use: plan again."""
        from . import partial

        partial.fill(self.family.module, self.source, self.slices, self.device)
        self.family.module.eval().requires_grad_(False)
        return self.family


def load_transformer(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, mesh: DeviceMesh, component: str = "transformer"
) -> Family:
    """Load this rank's part of a transformer. What diffusers keeps in float32 stays so."""
    return plan_transformer(checkpoint, dtype, device, mesh, component).fill()


def plan_transformer(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    mesh: DeviceMesh,
    component: str,
) -> PlannedTransformer:
    """Build this rank's part of a transformer without weights, wrapped in its family. Reads headers alone.

    Raises:
        InvalidRequest: the files do not hold the weights of this transformer.
    """
    name = checkpoint.components[component]
    source = WeightSource(checkpoint.stored(component), name)
    whole = _whole(checkpoint, component, dtype, source)
    part, slices = _cut(family_of(name), whole, checkpoint.config(component), device.type, mesh)
    factor = handicap(mesh.whole.index)
    part.run = slowed(part.run, factor, device) if factor > 1 else part.run
    return PlannedTransformer(
        family=part, source=source, component=component, class_name=name, slices=slices, device=device
    )


def _whole(checkpoint: Checkpoint, component: str, dtype: torch.dtype, source: WeightSource) -> nn.Module:
    """Return a whole transformer on the meta device after a check of its files.

    Args:
        checkpoint: the model.
        component: the transformer.
        dtype: of its weights.
        source: the weights of its files.
    """
    import diffusers

    from . import partial
    from .compressed_linear import keep_compressed

    module_class = getattr(diffusers, checkpoint.components[component])
    module = partial.empty(module_class, checkpoint.config(component), dtype)
    source.check(_shapes(module), only=not checkpoint.path.is_dir())
    keep_compressed(module, source)
    return module


def _cut(
    family: type[Family], module: nn.Module, config: dict[str, Any], device_type: str, mesh: DeviceMesh
) -> tuple[Family, Slices]:
    """Reduce a whole transformer on the meta device to this rank's part, and return the slices of what was cut."""
    from ..strategies import sharded_weights, tensor

    layout = mesh.layout
    slices: Slices = {}
    if layout.tensor > 1:
        slices = tensor.cut(module, family.cuts(config), mesh.axes["tensor"], device_type)
    part = family(module)
    if layout.pipe > 1:
        part.keep_blocks(stage_cut.blocks(part, mesh.speeds("pipe")).slice(mesh.axes["pipe"].index))
    if mesh.weights_axis:
        modules = [module for block in part.blocks for module in block.modules]

        def used(state: State) -> list[nn.Module]:
            return [module for block in part.used_blocks(state) for module in block.modules]

        part.run = sharded_weights.shard(modules, part.run, mesh.weights_axis, device_type, used)
    return part, slices


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def load_vae(checkpoint: Checkpoint, device: torch.device) -> Any:
    """Load the VAE, always in float32: it is small next to the transformer, and half precision visibly degrades it."""
    import diffusers

    vae_class = getattr(diffusers, checkpoint.components["vae"])
    if checkpoint.path.is_dir():
        module = _load(vae_class, checkpoint, "vae", device, torch_dtype=torch.float32)
    else:
        module = _load_from_file(vae_class, checkpoint, "vae", device)
    vae_of(checkpoint).prepare(module)
    return module


def _load_from_file(model_class: Any, checkpoint: Checkpoint, component: str, device: torch.device) -> nn.Module:
    from . import partial

    source = WeightSource(checkpoint.stored(component), model_class.__name__)
    module = partial.empty(model_class, checkpoint.config(component), torch.float32)
    source.check(_shapes(module))
    partial.fill(module, source, {}, device)
    return module.eval().requires_grad_(False)


def text_encoder_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Return the bytes that the text encoder takes in a dtype, according to the files' headers."""
    return _stored_values(checkpoint, "text_encoder") * dtype.itemsize


def vae_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes that the VAE takes, in float32, according to the files' headers."""
    return _stored_values(checkpoint, "vae") * torch.float32.itemsize


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
            low_cpu_mem_usage=True,
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
