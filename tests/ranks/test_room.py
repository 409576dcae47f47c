"""Weights for which a device has no room are refused alike on all ranks, before anything is read or unloaded."""

import json
import math
import re
import struct
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.engine.validation import check_sample
from parallel_backend.engine.working_memory import forward_bytes
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Decode, Encode, EncodeText
from parallel_backend.protocol.tensors import describe
from tests.ranks import driver, requests
from tests.ranks.requests import Case
from tests.ranks.test_refusals import refused
from tests.support import tiny

HEAD_DIM, LAYERS, MATRICES = 128, 40, 8
"""Wan has eight square matrices in each layer's two attentions."""

SECONDS = 60.0
"""Far less than a read of more than the machine's memory takes."""


def write_hole(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write a safetensors file with tensors of these shapes in float32, whose data is a hole."""
    entries, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    with file.open("r+b") as stream:
        stream.truncate(8 + len(header) + end)


@pytest.fixture(scope="module")
def enormous(tmp_path_factory):
    """A pipeline whose transformer takes somewhat more than all of the machine's memory."""
    from diffusers import WanTransformer3DModel

    width = math.isqrt(int(1.2 * psutil.virtual_memory().total) // (4 * LAYERS * MATRICES))
    with torch.device("meta"):
        model = WanTransformer3DModel(
            num_attention_heads=width // HEAD_DIM + 1, attention_head_dim=HEAD_DIM, num_layers=LAYERS, ffn_dim=64,
            text_dim=32, freq_dim=32,
        )  # fmt: skip
    folder = tmp_path_factory.mktemp("enormous")
    index = {"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "transformer").mkdir()
    model.save_config(folder / "transformer")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    write_hole(folder / "transformer" / "diffusion_pytorch_model.safetensors", shapes)
    return folder


@pytest.fixture
def limit(pools):
    """``limit(bytes)`` limits the memory of both ranks to that much each; ``limit(bytes, 4)`` that of four."""
    limited = []

    def set_limit(nbytes, ranks=2):
        limited.append(ranks)
        pools(ranks).run(driver.limit_memory, nbytes)

    yield set_limit
    for ranks in limited:
        pools(ranks).run(driver.limit_memory, None)


def loads(answers, path):
    """How often each rank has loaded the model's weights."""
    return [sum(model.loads for model in answer["models"] if model.path == str(path)) for answer in answers]


def parts(answer, path):
    """What a rank holds of a model."""
    return next((model.parts for model in answer["models"] if model.path == str(path)), ())


def layout_of(answer, path):
    """The layout in which a rank has last used a model."""
    return next(model.layout for model in answer["models"] if model.path == str(path))


def sizes_of(sizes):
    """The bytes of a tiny model's transformer and text encoder."""
    modules = tiny.transformer(sizes), tiny.text_encoder(sizes)
    return [sum(parameter.nbytes for parameter in module.parameters()) for module in modules]


def forward_work(path):
    """The bytes that the tensors of a rank take in the step loop of these tests, by the estimate."""
    message, tensors = requests.sample(requests.spec(path, "ulysses=2"), Case())
    plan = check_sample(message, describe(tensors), open_checkpoint(path), 2)
    return forward_bytes("WanTransformer3DModel", plan, 0, 4)


def test_a_step_loop_without_room_for_its_tensors_is_refused_and_weights_stay(pools, checkpoints, limit):
    sizes = tiny.Tiny(heads=2, layers=6, seed=7)
    path, (whole, _) = checkpoints(heads=2, layers=6, seed=7), sizes_of(sizes)
    limit(whole + 2 * forward_work(path))
    works = requests.sample(requests.spec(path, "ulysses=2"), Case())
    before = pools(2).run(driver.handle, *works)
    answers = pools(2).run(driver.handle, *requests.sample(requests.spec(path, "ulysses=2"), Case(size=(9, 15, 21))))
    assert answers[0]["error"] == answers[1]["error"]
    assert re.fullmatch(
        r"NoRoom: rank 0 \(cpu\) has room for 0\.\d\d MB by PARALLEL_DIT_MEMORY_LIMIT, and its weights of model and "
        r"the tensors of this request take at least \d\.\d\d MB: raise PARALLEL_DIT_MEMORY_LIMIT, make a smaller .*",
        answers[0]["error"],
    ), answers[0]["error"]
    assert [answer["steps"] for answer in answers] == [0, 0]
    after = pools(2).run(driver.handle, *works)
    assert [answer["error"] for answer in after] == [None, None]
    assert torch.equal(after[0]["tensors"]["samples"], before[0]["tensors"]["samples"])
    assert loads(after, path) == loads(before, path) == [1, 1]


@pytest.mark.parametrize("encode", [False, True])
def test_a_vae_without_room_for_its_tensors_is_refused_and_weights_stay(pools, checkpoints, limit, encode):
    path = checkpoints(heads=2, layers=6, seed=8)
    spec = requests.spec(path, ranks=2)

    def run(rows):
        message = Encode(model=spec) if encode else Decode(model=spec)
        given = {"pixels": torch.rand(1, 5, 8 * rows, 32, 3)} if encode else {"latent": torch.ones(1, 16, 2, rows, 4)}
        return pools(2).run(driver.handle, message, given)

    limit(2 * 10**6)
    before = run(6)
    assert [answer["error"] for answer in before] == [None, None]
    answers = run(60)
    assert answers[0]["error"] == answers[1]["error"]
    assert answers[0]["error"].startswith(
        "NoRoom: rank 0 (cpu) has room for 2.00 MB by PARALLEL_DIT_MEMORY_LIMIT, and its weights of model's VAE and "
        "the tensors of this request take at least "
    )
    assert answers[0]["error"].endswith("set a tile in Parallel VAE Decode or Encode, or use more devices")
    after = run(6)
    assert [answer["error"] for answer in after] == [None, None]
    assert loads(after, path) == loads(before, path)


def with_speeds(rank, speeds):
    """Let a rank think that a plan has measured these speeds."""
    driver.engine(rank)._speeds = speeds


def test_where_a_faster_rank_has_no_room_for_more_rows_of_the_vae_they_are_equal(pools, checkpoints, limit):
    spec = requests.spec(checkpoints(heads=2, layers=6, seed=8), ranks=2)
    speeds = (1.0, 0.2)
    given = replace(spec, layout=ParallelLayout(ring=2, balance=speeds))

    def run(model, rows):
        latent = {"latent": torch.ones(1, 16, 2, rows, 4)}
        answers = pools(2).run(driver.handle, Decode(model=model, measure="bytes"), latent)
        return [answer["error"] for answer in answers], answers[0]["tensors"]

    def sent(model, rows):
        return run(model, rows)[1]["sent_bytes"].tolist()

    limit(2 * 10**6)
    rows = next(rows for rows in range(60, 0, -6) if run(spec, rows)[0] == [None, None])
    assert all(error.startswith("NoRoom") for error in run(given, rows)[0])
    even = {count: sent(spec, count) for count in (rows, 6)}
    pools(2).run(with_speeds, speeds)
    try:
        assert sent(spec, rows) == even[rows]
        assert sent(spec, 6) == sent(given, 6) != even[6]
    finally:
        pools(2).run(with_speeds, ())


@pytest.mark.parametrize("layout", ["ulysses=2", "ulysses=2 shard_weights", "tensor=2", "pipe=2"])
def test_more_than_the_machines_memory_is_refused_and_other_models_stay(pools, checkpoints, enormous, layout):
    other = checkpoints(heads=2)
    works = requests.sample(requests.spec(other, "ulysses=2"), Case())
    before = loads(pools(2).run(driver.handle, *works), other)
    start = time.monotonic()
    sentence = refused(pools, *requests.sample(requests.spec(enormous, layout), Case()))
    assert time.monotonic() - start < SECONDS
    assert sentence.startswith("ranks 0 and 1 (cpu) have room for ")
    assert f"of {psutil.virtual_memory().total / 1e9:.1f} GB, and their weights of {enormous.name} take " in sentence
    assert "tensor, pipe or shard_weights of Parallel Layout" in sentence
    answers = pools(2).run(driver.handle, *works)
    assert [answer["error"] for answer in answers] == [None, None]
    assert loads(answers, other) == before
    assert not any(progress.phase == "loading" for progress, _ in answers[0]["reports"]), "planned without a need"


@pytest.mark.parametrize(
    ("layers", "chosen"), [(20, "ulysses=2 shard_weights"), (4, "tensor=2")], ids=["many blocks", "large blocks"]
)
def test_auto_lets_the_ranks_share_weights_that_fit_no_device(pools, checkpoints, limit, layers, chosen):
    sizes = tiny.Tiny(heads=2, layers=layers, seed=5)
    path = checkpoints(heads=2, layers=layers, seed=5)
    whole, _ = sizes_of(sizes)
    limit(4 * whole // 5 + 2 * forward_work(path))
    message, tensors = requests.sample(requests.spec(path), Case())
    careful = [answer["error"] for answer in pools(2).run(driver.handle, replace(message, adapt=False), tensors)]
    assert careful[0] == careful[1]
    assert careful[0].startswith("NoRoom: rank 0 (cpu) has room for ")
    for _ in range(2):
        answers = pools(2).run(driver.handle, message, tensors)
        assert [answer["error"] for answer in answers] == [None, None]
        assert requests.relative_error(answers[0]["tensors"]["samples"], requests.stock_sample(sizes, Case())) <= 1e-5
        assert {str(layout_of(answer, path)) for answer in answers} == {chosen}
        assert loads(answers, path) == [1, 1]


def test_auto_gives_a_device_with_less_room_less_of_the_weights(pools, checkpoints, limit):
    """Half of the weights do not fit on the second, which has less than half of the first's room, and all nowhere."""
    sizes = tiny.Tiny(heads=4, layers=12, seed=12)
    path = checkpoints(heads=4, layers=12, seed=12)
    (whole, _), work = sizes_of(sizes), 2 * forward_work(path)
    limit(4 * whole // 5 + work)
    pools(2).run(driver.limit_memory_of, 1, 7 * whole // 20 + work)
    answers = pools(2).run(driver.handle, *requests.sample(requests.spec(path), Case()))
    assert [answer["error"] for answer in answers] == [None, None]
    assert requests.relative_error(answers[0]["tensors"]["samples"], requests.stock_sample(sizes, Case())) <= 1e-5
    layout = layout_of(answers[0], path)
    assert layout.tensor == 2
    assert layout.balance[0] == 1 > layout.balance[1]
    (note,) = {model.note for model in answers[0]["models"] if model.path == str(path)}
    assert note.startswith("less than an even share of 50% for rank 1: ")


def test_steps_with_and_without_guidance_take_turns_without_a_load_each(pools, checkpoints, limit):
    """Four ranks share the weights in pairs for two branches, and all together for one. Later all do so for both."""
    sizes = tiny.Tiny(heads=2, layers=20, seed=8)
    path, guided = checkpoints(heads=2, layers=20, seed=8), Case(texts=(9, 9))
    limit(7 * sizes_of(sizes)[0] // 10 + 2 * forward_work(path), 4)
    cases = (guided, replace(guided, texts=(9,)))
    chosen, counted = [], []
    for case in cases * 3:
        answers = pools(4).run(driver.handle, *requests.forward(requests.spec(path), case))
        assert [answer["error"] for answer in answers] == [None] * 4
        chosen.append(str(layout_of(answers[0], path)))
        counted.append(loads(answers, path)[0])
    assert chosen == ["cfg=2 ulysses=2 shard_weights"] + ["ulysses=4 shard_weights"] * 5
    assert counted == [1] + [2] * 5


def test_a_transformer_that_fits_only_without_a_text_encoder_loads_after_it_has_left(pools, checkpoints, limit):
    sizes = tiny.Tiny(heads=2, layers=6, seed=6)
    path, (whole, encoder) = checkpoints(heads=2, layers=6, seed=6), sizes_of(sizes)
    text = {"ids": torch.tensor([[3, 4, 1]]), "lengths": torch.tensor([3])}
    work = forward_work(path)
    limit(whole + encoder + work + work // 4 - 1)
    answers = pools(2).run(driver.handle, EncodeText(model=requests.spec(path)), text)
    assert [parts(answer, path) for answer in answers] == [("text_encoder",), ()]
    message, tensors = requests.sample(requests.spec(path, "ulysses=2"), Case())
    answers = pools(2).run(driver.handle, message, tensors)
    assert [answer["error"] for answer in answers] == [None, None]
    assert [parts(answer, path) for answer in answers] == [("transformer",), ("transformer",)]
    assert requests.relative_error(answers[0]["tensors"]["samples"], requests.stock_sample(sizes, Case())) <= 1e-5
    limit(whole + encoder - 1)
    encoded = pools(2).run(driver.handle, EncodeText(model=requests.spec(path)), text)
    assert "embeds" in encoded[0]["tensors"]
    assert [parts(answer, path) for answer in encoded] == [("text_encoder",), ("transformer",)]
