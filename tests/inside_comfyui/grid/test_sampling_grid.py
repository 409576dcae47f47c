"""Every family's file through ComfyUI's own loader and samplers, against the same workflow on one to three ranks.

What is compared, with eight steps and a guidance of 5 in float32:

- *UNETLoader* against *Parallel Loader* on the same file;
- *UNETLoader* and the family's ModelSampling node, against both with *Parallel Model* behind them;
- *KSampler* and *Parallel Sampler* behind each.

All four meet in each test. The tests are these:

- every family in every layout, with euler and the schedule simple;
- every family with other samplers and schedules in one layout. Layouts take turns over families;
- every family with img2img, inpainting and a batch of 3 in two layouts each;
- every variant (guidance, image to video, masks, reference latents, text masks) in two layouts each.

ComfyUI's result is computed once for each setting. Run it with ``bash scripts/test.sh --grid``.
"""

import importlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import comfy.model_detection
import comfy.sd
import folder_paths
import pytest
import torch
from any_folder_name.nodes.layout import ParallelLayoutNode
from any_folder_name.nodes.loader import ParallelLoader
from any_folder_name.nodes.model import ParallelModel
from any_folder_name.nodes.sampler import ParallelSampler
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers.executor import Executor, Given, Prompt
from helpers.inside_fixtures import parts_of
from natives.loadable import CASES, FIRST, SAMPLING, file_name, with_assumed_sizes, write

pytestmark = pytest.mark.grid
STEPS, GUIDANCE = 8, 5.0
LAYOUTS: dict[str, dict[str, Any]] = {
    "ulysses=1": {},
    "ulysses=2": {"ulysses": 2},
    "ulysses=3": {"ulysses": 3},
    "tensor=2": {"tensor": 2},
    "ulysses=2 shard_weights": {"ulysses": 2, "shard_weights": True},
    "cfg=2": {"cfg": 2},
    "pipe=2 patches=1": {"pipe": 2, "patches": 1},
}
AXES = ("data", "cfg", "pipe", "ring", "ulysses", "tensor")
DOORS = ("ParallelLoader", "ParallelModel")
SCHEDULES = (("dpmpp_2m", "beta"), ("uni_pc", "normal"))
LATENT_FEATURES = ("img2img", "inpainting", "batch of 3")
ONE_SAMPLE = ("minimax_h3",)
"""Families of which ComfyUI takes one sample."""
VARIANTS = tuple(name for name in CASES if name not in FIRST)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a prompt samples.

    Attributes:
        name: the case.
        sampler: the sampler's name.
        scheduler: the schedule's name.
        feature: one of ``LATENT_FEATURES``, or nothing.
    """

    name: str
    sampler: str = "euler"
    scheduler: str = "simple"
    feature: str = ""

    @property
    def family(self) -> str:
        """The case's family."""
        return self.name.split()[0]

    @property
    def denoise(self) -> float:
        """The part of the schedule that runs."""
        return 0.6 if self.feature == "img2img" else 1.0

    def latent(self) -> dict[str, Any]:
        """Return LATENT."""
        latent = CASES[self.name].samples()
        if not self.feature:
            return latent
        parts = parts_of(latent["samples"])
        if self.feature == "batch of 3":
            return {**latent, "samples": joined([part[:1].repeat(3, *[1] * (part.ndim - 1)) for part in parts])}
        random = torch.Generator().manual_seed(11)
        latent = {**latent, "samples": joined([torch.randn(part.shape, generator=random) for part in parts])}
        if self.feature == "inpainting":
            masks = [torch.randn(1, 1, *part.shape[2:], generator=random) for part in parts]
            latent["noise_mask"] = joined([(mask > 0).float() for mask in masks])
        return latent

    def given(self) -> dict[str, Any]:
        """Return what the prompt's ``Given`` nodes output, by key."""
        case = CASES[self.name]
        return {
            f"{self} positive": case.conditioning(1),
            f"{self} negative": case.conditioning(2, shorter=case.shorter),
            f"{self} latent": self.latent(),
        }


def joined(parts: list[torch.Tensor]) -> Any:
    """Return the nested latent or mask of several tensors, or the only one."""
    if len(parts) == 1:
        return parts[0]
    from comfy.nested_tensor import NestedTensor  # the oldest version has none

    return NestedTensor(parts)


