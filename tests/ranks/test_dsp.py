"""Whole frames for tokens (DSP) with what else a request may ask for, against one process."""

import pytest
import torch

from parallel_backend.interfaces.geometry import LATENT, TIMESTEP
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Forward
from tests.ranks import driver, requests
from tests.support import families
from tests.support.weight_changes import Change, merged

CLOSE = 1e-5
NAMES = {"STDiT3": "given frames", "LatteTransformer3DModel": "video"}
CASES = [("dsp=2", True, 2), ("dsp=3", False, 1), ("cfg=2 dsp=2", True, 1), ("dsp=3 shard_weights", True, 2)]
"""Layouts, whether blocks stream, and samples. With one sample there is one frame, so ranks have none."""


@pytest.fixture(scope="module")
def loras(tmp_path_factory):
    return {
        name: Change.write(tmp_path_factory.mktemp("lora"), families.module(name, kind), seed=1, rank=3, strength=0.7)
        for name, kind in NAMES.items()
    }


@torch.no_grad()
def on_one_process(name, inputs, changes):
    """The module's own forward with merged weights."""
    module = families.module(name, NAMES[name])
    kept = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    try:
        module.load_state_dict(merged(kept, changes))
        return families.family(name, NAMES[name]).stock(inputs)
    finally:
        module.load_state_dict(kept)


@pytest.mark.parametrize(("layout", "streams", "batch"), CASES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.daily(3)
def test_loras_and_streamed_blocks_equal_one_process(pools, folders, loras, streaming, name, layout, streams, batch):
    """A LoRA on one of two prompts with texts of different lengths, which are no batch."""
    ranks, kind = ParallelLayout.parse(layout).ranks, NAMES[name]
    if streams:
        streaming(ranks)
    size = (1, 5, 7) if batch == 1 else None
    branches = [
        families.inputs(name, kind, batch=batch, size=size, text=text, seed=seed) for seed, text in enumerate((7, 4))
    ]
    branches[1] |= {key: branches[0][key] for key in (LATENT, TIMESTEP)}
    by_branch = ((loras[name],), ())
    message = Forward(
        model=requests.spec(folders(name, kind), layout), branches=2,
        adapters=tuple(tuple(change.file for change in changes) for changes in by_branch),
    )  # fmt: skip
    tensors = {f"{i}.{key}": each for i, inputs in enumerate(branches) for key, each in inputs.items()}
    answers = pools(ranks).run(driver.handle, message, tensors)
    assert [answer["error"] for answer in answers] == [None] * ranks
    for i, inputs in enumerate(branches):
        wanted = on_one_process(name, inputs, by_branch[i])
        assert requests.relative_error(answers[0]["tensors"][str(i)], wanted) <= CLOSE
    plain = on_one_process(name, branches[0], ())
    assert requests.relative_error(plain, on_one_process(name, branches[0], by_branch[0])) > 0.01
