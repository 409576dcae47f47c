"""SkipLayerGuidance behind our MODEL against ComfyUI alone, in every family whose native class can leave out layers."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from comfy_extras.nodes_sd3 import SkipLayerGuidanceSD3
from comfy_extras.nodes_slg import SkipLayerGuidanceDiT, SkipLayerGuidanceDiTSimple
from helpers.inside_fixtures import Loaded, empty_latent, ksampler, native_case, relative_error
from helpers.layout_cover import STRATEGIES
from natives import CASES, FIRST, HEAVY

CLOSE, FAR = 1e-4, 1e-3
NODES: dict[str, Callable[[Any], Any]] = {
    "DiT": lambda model: SkipLayerGuidanceDiT.execute(model, 3.0, 0.0, 1.0, "1, 7", "0, 7").args[0],
    "DiTSimple": lambda model: SkipLayerGuidanceDiTSimple.execute(model, 0.0, 1.0, "0", "0, 1").args[0],
    "SD3": lambda model: SkipLayerGuidanceSD3().execute(model, "0", 3.0, 0.0, 1.0).args[0],
}
IGNORING = ("pixart", "z_image", "cogvideox", "krea2")
"""Families whose native class ignores replaced blocks."""
PAIRS = [(name, node) for name in FIRST for node in NODES if node != "SD3" or name.startswith("sd3 ")]
WITHOUT_EFFECT = [(name, "DiT") for name in HEAVY]
"""What leaves out none of the layers that a case has."""
LIGHT = [(name, node) for name, node in PAIRS if name not in HEAVY]


def sample(model: Any, name: str) -> torch.Tensor:
    case = CASES[name]
    return ksampler(
        model, case.samples(), steps=2, positive=case.conditioning(1), negative=case.conditioning(2, case.shorter)
    )


@cache
def native_result(name: str, node: str) -> torch.Tensor:
    """Return what ComfyUI alone samples, without a node or with one that must have an effect."""
    result = sample(NODES[node](native_case(name)) if node else native_case(name), name)
    if node:
        has_effect = relative_error(result, native_result(name, "")) > FAR
        assert has_effect == (name.split()[0] not in IGNORING and (name, node) not in WITHOUT_EFFECT)
    return result


def check(name: str, node: str, layout: ParallelLayout, load_case: Callable[..., Any]) -> None:
    ours = sample(NODES[node](load_case(name, layout)), name)
    assert relative_error(ours, native_result(name, node)) < CLOSE


@pytest.mark.parametrize(("name", "node"), LIGHT, ids=map(" ".join, LIGHT))
@pytest.mark.daily(9)
def test_equals_comfyui(name: str, node: str, load_case: Callable[..., Any]) -> None:
    layouts = [layout for layout in STRATEGIES if layout.data <= CASES[name].latent[0]]
    check(name, node, layouts[LIGHT.index((name, node)) % len(layouts)], load_case)


@pytest.mark.grid
@pytest.mark.parametrize("layout", STRATEGIES, ids=str)
@pytest.mark.parametrize(("name", "node"), PAIRS, ids=map(" ".join, PAIRS))
def test_equals_comfyui_in_every_layout(
    name: str, node: str, layout: ParallelLayout, load_case: Callable[..., Any]
) -> None:
    if layout.data <= CASES[name].latent[0] and not (name in HEAVY and layout.pipe > 1):
        check(name, node, layout, load_case)


@pytest.mark.newest
def test_a_function_may_read_the_noise_level(native: Any, load_remote: Callable[..., Loaded]) -> None:
    """Such a function cannot be called before sampling."""

    def leave_out(args: Any, extra: Any) -> Any:
        return args if args["transformer_options"]["sigmas"][0] < 2 else extra["original_block"](args)

    results = []
    for model in (native, load_remote(ParallelLayout()).model):
        changed = model.clone()
        changed.set_model_patch_replace(leave_out, "dit", "double_block", 0)
        results.append(ksampler(changed, empty_latent()))
    assert relative_error(results[1], results[0]) < CLOSE
    assert relative_error(results[0], ksampler(native, empty_latent())) > FAR
