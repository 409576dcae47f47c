"""LoRAs on fp8 files. ComfyUI merges them into fp8 weights and rounds the sum at random; the ranks do not round it.

``pytest -rP`` shows the numbers that ``web/docs/ParallelLoader.md`` names.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.quant_ops
import comfy.sd
import pytest
import torch
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers import compressed_files, loras
from helpers.inside_fixtures import Loaded, ksampler, relative_error
from natives.files import FILE_CASES

CLOSE = 1e-4


@pytest.mark.skipif("float8_e4m3fn" not in comfy.quant_ops.QUANT_ALGOS, reason="not in this version of ComfyUI")
@pytest.mark.parametrize("name", ["sd3 3.5 medium", pytest.param("flux dev", marks=pytest.mark.newest)])
@pytest.mark.daily(1)
def test_the_ranks_are_nearer_to_the_exact_sum_than_comfyui(
    name: str, folder: Path, load_remote: Callable[..., Loaded]
) -> None:
    case, file = FILE_CASES[name], folder / f"{name} fp8.safetensors"
    exact = case.native()
    plain = {key: each.clone() for key, each in exact.model.diffusion_model.state_dict().items()}
    exact.model.diffusion_model.load_state_dict(compressed_files.write_described(file, plain, "fp8 e4m3"))
    lora = (loras.plain(exact, "diffusion_model.", rank=4, seed=1, alpha=3.0), 0.2)

    def sampled(model: Any) -> torch.Tensor:
        return ksampler(case.patch(loras.on_model(model, lora)), case.samples(), **loras.options_of(case))

    wanted = sampled(exact)
    with torch.inference_mode():  # as ComfyUI runs nodes
        comfyuis = relative_error(sampled(comfy.sd.load_diffusion_model(str(file))), wanted)
    model = load_remote(ParallelLayout.parse("tensor=2"), name=f"diffusion_models/{file.name}").model
    ours = relative_error(sampled(model), wanted)
    print(f"{name}: ours {ours:.1e}, ComfyUI's {comfyuis:.1e}")
    assert ours < CLOSE
    assert comfyuis > 30 * ours
