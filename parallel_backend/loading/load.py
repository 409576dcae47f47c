"""Loading components from a folder in diffusers layout to a device: safetensors only, nothing is downloaded.

diffusers and transformers are imported at the first load. That takes seconds, and a rank can answer without them.
"""

import json
import struct
from collections import Counter
from typing import Any

import torch
from torch import nn

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.weight_files import weight_files
from ..distributed.mesh import DeviceMesh
from ..distributed.rank_speeds import handicap, slowed
from ..errors import InvalidRequest
from ..interfaces.family import Family
from ..interfaces.tensor_cuts import Slices
from ..models import FAMILIES, family_of
from ..protocol.messages import DType
from ..strategies import stage_cut
from ..vaes import VAES, vae_of

SUPPORTED: dict[str, tuple[str, ...]] = {
    "transformer": tuple(FAMILIES),
    "transformer_2": tuple(FAMILIES),
    "text_encoder": ("T5EncoderModel", "UMT5EncoderModel"),
    "vae": tuple(VAES),
}
"""Supported classes of each component."""

_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_MAX_HEADER = 100_000_000
"""Largest safetensors header in bytes, as in the safetensors library."""


def resolve_dtype(checkpoint: Checkpoint, dtype: DType, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in.

    ``auto`` is float32 on a CPU. On a GPU it is the dtype in which most of the transformer's weights are stored, except
    that float32, and any dtype that torch cannot compute in, becomes bfloat16.
    """
    if dtype != "auto":
        return _DTYPES[dtype]
    if device.type == "cpu":
        return torch.float32
    stored = _stored_dtype(checkpoint)
    return torch.bfloat16 if stored == torch.float32 else stored


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
    weight_files(checkpoint, component)


def load_transformer(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, mesh: DeviceMesh, component: str = "transformer"
) -> Family:
    """Load this rank's part of a transformer, as its family. Parts that diffusers keeps in float32 stay in float32."""
    import diffusers

    name = checkpoint.components[component]
    family, model_class = family_of(name), getattr(diffusers, name)
    if mesh.layout.tensor == 1 and mesh.layout.pipe == 1 and not mesh.layout.shard_weights:
        loaded = family(_load(model_class, checkpoint, component, device, torch_dtype=dtype))
    else:
        loaded = _load_part(family, model_class, checkpoint, component, dtype, device, mesh)
    factor = handicap(mesh.whole.index)
    loaded.run = slowed(loaded.run, factor, device) if factor > 1 else loaded.run
    return loaded


def _load_part(
    family: type[Family],
    model_class: Any,
    checkpoint: Checkpoint,
    component: str,
    dtype: torch.dtype,
    device: torch.device,
    mesh: DeviceMesh,
) -> Family:
    from ..strategies import sharded_weights, tensor
    from . import partial

    config, layout = checkpoint.config(component), mesh.layout
    module = partial.empty(model_class, config, dtype)
    files = partial.WeightFiles(weight_files(checkpoint, component))
    files.check({name: tuple(tensor.shape) for name, tensor in module.state_dict().items()})
    slices: Slices = {}
    if layout.tensor > 1:
        slices = tensor.cut(module, family.cuts(config), mesh.axes["tensor"], device.type)
    loaded = family(module)
    if layout.pipe > 1:
        loaded.keep_blocks(stage_cut.blocks(loaded, mesh.speeds("pipe")).slice(mesh.axes["pipe"].index))
    if mesh.weights_axis:
        blocks = [part for block in loaded.blocks for part in block.modules]
        loaded.run = sharded_weights.shard(blocks, loaded.run, mesh.weights_axis, device.type)
    partial.fill(module, files, slices, device)
    module.eval().requires_grad_(False)
    return loaded


def load_vae(checkpoint: Checkpoint, device: torch.device) -> Any:
    """Load the VAE, always in float32: it is small next to the transformer, and half precision visibly degrades it."""
    import diffusers

    vae_class = getattr(diffusers, checkpoint.components["vae"])
    module = _load(vae_class, checkpoint, "vae", device, torch_dtype=torch.float32)
    vae_of(checkpoint).prepare(module)
    return module


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


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    counts: Counter[str] = Counter()
    for file in weight_files(checkpoint, "transformer"):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _MAX_HEADER:
                raise InvalidRequest(f"{file} is not a safetensors file: its header claims {length} bytes")
            entries = json.loads(stream.read(length))
        for name, entry in entries.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                counts[entry["dtype"]] += end - start
    return _STORED.get(counts.most_common(1)[0][0], torch.bfloat16)
