"""Model files in ComfyUI's own names: ComfyUI's model against Parallel Loader on the same weights."""

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.supported_models
import diffusers
import folder_paths
import pytest
import torch
from any_folder_name.nodes.bridges.bridge import meta_module
from any_folder_name.nodes.families.registry import bridge_for
from any_folder_name.parallel_backend.checkpoint.architectures import architecture_of, architectures, recognise
from any_folder_name.parallel_backend.checkpoint.opening import open_checkpoint
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from any_folder_name.parallel_backend.loading.weight_source import WeightSource
from helpers.inside_fixtures import Loaded, ksampler, native_case, parallel_sampler, relative_error
from helpers.layout_cover import layouts
from natives import CASES, FIRST, HEAVY, cogvideox, z_image
from natives.files import FILE_CASES, in_metadata, metadata
from natives.loadable import by_image_model
from safetensors.torch import save_file

CLOSE = 1e-4
PREFIX = "model.diffusion_model."
NAMES = [
    pytest.param(name, marks=pytest.mark.newest if name in HEAVY or name not in FIRST else ()) for name in FILE_CASES
]

SAMPLED = [
    *[pytest.param(name, marks=pytest.mark.newest if name in HEAVY else ()) for name in FIRST],
    *[pytest.param(f"hunyuan_video i2v replace{kind}") for kind in ("", " without guidance")],
]
"""One case a family, and those whose requests say what the file does not; other variants differ in recognition."""


def test_two_families_with_assumed_sizes_for_one_image_model_are_refused() -> None:
    other = SimpleNamespace(__name__="natives.lumina2", CASES=z_image.CASES, ASSUMED={"n_heads": 6})
    assert by_image_model([z_image]) == {"lumina2": z_image.ASSUMED}
    with pytest.raises(ValueError, match="z_image and lumina2 have ASSUMED for 'lumina2': let another number decide"):
        by_image_model([z_image, other])


@cache
def native_file(name: str) -> Any:
    """Return ComfyUI's own model of a case."""
    return FILE_CASES[name].native()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of ComfyUI's ``diffusion_models``."""
    folder: Path = tmp_path_factory.mktemp("diffusion_models")
    folder_paths.folder_names_and_paths["diffusion_models"][0][:] = [str(folder)]
    return folder


def save(path: Path, native: Any, prefix: str = "", **transformer: Any) -> None:
    """Save a native model, with entries of its config that files hold as metadata."""
    weights = native.model.diffusion_model.state_dict()
    said = {"config": json.dumps({"transformer": transformer})}
    save_file({prefix + name: tensor.clone().contiguous() for name, tensor in weights.items()}, path, said)


@pytest.fixture
def load_file(files: Path, load_remote: Callable[..., Loaded]) -> Callable[..., Any]:
    """``load_file(name, layout)`` returns Parallel Loader's MODEL for a case's file."""

    def run(name: str, layout: ParallelLayout | None) -> Any:
        file = files / f"{name}.safetensors"
        if not file.exists():
            save(
                file,
                native_file(name),
                **in_metadata(FILE_CASES[name]),
            )
        return load_remote(layout, name=f"diffusion_models/{file.name}").model

    return run


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.daily(21)
def test_the_published_architecture_is_recognised(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    case.describe(tmp_path, case.published)
    folder = open_checkpoint(tmp_path)
    bridge = bridge_for(folder)
    weights = dict(meta_module(bridge.native_class, bridge.unet_config()).state_dict())
    said = metadata(replace(case, unet=bridge.unet_config()))
    found = recognise({key: tuple(tensor.shape) for key, tensor in weights.items()}, said, architectures())
    assert (found.class_name, found.native) == (case.transformer, case.transformer != "QwenImageTransformer2DModel")
    published = folder.config("transformer")
    given = {key: value for key, value in published.items() if value is not None}
    different = {key: value for key, value in found.config.items() if _plain(given.get(key, value)) != _plain(value)}
    assert different == {}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("ltx t2v", {"causal_temporal_positioning"}),
        ("wan t2v", {"text_len", "flf_pos_embed_token_number", "in_dim_ref_conv", "wan_attn_block_class"}),
    ],
)
def test_every_setting_that_comfyui_reads_from_metadata_is_known(name: str, other: set[str], tmp_path: Path) -> None:
    """``other`` are settings that change nothing, that names show, or that the bridge passes on."""
    case = CASES[name]
    case.describe(tmp_path, case.config)
    folder = open_checkpoint(tmp_path)
    parameters = set(inspect.signature(bridge_for(folder).native_class).parameters)
    known = architecture_of(case.transformer).expected(folder.config("transformer")).keys()
    assert parameters - known - other == {"dtype", "device", "operations", *(parameters & {"kwargs"})}


