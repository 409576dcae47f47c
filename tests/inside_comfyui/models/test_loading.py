"""What Parallel Loader and Parallel Layout refuse, and what the loader reads from a checkpoint."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.cli_args
import comfy.latent_formats
import comfy.utils
import latent_preview
import pytest
import torch
from any_folder_name.nodes.backend.progress_text import shown_progress
from any_folder_name.nodes.layout import ParallelLayoutNode
from any_folder_name.nodes.loader import ParallelLoader, handle_for
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.layout.modes import LayoutMode
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from any_folder_name.parallel_backend.protocol.messages import Progress
from helpers.inside_fixtures import Loaded, empty_latent, ksampler, loader_node, parallel_sampler, validated

ONES = {"data": 1, "cfg": 1, "pipe": 1, "ring": 1, "ulysses": 1, "tensor": 1}


def write(folder: Path, **files: Any) -> None:
    """Write JSON files by path, with ``__`` for a slash."""
    for name, content in files.items():
        file = folder / f"{name.replace('__', '/')}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))


def test_a_layout_by_a_mode() -> None:
    assert ParallelLayoutNode.execute(mode="fastest").args[0] == LayoutMode(name="fastest")
    assert ParallelLayoutNode.execute(mode="degrees", cfg=2).args[0] == ParallelLayout(cfg=2)
    assert ParallelLayoutNode.execute(cfg=2).args[0] == ParallelLayout(cfg=2)  # a prompt from before there were modes
    for mode in ("auto", "degrees", None):
        assert ParallelLayoutNode.validate_inputs(mode=mode) is True
    assert ParallelLayoutNode.validate_inputs(mode=None, cfg=0) is True  # a linked mode, which may not be degrees
    for value, state in ((2, "2"), (None, "linked")):
        refused = ParallelLayoutNode.validate_inputs(mode="auto", cfg=value)
        assert refused == f"layout cfg is {state}, and mode 'auto' chooses it: set mode to 'degrees', or cfg to 1"
    with pytest.raises(InvalidRequest, match=r"balance is 2:1, and mode 'fastest' chooses it: .* or balance to ''"):
        ParallelLayoutNode.execute(mode="fastest", balance="2:1")
    wrong = "layout mode 'fast': choose one of auto, fastest, fit memory, "
    assert str(ParallelLayoutNode.validate_inputs(mode="fast")).startswith(wrong)
    with pytest.raises(InvalidRequest, match=wrong):
        ParallelLayoutNode.execute(mode="fast")


@pytest.mark.parametrize("mode", ["auto", "fit memory"])
def test_the_mode_of_a_layout_overrides_the_loaders(mode: str, models: Path) -> None:
    given = handle_for(models / "tiny", "fp32", "0,1", LayoutMode(name=mode), mode="fastest")
    alone = handle_for(models / "tiny", "fp32", "0,1", None, mode="fastest" if mode == "auto" else mode)
    assert given.spec == alone.spec
    assert given.spec.mode == ("fastest" if mode == "auto" else mode)


@pytest.mark.parametrize(("axis", "degree"), [("cfg", 0), ("ulysses", -1), ("pipe", 0)])
def test_layout_error_names_the_degree(axis: str, degree: int) -> None:
    with pytest.raises(InvalidRequest, match=f"layout {axis}={degree}"):
        ParallelLayoutNode.execute(**(ONES | {axis: degree}))
    assert f"layout {axis}={degree}" in ParallelLayoutNode.validate_inputs(**(ONES | {axis: degree}))


def test_options_of_a_layout() -> None:
    options: dict[str, Any] = ONES | {"ring": 2, "stale": "previous", "warmup": 3, "balance": "1:2"}
    assert ParallelLayoutNode.validate_inputs(**options) is True
    assert ParallelLayoutNode.execute(**options).args[0] == ParallelLayout(
        ring=2, stale="previous", warmup=3, balance=(1.0, 2.0)
    )
    assert ParallelLayoutNode.execute(**ONES, stale="off").args[0] == ParallelLayout()
    assert "numbers above 0" in ParallelLayoutNode.validate_inputs(**(options | {"balance": "fast"}))
    assert "and ring is 1" in ParallelLayoutNode.validate_inputs(**(options | {"ring": 1, "balance": ""}))
    # The value of a linked input is not known yet.
    assert ParallelLayoutNode.validate_inputs(**(options | {"ring": None})) is True


def test_degrees_are_checked_beside_linked_ones() -> None:
    linked: dict[str, int | None] = dict.fromkeys(ONES)
    assert ParallelLayoutNode.validate_inputs(**linked) is True
    assert "layout cfg=0" in ParallelLayoutNode.validate_inputs(**(linked | {"cfg": 0}))


@pytest.mark.parametrize(
    ("between", "sampler", "refused"),
    [
        ("ModelSamplingSD3", "KSampler", True),
        ("ModelSamplingSD3", "PerpNegGuider", False),
        ("SelfAttentionGuidance", "KSampler", False),
    ],
)
def test_the_prompt_shows_a_guidance_of_one(models: Path, between: str, sampler: str, refused: bool) -> None:
    node = loader_node()
    node.hidden.prompt = {
        "7": {"class_type": "ParallelLoader", "inputs": {}},
        "8": {"class_type": between, "inputs": {"model": ["7", 0]}},
        "9": {"class_type": sampler, "inputs": {"model": ["8", 0], "cfg": 1.0}},
        "10": {"class_type": "SaveImage", "inputs": {"images": ["9", 0]}},
    }
    if not refused:
        assert node.execute("tiny", "fp32", "0,1", ParallelLayout(cfg=2)).args
        return
    with pytest.raises(InvalidRequest, match="only one prompt"):
        node.execute("tiny", "fp32", "0,1", ParallelLayout(cfg=2))


def test_replaced_files_make_the_loader_run_again(models: Path, load: Callable[..., Loaded]) -> None:
    shutil.copytree(models / "tiny", models / "replaced")
    before, old = ParallelLoader.fingerprint_inputs(model_name="replaced"), load(name="replaced")
    assert before == ParallelLoader.fingerprint_inputs(model_name="replaced", dtype="fp32", devices=None)
    config = models / "replaced" / "transformer" / "config.json"
    config.write_text(config.read_text() + "\n")
    assert ParallelLoader.fingerprint_inputs(model_name="replaced") != before
    specs = [each.model.model.diffusion_model.handle.spec for each in (old, load(name="replaced"))]
    assert specs[0] != specs[1]
    assert ParallelLoader.fingerprint_inputs(model_name="nowhere") == ""


def test_layout_larger_than_the_ranks(load: Callable[..., Loaded]) -> None:
    with pytest.raises(InvalidRequest, match=r'"ulysses=4" needs 4 ranks and there are 2.*"ulysses=2"'):
        load(ParallelLayout(ulysses=4))


@pytest.mark.parametrize(
    "name",
    [
        "..", ".", "", "/", "/etc", "tiny/../../tiny", "tiny/../..", "\0", "a\nb",
        "/etc/passwd", "diffusion_models//etc/passwd", "diffusion_models/../../../../../etc/passwd",
        "checkpoints/../diffusion_models/..", "vae/../../secret.safetensors", "unet_gguf/../../secret.gguf",
    ],
)  # fmt: skip
def test_a_name_that_leads_out_of_the_model_folders_is_no_model(
    models: Path, load: Callable[..., Loaded], name: str
) -> None:
    """Neither by what ComfyUI makes of it, nor by ours. The files that the names would lead to exist."""
    tiny = models / "tiny"
    shutil.copytree(tiny, models.parent / "tiny", dirs_exist_ok=True)
    for suffix in ("safetensors", "gguf"):
        (models.parent / f"secret.{suffix}").write_text("secret")
    with pytest.raises(InvalidRequest, match="no model "):
        load(name=name)
    assert "no model " in str(validated(name))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "no model 'nowhere'; available: shapes"),
        ("../tiny", "no model '../tiny'"),
        ("plain", "no model_index.json"),
        ("unet", "has no transformer"),
        ("sana", "SanaTransformer2DModel is not supported; supported: ChromaTransformer2DModel, Cog"),
        ("other channels", "predicts 12 latent channels; ComfyUI's Wan has 16"),
    ],
)
def test_unusable_folders_are_refused(models: Path, load: Callable[..., Loaded], name: str, message: str) -> None:
    config = json.loads((models / "tiny" / "transformer" / "config.json").read_text())
    wan = {"transformer": ["diffusers", "WanTransformer3DModel"]}
    (models / "plain").mkdir(exist_ok=True)
    write(models / "unet", model_index={"unet": ["diffusers", "UNet2DConditionModel"]})
    write(models / "sana", model_index={"transformer": ["diffusers", "SanaTransformer2DModel"]})
    write(models / "other channels", model_index=wan, transformer__config=config | {"out_channels": 12})
    with pytest.raises(InvalidRequest, match=message):
        load(name=name)
    assert message.split(";")[0] in str(validated(name))


def test_loader_shows_ranks_layout_and_state(models: Path, load: Callable[..., Loaded]) -> None:
    node = loader_node()
    assert node.execute("tiny", "fp32", "0,1,2").ui == {
        "text": ("3 CPU ranks, layout auto (guided, without a plan: ulysses=3): weights load at first use",)
    }
    assert node.execute("tiny", "fp32", "0,1", ParallelLayout(cfg=2)).ui == {
        "text": ("2 CPU ranks, layout cfg=2: weights load at first use",)
    }


def test_previews_and_latents_use_the_checkpoints_numbers(
    models: Path, load: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    factors, bias = [[0.1 * i, -0.2, 0.3] for i in range(16)], [0.5, 0.0, -0.5]
    vae = json.loads((models / "tiny" / "vae" / "config.json").read_text())
    index = json.loads((models / "tiny" / "model_index.json").read_text())
    config = json.loads((models / "tiny" / "transformer" / "config.json").read_text())
    write(
        models / "custom", model_index=index, transformer__config=config, text_encoder__config={},
        vae__config=vae | {"latents_mean": [1.0] * 16, "latents_std": [2.0] * 16},
        latent2rgb={"factors": factors, "bias": bias},
    )  # fmt: skip
    custom, usual = load(name="custom").model.model, load().model.model
    assert torch.equal(custom.process_latent_in(torch.full((1, 16, 1, 1, 1), 5.0)), torch.full((1, 16, 1, 1, 1), 2.0))
    wan, latent = comfy.latent_formats.Wan21(), torch.randn(1, 16, 1, 2, 2)
    assert torch.allclose(usual.process_latent_in(latent), wan.process_in(latent))
    assert usual.latent_format.latent_rgb_factors == wan.latent_rgb_factors
    monkeypatch.setattr(comfy.cli_args.args, "preview_method", comfy.cli_args.LatentPreviewMethod.Latent2RGB)
    previewer = latent_preview.get_previewer(torch.device("cpu"), custom.latent_format)
    expected = (latent[0, :, 0].movedim(0, -1) @ torch.tensor(factors) + torch.tensor(bias) + 1) / 2
    preview = previewer.decode_latent_to_preview(latent)
    assert preview.getpixel((1, 0)) == tuple((expected[0, 1].clamp(0, 1) * 255).to(torch.uint8).tolist())


@pytest.mark.parametrize("sample", [ksampler, parallel_sampler])
@pytest.mark.parametrize("method", ["NoPreviews", "Latent2RGB"])
def test_progress_bar_and_previews(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, sample: Callable[..., Any], method: str
) -> None:
    updates: list[tuple[int, int, Any]] = []
    method = getattr(comfy.cli_args.LatentPreviewMethod, method)
    monkeypatch.setattr(comfy.cli_args.args, "preview_method", method)

    def hook(value: int, total: int, preview: Any, node_id: Any = None) -> None:
        updates.append((value, total, preview))

    # Newer versions of ComfyUI drop updates that follow each other closely.
    monkeypatch.setattr(comfy.utils, "PROGRESS_THROTTLE_MIN_INTERVAL", 0.0, raising=False)
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", hook)
    sample(loaded.model, empty_latent(), steps=3)
    assert [(value, total) for value, total, _ in updates] == [(1, 3), (2, 3), (3, 3)]
    sizes = [preview[1].size for _, _, preview in updates if preview is not None]
    assert sizes == ([] if method is comfy.cli_args.LatentPreviewMethod.NoPreviews else [(5, 6)] * 3)


def test_the_node_and_the_log_say_why_ranks_start_again(caplog: pytest.LogCaptureFixture) -> None:
    shown: list[str] = []
    progressed = shown_progress("sampling", shown.append, None)
    for _ in range(2):  # as keepalives do
        progressed(Progress(phase="start", value=0, total=1, note="the ranks on devices 0 end"), {})
    assert shown == ["starting ranks (the ranks on devices 0 end)"] * 2
    assert [each.getMessage() for each in caplog.records] == ["Parallel DiT: the ranks on devices 0 end"]


def test_the_node_says_what_is_waited_for() -> None:
    shown: list[str] = []
    progressed = shown_progress("sampling", shown.append, None)
    for phase, value, total in [
        ("queued", 0, 1), ("start", 0, 1), ("loading", 0, 1), ("loading", 1, 1), ("other", 1, 2),
    ]:  # fmt: skip
        progressed(Progress(phase=phase, value=value, total=total), {})
    progressed(Progress(phase="sampling", value=1, total=2, note="slowly"), {})
    assert shown == [
        "waiting for another request", "starting ranks", "loading weights",
        "sampling", "sampling 1/2 (slowly)",
    ]  # fmt: skip
