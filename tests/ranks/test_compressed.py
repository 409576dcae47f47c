"""Compressed weights give what their decoded ones give on one process, and take no more memory than their file."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parallel_backend.checkpoint.stored_tensor import Compression, StoredTensor
from parallel_backend.checkpoint.weight_headers import read_file, weights_under
from parallel_backend.families.shared.patchify import pad_to_patch
from parallel_backend.interfaces.tensor_cuts import local_ranges
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.layout.partition import Partition
from tests.ranks import driver, requests
from tests.ranks.requests import Case
from tests.support import compressed
from tests.support.weight_changes import Change, merged, write_overlay

CLOSE, FILE = 1e-4, 1.1
PATCH = (1, 2, 2)
LAYOUTS = [
    "",
    "ulysses=2",
    "tensor=2",
    "tensor=3",
    "ulysses=2 shard_weights",
    "ring=3 shard_weights",
    "pipe=2 patches=1",
]
COLUMNS_CUT = {"to_out.0.weight": 128, "ffn.net.2.weight": 1}
"""Ends of the names of weights whose columns ``tensor`` cuts, and how many columns stay together."""

Write = Callable[[Path, dict[str, Tensor]], dict[str, Tensor]]

MIXED: dict[str, Write] = {
    "described.safetensors": lambda path, weights: compressed.write_described(path, weights, *compressed.FORMATS),
    "scaled.safetensors": compressed.write_scaled,
    "model.gguf": lambda path, weights: compressed.write_gguf(path, weights, *compressed.GGUF_TYPES),
}
"""Files with all formats of a dialect, in turn."""


def written_as(name: str) -> Write:
    def write(path: Path, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        of_gguf = name in compressed.GGUF_TYPES
        return (compressed.write_gguf if of_gguf else compressed.write_described)(path, weights, name)

    return write


EACH: dict[str, Write] = {
    **{f"{name}.safetensors": written_as(name) for name in compressed.FORMATS},
    **{f"{kind}.gguf": written_as(kind) for kind in compressed.GGUF_TYPES},
}
"""A file for each format."""


@pytest.fixture(scope="module")
def model():
    """Wan of the published heads' width. Neither its heads nor its features divide by three."""
    from diffusers import WanTransformer3DModel

    module = WanTransformer3DModel(
        patch_size=PATCH, num_attention_heads=4, attention_head_dim=128, in_channels=16, out_channels=16, text_dim=32,
        freq_dim=256, ffn_dim=1024, num_layers=2, rope_max_seq_len=64,
    )  # fmt: skip
    return module.eval()


def plain_weights(model) -> dict[str, Tensor]:
    """The weights that are written in every format."""
    random = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(tensor.shape, generator=random) * (tensor[0].numel() ** -0.5 if tensor.ndim >= 2 else 0.1)
        for name, tensor in model.state_dict().items()
    }


@pytest.fixture(scope="module")
def files(model, tmp_path_factory):
    """``files(name)`` is a file, and the prediction of its decoded weights."""
    written: dict[str, tuple[Path, Tensor]] = {}

    @torch.no_grad()
    def file(name: str) -> tuple[Path, Tensor]:
        if name not in written:
            path = tmp_path_factory.mktemp("compressed") / name
            model.load_state_dict((MIXED | EACH)[name](path, plain_weights(model)))
            case = Case(texts=(9,))
            out = model(pad_to_patch(case.latent, PATCH), case.timestep, case.text(0), return_dict=False)[0]
            written[name] = path, out[:, :, :3, :5, :7]
        return written[name]

    return file


def check_values(pools, file, layout, ranks):
    path, wanted = file
    message, tensors = requests.forward(requests.spec(path, layout), Case(texts=(9,)))
    answers = pools(ranks).run(driver.handle, message, tensors)
    assert [answer["error"] for answer in answers] == [None] * ranks
    assert requests.relative_error(answers[0]["tensors"]["0"], wanted) <= CLOSE


def check(pools, file, layout):
    path, _ = file
    ranks = ParallelLayout.parse(layout).ranks
    check_values(pools, file, layout, ranks)
    held = sum(pools(ranks).run(driver.held_bytes, "blocks."))
    assert held <= FILE * expected_bytes(path, ParallelLayout.parse(layout))


def expected_bytes(path, layout):
    """The bytes of the blocks' weights on all ranks, from the file's bytes and the layout's numbers."""
    header = read_file(path)
    stored = sum(each.bytes for name, each in header.tensors.items() if name.startswith("blocks."))
    widened = sum(
        weight.bytes * (widening(weight, together, layout.tensor) - 1)
        for name, weight in weights_under("", header).items()
        for end, together in COLUMNS_CUT.items()
        if name.endswith(end)
    )
    return (stored + widened) * (1 if layout.shard_weights else layout.ulysses)