def prompt(setting: Setting, *, door: str, sampled_by: str, devices: str = "", layout: str = "") -> Prompt:
    """Return a prompt. Without ``devices`` it is the same workflow in ComfyUI alone."""
    sampling, file = SAMPLING[setting.family], file_name(setting.name)
    own = {"devices": devices, "layout": ["layout", 0], "attention": "auto"}
    nodes: Prompt = {"load": _node("UNETLoader", unet_name=file, weight_dtype="default")}
    if devices and door == "ParallelLoader":
        nodes["load"] = _node("ParallelLoader", model_name=f"diffusion_models/{file}", dtype="auto", **own)
    model = "load"
    if door == "ParallelModel" or sampling.needed:
        nodes["schedule"], model = _node(sampling.node, model=["load", 0], **sampling.inputs), "schedule"
    if devices and door == "ParallelModel":
        nodes["parallel"], model = _node("ParallelModel", model=[model, 0], **own), "parallel"
    return nodes | {
        "layout": _node("ParallelLayout", **dict.fromkeys(AXES, 1) | LAYOUTS.get(layout, {})),
        "positive": _node("Given", key=f"{setting} positive"),
        "negative": _node("Given", key=f"{setting} negative"),
        "latent": _node("Given", key=f"{setting} latent"),
        "sample": _node(
            sampled_by, model=[model, 0], positive=["positive", 0], negative=["negative", 0],
            latent_image=["latent", 0], seed=5, steps=STEPS, cfg=GUIDANCE, sampler_name=setting.sampler,
            scheduler=setting.scheduler, denoise=setting.denoise,
        ),
        "keep": _node("Recorder", value=["sample", 0]),
    }  # fmt: skip


def _node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def executor() -> Executor:
    """Return ComfyUI's executor with nothing cached."""
    modules = {
        each.node: importlib.import_module(f"comfy_extras.{each.module}") for each in SAMPLING.values() if each.module
    }
    sampling = [getattr(module, node) for node, module in modules.items()]
    return Executor(ParallelModel, ParallelLoader, ParallelLayoutNode, ParallelSampler, *sampling)


@cache
def reference(setting: Setting, door: str) -> Any:
    """Return what ComfyUI alone samples."""
    load = comfy.sd.load_diffusion_model

    def load_repaired(path: str, **options: Any) -> Any:
        loaded = load(path, **options)
        CASES[setting.name].repair(loaded.model.diffusion_model)
        return loaded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfy.sd, "load_diffusion_model", load_repaired)
        samples = executor().run(prompt(setting, door=door, sampled_by="KSampler"))[0]["samples"]
    for part in parts_of(samples):
        assert torch.isfinite(part).all()
        assert part.std() > 0.1
    return samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """ComfyUI's ``diffusion_models``. Its files take gigabytes, so they do not outlive the run."""
    folder: Path = tmp_path_factory.mktemp("diffusion_models")
    folder_paths.folder_names_and_paths["diffusion_models"][0][:] = [str(folder)]
    yield folder
    shutil.rmtree(folder)


def needless_load(path: str, **options: Any) -> None:
    """Stand where ComfyUI's function that reads a model stands."""
    raise AssertionError(f"ComfyUI also loads {path}")


Check = Callable[[Setting, str], None]


@pytest.fixture
def check(
    folder: Path, use_ranks: Callable[[int], str], compare: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> Check:
    """``check(setting, layout)`` compares both nodes and samplers with ComfyUI alone, which reads no file then."""
    detect = with_assumed_sizes(comfy.model_detection.detect_unet_config)
    monkeypatch.setattr(comfy.model_detection, "detect_unet_config", detect)

    def run(setting: Setting, layout: str) -> None:
        write(setting.name, folder)
        folder_paths.filename_list_cache.clear()
        Given.values = setting.given()
        devices, parallel = use_ranks(ParallelLayout.parse(layout).ranks), executor()
        expected = {door: reference(setting, door) for door in DOORS}
        monkeypatch.setattr(comfy.sd, "load_diffusion_model", needless_load)
        for door in DOORS:
            for node in ("KSampler", "ParallelSampler"):
                ours = parallel.run(prompt(setting, door=door, sampled_by=node, devices=devices, layout=layout))
                compare(setting.family, f"{door}, {node}, {layout}", ours[0]["samples"], expected[door])

    return run


def in_turn(name: str, count: int, *, start: int = 0) -> list[str]:
    """Return some layouts, which differ from case to case and with ``start``."""
    first = (list(CASES).index(name) + start) * count
    return [tuple(LAYOUTS)[(first + i) % len(LAYOUTS)] for i in range(count)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FIRST)
def test_every_layout(name: str, layout: str, check: Check) -> None:
    check(Setting(name=name), layout)


@pytest.mark.parametrize(("sampler", "scheduler"), SCHEDULES)
@pytest.mark.parametrize("name", FIRST)
def test_every_sampler(name: str, sampler: str, scheduler: str, check: Check) -> None:
    [layout] = in_turn(name, 1, start=SCHEDULES.index((sampler, scheduler)))
    check(Setting(name=name, sampler=sampler, scheduler=scheduler), layout)


@pytest.mark.parametrize("feature", LATENT_FEATURES)
@pytest.mark.parametrize("name", FIRST)
def test_every_kind_of_latent(name: str, feature: str, check: Check) -> None:
    if feature == "batch of 3" and name.split()[0] in ONE_SAMPLE:
        pytest.skip("ComfyUI itself takes one sample")
    for layout in in_turn(name, 2, start=LATENT_FEATURES.index(feature)):
        check(Setting(name=name, feature=feature), layout)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant(name: str, check: Check) -> None:
    for layout in in_turn(name, 2):
        check(Setting(name=name), layout)
