"""Loading components of a checkpoint to a device: safetensors only, nothing is downloaded.

diffusers and transformers are imported at the first load: that takes seconds, and a rank must respond before it.
"""

from typing import Any

import torch
from torch import nn

from ..checkpoint.checkpoint import Checkpoint
from ..distributed.mesh import DeviceMesh
from ..distributed.rank_speeds import handicap, slowed
from ..errors import InvalidRequest
from ..interfaces.family import Family
from ..interfaces.tensor_cuts import Slices
from ..models import FAMILIES, family_of
from ..protocol.messages import DType
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


def resolve_dtype(checkpoint: Checkpoint, dtype: DType, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in.

    ``auto`` is float32 on a CPU. On a GPU it is the dtype in which most of the transformer's weights are stored, except
    that float32, and any dtype that torch cannot compute in, becomes bfloat16.
    """
    if dtype != "auto":
        return DTYPES[dtype]
    if device.type == "cpu":
        return torch.float32
    return torch.float16 if checkpoint.stored_dtype("transformer") == "F16" else torch.bfloat16


def check_component(checkpoint: Checkpoint, component: str) -> None:
    """Refuse a component that is missing, of an unsupported class, quantised, or not in safetensors.

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


def load_transformer(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, mesh: DeviceMesh, component: str = "transformer"
) -> Family:
    """Load this rank's part of a transformer and wrap it in its family. What diffusers keeps in float32 stays so."""
    import diffusers

    from . import partial

    name = checkpoint.components[component]
    source, config = WeightSource(checkpoint.stored(component), name), checkpoint.config(component)
    module = partial.empty(getattr(diffusers, name), config, dtype)
    source.check(_shapes(module), only=not checkpoint.path.is_dir())
    loaded = _load_part(family_of(name), module, source, config, device, mesh)
    factor = handicap(mesh.whole.index)
    loaded.run = slowed(loaded.run, factor, device) if factor > 1 else loaded.run
    return loaded


def _load_part(
    family: type[Family],
    module: nn.Module,
    source: WeightSource,
    config: dict[str, Any],
    device: torch.device,
    mesh: DeviceMesh,
) -> Family:
    from ..strategies import sharded_weights, tensor
    from . import partial

    layout = mesh.layout
    slices: Slices = {}
    if layout.tensor > 1:
        slices = tensor.cut(module, family.cuts(config), mesh.axes["tensor"], device.type)
    loaded = family(module)
    if layout.pipe > 1:
        loaded.keep_blocks(stage_cut.blocks(loaded, mesh.speeds("pipe")).slice(mesh.axes["pipe"].index))
    if mesh.weights_axis:
        blocks = [part for block in loaded.blocks for part in block.modules]
        loaded.run = sharded_weights.shard(blocks, loaded.run, mesh.weights_axis, device.type)
    partial.fill(module, source, slices, device)
    module.eval().requires_grad_(False)
    return loaded


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


def load_text_encoder(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
    """Load the text encoder."""
    import transformers

    encoder_class = getattr(transformers, checkpoint.components["text_encoder"])
    return _load(encoder_class, checkpoint, "text_encoder", device, dtype=dtype)


def _load(model_class: Any, checkpoint: Checkpoint, component: str, device: torch.device, **options: Any) -> nn.Module:
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