def widening(weight, together, ranks):
    """How many columns the ranks hold for each of the weight's, since each part starts and ends between blocks.

    Of 512 columns in 4 heads, 3 ranks use 256, 128 and 128, and hold 256 each in blocks of 256.
    """
    columns, unit = weight.shape[1], weight.compression.unit if weight.compression else 1
    segments, shares = ((columns // together, together),), partial(Partition.even, parts=ranks)
    parts = [part for rank in range(ranks) for part in local_ranges(segments, shares, rank)]
    return sum(-(-part.stop // unit) * unit - part.start // unit * unit for part in parts) / columns


def test_the_ranks_hold_whole_blocks():
    weight = StoredTensor(
        file=Path(), name="", dtype="Q4_K", shape=(512, 512), bytes=0, offset=0,
        compression=Compression(format="Q4_K", block=256, block_bytes=144),
    )  # fmt: skip
    assert [widening(weight, 128, ranks) for ranks in (1, 2, 3)] == [1.0, 1.0, 1.5]


@pytest.mark.parametrize("name", MIXED)
def test_each_layout_after_each_other_equals_the_decoded_weights(pools, files, name):
    for layout in ("ulysses=3", "tensor=3", "tensor=2", "ulysses=2", "pipe=2 patches=1", "tensor=3"):
        check_values(pools, files(name), layout, 3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MIXED)
@pytest.mark.daily(7)
def test_equals_the_decoded_weights(pools, files, name, layout):
    check(pools, files(name), layout)


@pytest.mark.grid
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", EACH)
def test_each_format_equals_its_decoded_weights(pools, files, name, layout):
    check(pools, files(name), layout)


@pytest.mark.parametrize("layout", ["", "tensor=3", "ulysses=2 shard_weights", "pipe=2 patches=1"])
@pytest.mark.parametrize("name", MIXED)
@pytest.mark.daily(4)
def test_loras_and_overlays_change_compressed_weights(pools, files, model, tmp_path, name, layout):
    check_changes(pools, files, model, tmp_path, name, layout)


@pytest.mark.long
def test_loras_and_overlays_change_compiled_compressed_weights(pools, files, model, tmp_path, compiled_eagerly):
    compiled_eagerly(3)
    check_changes(pools, files, model, tmp_path, "model.gguf", "tensor=3", "blocks")


def check_changes(pools, files, model, tmp_path, name, layout, compiled="off"):
    path, unchanged = files(name)
    decoded = (MIXED[name])(tmp_path / name, plain_weights(model))
    lora = Change.write(tmp_path, model, seed=1, rank=3, strength=0.6)
    overlay, replaced = write_overlay(
        tmp_path, model, [f"blocks.0.attn1.{layer}.weight" for layer in ("to_q", "to_out.0")]
    )
    ranks, case = ParallelLayout.parse(layout).ranks, Case(texts=(9,))
    loads = set()
    moved = replace(overlay, path=str(tmp_path / "moved.safetensors"))
    for given, weights in (
        (None, decoded),
        (overlay, decoded | replaced),
        (moved, decoded | replaced),
        (None, decoded),
    ):
        if given is moved:
            Path(overlay.path).rename(moved.path)
        model.load_state_dict(merged(weights, [lora]))
        with torch.no_grad():
            out = model(pad_to_patch(case.latent, PATCH), case.timestep, case.text(0), return_dict=False)[0]
        message, tensors = requests.forward(replace(requests.spec(path, layout), compile=compiled), case)
        changed = replace(message, adapters=((lora.file,),), overlay=given)
        answers = pools(ranks).run(driver.handle, changed, tensors)
        assert [answer["error"] for answer in answers] == [None] * ranks
        assert requests.relative_error(answers[0]["tensors"]["0"], out[:, :, :3, :5, :7]) <= CLOSE
        assert requests.relative_error(unchanged, out[:, :, :3, :5, :7]) > 100 * CLOSE
        loads.add(tuple(each.loads for answer in answers for each in answer["models"] if each.path == str(path)))
    assert len(loads) == 1
    check(pools, (path, unchanged), layout)


@pytest.mark.parametrize("layout", [pytest.param("ulysses=2", marks=pytest.mark.long), "tensor=3"])
def test_compressed_weights_that_stream_are_changed_alike(pools, files, model, tmp_path, streaming, layout):
    streaming(ParallelLayout.parse(layout).ranks)
    for name in list(MIXED)[:2]:
        check_changes(pools, files, model, tmp_path, name, layout)
