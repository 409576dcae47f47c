"""What two cards hold of published model files, by the backend's own estimates: ``python -m lab room``.

The files are written with the published shapes of tensors and without their numbers, as holes that take no room on a
disk. The backend reads nothing of them but their headers and scales, and decides as it does before it loads.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.bench.sent import Published, plan_of
from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.engine.automatic_layout import choose
from parallel_backend.engine.working_memory import forward_bytes
from parallel_backend.errors import InvalidRequest, NoRoom
from parallel_backend.families.modules import module_class_of
from parallel_backend.families.registry import family_of
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.loading import partial
from parallel_backend.loading.offload_plan import ALL, UNDECIDED, PartSizes, TransformerClaim, decide
from parallel_backend.loading.room import Claim
from parallel_backend.loading.transformer_part import whole_sizes

PAGE = Path(__file__).parent.parent / "docs" / "room.md"
CARDS = (24, 32, 48)
"""Sizes of cards in GiB."""
RANKS = 2
TAKEN = 1_200_000_000
"""Bytes of a card that others take: the driver, CUDA's context and NCCL."""
HOST = 64_000_000_000
"""Free bytes of the machine's memory, from which blocks stream."""

_INTRODUCTION = """\
# What fits on two cards

The backend decides before it loads anything, from a file's header and the request's size. This page has what it \
decides for published files on two cards by the rule, without a layout and a plan. `python -m lab room --write` makes \
it, with the same code, from files that have the published shapes and no numbers. A card of 24 GB has 25.8 billion \
bytes, of which {taken:.1f} are the driver's. The machine has {host:.0f} GB free.

- **whole**: each card holds all weights, and the tokens are split (`ulysses=2`).
- **shared**: the cards share the weights, which travel block by block (`ulysses=2 shard_weights`).
- **streams**: so many blocks stream from the machine's memory in each step.

Text encoders and VAEs are ComfyUI's, which frees their memory before the ranks load. Compressed weights stay \
compressed. A LoRA adds its own size. Published fp8 files of LTX-2 and 2.3 keep about 2.4 billion weights in bfloat16 \
that are in fp8 here, which adds 2.4 GB and changes none of these decisions. Files of MiniMax-H3 for references \
(`ref2va`) have the shapes of those for frames (`fl2va`).
"""


@dataclass(frozen=True, kw_only=True)
class File:
    """A published file.

    Attributes:
        model: the model and the size of a request.
        format: of matrices in layers: a key of ``_FORMATS``, or "" for bfloat16.
        layers: beginnings of the names of layers with compressed matrices.
        metadata: what the file says of the transformer.
        besides: names and shapes of matrices that the transformer does not have.
    """

    model: Published
    format: str = ""
    layers: tuple[str, ...] = ("transformer_blocks.",)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    besides: Mapping[str, tuple[int, int]] = field(default_factory=dict)