@pytest.mark.newest
@pytest.mark.parametrize("prefix", ["", PREFIX])
@pytest.mark.parametrize("name", [name for name in FIRST if "z_image" not in name])
@pytest.mark.daily(4)
def test_parameters_are_read_from_native_rows(name: str, prefix: str, tmp_path: Path) -> None:
    case, native = CASES[name], native_case(name)
    save(tmp_path / "tiny.safetensors", native, prefix)
    file = open_checkpoint(tmp_path / "tiny.safetensors")
    source = WeightSource(file.stored("transformer"), file.components["transformer"])
    expected = case.converted(
        {key: tensor.clone() for key, tensor in native.model.diffusion_model.state_dict().items()}
    )
    for key, tensor in expected.items():
        read = torch.empty_like(tensor)
        source.read(key, 0, None, None, into=read)
        assert torch.equal(read, tensor), key
        half = slice(len(tensor) // 3, len(tensor)) if tensor.ndim else None
        if half is not None:
            part = torch.empty_like(tensor[half])
            source.read(key, 0, (half,), None, into=part)
            assert torch.equal(part, tensor[half]), key


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.daily(5)
def test_sampling_from_a_file_equals_comfyui(name: str, load_file: Callable[..., Any]) -> None:
    case = FILE_CASES[name]
    latent = case.samples()
    options = {
        "positive": case.conditioning(1),
        "negative": case.conditioning(2, shorter=case.shorter),
        "cfg": case.cfg,
    }
    reference = ksampler(case.patch(native_file(name)), latent, **options)
    for sample, layout in zip((ksampler, parallel_sampler), layouts(name), strict=True):
        error = relative_error(sample(case.patch(load_file(name, layout)), latent, **options), reference)
        assert error < CLOSE, f"{sample.__name__}, {layout}: {error:.1e}"


@pytest.mark.newest
@pytest.mark.parametrize(
    ("stored", "size"),
    [
        *[(None, (34, 40)), (64, (34, 40)), (32, (90, 112))],
        *[pytest.param(*case, marks=pytest.mark.grid) for case in ((None, (90, 112)), (64, (130, 64)))],
    ],
    ids=str,
)
@pytest.mark.daily(1)
def test_pixart_places_tokens_as_comfyui(
    stored: int | None, size: tuple[int, int], files: Path, load_remote: Callable[..., Loaded]
) -> None:
    """``stored`` is the number of rows of the positions that the file holds; ComfyUI derives a factor from it."""
    name = "pixart alpha"
    given = {} if stored is None else {"pe_interpolation": stored * 2 // 64}
    case = replace(CASES[name], unet={**CASES[name].unet, **given}, latent=(1, 4, *size))
    native, file = case.native(), files / f"pixart {stored}.safetensors"
    weights = {key: tensor.clone() for key, tensor in native.model.diffusion_model.state_dict().items()}
    save_file(weights | ({} if stored is None else {"pos_embed": torch.zeros(1, stored**2, 96)}), file)
    options = {"positive": case.conditioning(1), "negative": case.conditioning(2, shorter=3), "steps": 1}
    reference = ksampler(native, case.samples(), **options)
    ours = load_remote(None, name=f"diffusion_models/{file.name}").model
    for sample in (ksampler, parallel_sampler):
        assert relative_error(sample(ours, case.samples(), **options), reference) < CLOSE


def test_cogvideox_from_a_file_needs_comfyuis_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(comfy.supported_models, "CogVideoX_T2V", raising=False)
    module = diffusers.CogVideoXTransformer3DModel(**cogvideox.CONFIG, in_channels=16)
    save_file(module.state_dict(), tmp_path / "tiny.safetensors")
    with pytest.raises(InvalidRequest, match=r"tiny.safetensors: this version of ComfyUI has no CogVideoX, .*folder"):
        bridge_for(open_checkpoint(tmp_path / "tiny.safetensors"))