_FORMATS: Mapping[str, dict[str, Any]] = {
    "int8": {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64},
    "fp8": {"format": "float8_e4m3fn"},
    "nvfp4": {"format": "nvfp4"},
}
"""Descriptions of compressed layers."""
_BYTES = {"I8": 1, "U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4}
_NARROW = ("adaln_proj.", "norm_out.")
"""Layers of MiniMax-H3 that compute in float32 and lie in files in 16 bits."""

_H3 = {"rope_freq_dim": 16, "num_refiner_layers": 2}
_PRUNED = _H3 | {"adaln_curve_grid": 1025, "time_embed_dim": 8}
_GATES = {f"transformer_blocks.{block}.attn.to_gate_compress.weight": (7168, 5376) for block in range(50)}
_H3_AND_REFINER = ("transformer_blocks.", "token_refiner.")
_LTX2 = {"rope_type": "split", "num_layers": 48}
_LTX23 = _LTX2 | {
    "gated_attn": True, "audio_gated_attn": True, "cross_attn_mod": True, "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False,
}  # fmt: skip
_LTX25 = _LTX23 | {"ff_bias": False, "audio_ff_bias": True, "use_keyframes_abs_pos_embedding": True}
_SAID = {"rope_type": "split", "frequencies_precision": "float64", "av_ca_timestep_scale_multiplier": 1000}


def _h3(**config: Any) -> Published:
    return Published(
        class_name="MiniMaxH3Transformer3DModel", config=config, size=(37, 48, 84), text=512,
        what="124 frames of 1344 x 768",
    )  # fmt: skip


def _ltx(variant: str, **config: Any) -> Published:
    return Published(
        class_name="LTX2VideoTransformer3DModel", config=config, variant=variant, size=(16, 22, 40), text=1024,
        what="121 frames of 1280 x 704",
    )  # fmt: skip


_KREA2 = Published(class_name="Krea2Transformer2DModel", size=(1, 128, 128), text=512, what="1024 x 1024")

FILES: Mapping[str, File] = {
    "MiniMax_H3_FL2VA_pruned_nvfp4": File(model=_h3(**_PRUNED), format="nvfp4"),
    "minimax_h3_fl2va_pruned_int8_convrot": File(model=_h3(**_PRUNED), format="int8"),
    "fastvideo_fasth3_8step_v2_pruned_int8_convrot": File(
        model=_h3(**_PRUNED), format="int8", layers=_H3_AND_REFINER, besides=_GATES
    ),
    "minimax_h3_fl2va_int8_convrot": File(model=_h3(**_H3), format="int8"),
    "minimax_h3_fl2va_pruned_bf16": File(model=_h3(**_PRUNED)),
    "minimax_h3_fl2va_bf16": File(model=_h3(**_H3)),
    "ltx-2-19b-dev-fp8": File(model=_ltx("2", **_LTX2), format="fp8", metadata=_SAID),
    "ltx-2-19b-dev": File(model=_ltx("2", **_LTX2), metadata=_SAID),
    "ltx-2.3-22b-dev-fp8": File(model=_ltx("2.3 keyframes", **_LTX23), format="fp8", metadata=_SAID),
    "ltx-2.5-22b-distilled-transformer-comfy-int8-convrot": File(
        model=_ltx("2.5", **_LTX25), format="int8", metadata=_SAID
    ),
    "krea2_turbo_fp8_scaled": File(model=_KREA2, format="fp8", layers=("transformer_blocks.", "text_fusion.")),
    "krea2_turbo_int8_convrot": File(model=_KREA2, format="int8"),
    "krea2_turbo_bf16": File(model=_KREA2),
}  # fmt: skip
"""Files of the official templates, and others of the same models, by name."""


def write(path: Path, file: File) -> None:
    """Write a file's header, its scales, and a hole for its other numbers."""
    module = partial.empty(module_class_of(file.model.class_name), _complete(file.model), torch.bfloat16)
    tensors: dict[str, dict[str, Any]] = {}
    layers: dict[str, Any] = {}
    end = 0
    for name, dtype, shape in _stored(file, module, layers):
        nbytes = prod(shape) * _BYTES[dtype]
        tensors[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    said = {"config": json.dumps({"transformer": dict(file.metadata)})} if file.metadata else {}
    said |= {"_quantization_metadata": json.dumps({"layers": layers})} if layers else {}
    header = json.dumps({"__metadata__": said, **tensors}).encode()
    with path.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + end)
        for name, each in tensors.items():
            if "weight_scale" in name and each["dtype"] == "F32":  # the backend reads these
                stream.seek(8 + len(header) + each["data_offsets"][0])
                stream.write(np.ones(each["shape"], np.float32).tobytes())


def _complete(model: Published) -> dict[str, Any]:
    return dict(family_of(model.class_name).complete(model.config))


def _stored(file: File, module: torch.nn.Module, layers: dict[str, Any]) -> Iterator[tuple[str, str, list[int]]]:
    """Yield name, type and shape of each tensor that the file has, and describe its compressed layers."""
    for name, tensor in module.state_dict().items():
        wide = tensor.dtype == torch.float32 and not any(layer in name for layer in _NARROW)
        is_matrix = not wide and tensor.ndim == 2 and name.endswith(".weight")
        if file.format and is_matrix and tensor.dtype != torch.float32 and name.startswith(file.layers):
            yield from _compressed(name, file.format, list(tensor.shape), layers)
        else:
            yield name, "F32" if wide else "BF16", list(tensor.shape)
    for name, shape in file.besides.items():
        yield from _compressed(name, file.format, list(shape), layers)


def _compressed(name: str, kind: str, shape: list[int], layers: dict[str, Any]) -> Iterator[tuple[str, str, list[int]]]:
    """Yield a compressed matrix and its scales, and describe its layer."""
    layer, (rows, columns) = name.removesuffix(".weight"), shape
    layers[layer] = _FORMATS[kind]
    if kind == "nvfp4":
        yield name, "U8", [rows, columns // 2]
        yield f"{layer}.weight_scale", "F8_E4M3", [rows, columns // 16]
        yield f"{layer}.weight_scale_2", "F32", []
        return
    yield name, "I8" if kind == "int8" else "F8_E4M3", shape
    yield f"{layer}.weight_scale", "F32", [rows, 1] if kind == "int8" else []


@dataclass(frozen=True, kw_only=True)
class Held:
    """What cards hold of a file.

    Attributes:
        nbytes: of the transformer in the file.
        by_card: the decision, by the size of the cards in GiB.
    """

    nbytes: int
    by_card: Mapping[int, str]


def held(file: File) -> Held:
    """Return what cards hold of a file."""
    with tempfile.TemporaryDirectory(prefix="room-") as folder:
        path = Path(folder) / "model.safetensors"
        write(path, file)
        return Held(nbytes=path.stat().st_size, by_card={card: decision(file, path, card << 30) for card in CARDS})


def decision(file: File, path: Path, total: int) -> str:
    """Return what the backend decides on cards of ``total`` bytes, in words."""
    checkpoint, dtype = open_checkpoint(path), torch.bfloat16
    plan = plan_of(file.model, ParallelLayout(ulysses=RANKS))
    room = {"free": total - TAKEN, "freeable": 0, "total": total, "limit": total, "needed": 0}
    layout = choose(plan, checkpoint, dtype, [Claim(**room, device=rank) for rank in range(RANKS)])
    if layout.splits_weights:
        return "shared"
    sizes = whole_sizes(checkpoint, dtype, "transformer")
    work = forward_bytes(file.model.class_name, plan, 0, dtype.itemsize)
    claims = [_claim(sizes, work, room | {"device": rank}) for rank in range(RANKS)]
    try:
        resident = decide(claims, checkpoint.name, dtype)[0]
    except (InvalidRequest, NoRoom) as error:
        return f"refused: {error}"
    return "whole" if resident == ALL else f"{len(sizes.blocks) - resident} of {len(sizes.blocks)} blocks stream"


def _claim(sizes: PartSizes, work: int, room: Mapping[str, int]) -> TransformerClaim:
    return TransformerClaim(
        **{**room, "needed": sizes.whole}, whole=sizes.whole, least=sizes.on_device(0), block=max(sizes.blocks),
        blocks=len(sizes.blocks), work=work, resident=UNDECIDED, part=0, cpu_free=HOST, experts=1, cpu_idle=0,
        cpu_own=0,
    )  # fmt: skip


def page(found: Mapping[str, Held]) -> str:
    """Return the text of the page."""
    rows = [
        f"| `{name}` | {FILES[name].model.what} | {each.nbytes / 1e9:.1f} GB | {' | '.join(each.by_card.values())} |"
        for name, each in found.items()
    ]
    heading = f"| file | request | transformer | {' | '.join(f'2 x {card} GB' for card in CARDS)} |"
    introduction = _INTRODUCTION.format(taken=TAKEN / 1e9, host=HOST / 1e9)
    return "\n".join([introduction, heading, "|---" * (3 + len(CARDS)) + "|", *rows, ""])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} instead of printing it")


def run(options: argparse.Namespace) -> int:
    """Print the page, or write it; return the exit status."""
    text = page({name: held(file) for name, file in FILES.items()})
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0
