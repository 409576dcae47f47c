"""ComfyUI's own models leave the ranks' GPUs when weights are about to load there, and stay in every other case."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.model_management
import comfy.model_patcher
import pytest
import torch
from any_folder_name.nodes.backend import comfyui_models, connection, session
from any_folder_name.parallel_backend.errors import NoRoom, OutOfMemory
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from any_folder_name.parallel_backend.protocol.messages import Decode, Forward, Unload
from any_folder_name.parallel_backend.protocol.model_spec import Devices, ModelSpec
from any_folder_name.parallel_backend.protocol.status import LoadedModel, RankStatus
from helpers.inside_fixtures import Loaded, empty_latent, ksampler, parallel_sampler

# ComfyUI frees nothing on torch.device("cpu"). With an index it is another, equally usable device to ComfyUI.
SHARED, OTHER = torch.device("cpu", 0), torch.device("cpu", 1)


def shared_device(devices: Devices, ranks: int) -> list[torch.device]:
    """Return the device that the ranks share with ComfyUI."""
    return [SHARED]


class ComfyUIsModel:
    """One of ComfyUI's own models on a device."""

    def __init__(self, device: torch.device) -> None:
        linear = torch.nn.Linear(64, 64)
        self.patcher = comfy.model_patcher.ModelPatcher(linear, load_device=device, offload_device=torch.device("cpu"))

    def stays(self, use: Callable[[], Any]) -> bool:
        """Load the model, call ``use`` and return whether the model is still loaded."""
        comfy.model_management.load_models_gpu([self.patcher])
        use()
        return any(entry.model is self.patcher for entry in comfy.model_management.current_loaded_models)


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test an empty list of loaded models."""
    monkeypatch.setattr(comfy.model_management, "current_loaded_models", [])


def wait_until_held(loaded: Loaded, component: str, ranks: int) -> None:
    """Wait until the ranks' status lists a component."""
    handle, deadline = loaded.model.model.diffusion_model.handle, time.monotonic() + 10.0
    while not handle.holds([component], ranks=ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_models_leave_once_per_component_that_loads(
    models: Path, load_remote: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comfyui_models, "gpus", shared_device)
    shutil.copytree(models / "tiny", models / "room")
    loaded, latent = load_remote(ParallelLayout(ulysses=2), name="room"), empty_latent()
    other_model = ComfyUIsModel(SHARED)
    tokens = loaded.clip.tokenize("a red circle")
    uses: dict[str, Callable[[], Any]] = {
        "text_encoder": lambda: loaded.clip.encode_from_tokens(tokens),
        "transformer": lambda: ksampler(loaded.model, latent, steps=1),
        "vae": lambda: loaded.vae.decode(latent["samples"]),
    }
    for component, use in uses.items():
        assert not other_model.stays(use), component
        assert any(loaded.model.is_clone(entry.model) for entry in comfy.model_management.current_loaded_models)
        wait_until_held(loaded, component, 1 if component == "text_encoder" else 2)
    for use in (*uses.values(), lambda: parallel_sampler(loaded.model, latent, steps=1)):
        assert other_model.stays(use)


def test_models_elsewhere_stay(load: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load()
    assert ComfyUIsModel(SHARED).stays(lambda: ksampler(loaded.model, empty_latent(), steps=1)), (
        "the ranks are on the CPU"
    )
    monkeypatch.setattr(comfyui_models, "gpus", shared_device)
    assert ComfyUIsModel(OTHER).stays(lambda: ksampler(loaded.model, empty_latent(), steps=1))


class FullOnce:
    """A client whose ranks run out of memory until ComfyUI's own model has left, or always."""

    def __init__(self, real: Any, other: ComfyUIsModel, *, always: bool) -> None:
        self.real, self.other, self.always = real, other, always
        self.tried = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def attempt(self, message: Any, *arguments: Any, **options: Any) -> Any:
        if not isinstance(message, Decode):
            return self.real.attempt(message, *arguments, **options)
        self.tried += 1
        entries = comfy.model_management.current_loaded_models
        if self.always or any(entry.model is self.other.patcher for entry in entries):
            raise OutOfMemory("rank 0 (cpu) ran out of memory")
        return self.real.attempt(message, *arguments, **options)


class NoRoomWhileOthersStay:
    """A client whose ranks have no room for the weights as long as ComfyUI has a model there, or for good."""

    def __init__(self, real: Any, other: ComfyUIsModel) -> None:
        self.real, self.other = real, other
        self.asked: list[tuple[bool, bool]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def attempt(self, message: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(message, Forward):
            entries = comfy.model_management.current_loaded_models
            self.asked.append((message.adapt, any(entry.model is self.other.patcher for entry in entries)))
            if not message.adapt:
                raise NoRoom("rank 0 (cpu) has no room")
        return self.real.attempt(message, *arguments, **options)


@pytest.mark.parametrize(
    ("device", "asked"),
    [(SHARED, [(False, True), (True, False)]), (OTHER, [(False, True), (True, True)]), (None, [(True, True)])],
)
def test_weights_stream_only_once_comfyuis_models_have_left(
    load: Callable[..., Loaded],
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device | None,
    asked: list[tuple[bool, bool]],
) -> None:
    loaded = load()
    if device is not None:
        monkeypatch.setattr(comfyui_models, "gpus", shared_device)
        monkeypatch.setattr(comfyui_models, "shared_gpus", lambda *_: {SHARED})
    other = ComfyUIsModel(device or OTHER)
    comfy.model_management.load_models_gpu([other.patcher])
    session.current().client = client = NoRoomWhileOthersStay(session.current().client, other)
    monkeypatch.setattr(connection.Handle, "holds", lambda *_, **__: True)
    ksampler(loaded.model, empty_latent(), steps=1, cfg=1.0)
    assert client.asked == asked


@pytest.mark.parametrize(("device", "always", "tries"), [(SHARED, False, 2), (SHARED, True, 2), (OTHER, False, 1)])
def test_a_request_is_tried_once_more_without_comfyuis_models(
    load: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch, device: torch.device, always: bool, tries: int
) -> None:
    loaded, samples = load(), empty_latent()["samples"]
    expected = loaded.vae.decode(samples)
    monkeypatch.setattr(comfyui_models, "gpus", shared_device)
    other = ComfyUIsModel(device)
    comfy.model_management.load_models_gpu([other.patcher])
    session.current().client = full = FullOnce(session.current().client, other, always=always)
    monkeypatch.setattr(connection.Handle, "holds", lambda *_, **__: True)
    if tries == 2 and not always:
        assert torch.equal(loaded.vae.decode(samples), expected)
    else:
        with pytest.raises(comfy.model_management.OOM_EXCEPTION):
            loaded.vae.decode(samples)
    assert full.tried == tries


class Counting:
    """A client that counts requests to give memory back, with the number of other requests before each."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def attempt(self, message: Any, *arguments: Any, **options: Any) -> Any:
        freed = isinstance(message, Unload) and message.only_cache
        self.asked.append("give back" if freed else type(message).__name__)
        return self.real.attempt(message, *arguments, **options)


def test_the_ranks_give_memory_back_after_work_on_a_gpu_that_comfyui_uses(
    load: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, latent = load(), empty_latent()
    session.current().client = client = Counting(session.current().client)
    monkeypatch.setattr(connection.Handle, "holds", lambda *_, **__: True)
    ksampler(loaded.model, latent, steps=2)
    loaded.vae.decode(latent["samples"])
    assert "give back" not in client.asked
    monkeypatch.setattr(comfyui_models, "shared_gpus", lambda *_: {SHARED})
    client.asked.clear()
    ksampler(loaded.model, latent, steps=2)
    parallel_sampler(loaded.model, latent, steps=1)
    loaded.vae.decode(latent["samples"])
    assert client.asked == ["Forward", "Forward", "give back", "Sample", "give back", "Decode", "give back"]


def spec(stamp: str = "now", layout: str = "", **options: Any) -> ModelSpec:
    """Return a model on two ranks; without a layout, ``auto``."""
    parsed = ParallelLayout.parse(layout) if layout else None
    return ModelSpec(path="m", stamp=stamp, layout=parsed, devices=Devices(kind="cpu", indices=(0, 1)), **options)


@pytest.mark.parametrize(
    ("last", "new", "held"),
    [
        (spec(), spec(), {"transformer", "text_encoder"}),
        (spec(), spec(dtype="bfloat16"), {"transformer", "text_encoder"}),
        (spec(), spec(dtype="float16"), set()),
        (spec(stamp="before"), spec(), set()),
        (spec(), spec(layout="cfg=2"), {"transformer", "text_encoder"}),
        (spec(layout="ulysses=2"), spec(layout="ring=2"), {"transformer", "text_encoder"}),
        (spec(layout="pipe=2"), spec(layout="pipe=2 patches=3"), {"transformer", "text_encoder"}),
        (spec(layout="pipe=2"), spec(layout="tensor=2"), {"text_encoder"}),
        (spec(layout="pipe=2"), spec(), {"text_encoder"}),
        (spec(layout="ulysses=2 shard_weights"), spec(), {"transformer", "text_encoder"}),
        (spec(layout="tensor=2"), spec(), {"transformer", "text_encoder"}),
        (spec(layout="tensor=2"), spec(layout="ulysses=2"), {"text_encoder"}),
        (spec(), spec(layout="ulysses=2 shard_weights"), {"text_encoder"}),
        (spec(layout="pipe=2"), spec(mode="auto"), {"text_encoder"}),
        (spec(layout="pipe=2"), spec(mode="fastest"), {"transformer", "text_encoder"}),
        (spec(layout="pipe=2"), spec(layout="tensor=2", mode="fastest"), {"text_encoder"}),
    ],
)
def test_weights_of_other_files_or_for_another_cut_are_not_held(
    last: ModelSpec, new: ModelSpec, held: set[str]
) -> None:
    parts, layout = ("text_encoder", "transformer"), last.layout.cut if last.layout else ParallelLayout(cfg=2)
    model = LoadedModel(path=last.path, stamp=last.stamp, layout=layout, dtype="bfloat16", parts=parts, loads=2)
    ranks = [RankStatus(rank=i, pid=i, device="cpu", memory=0, models=(model,)) for i in range(2)]
    backend = SimpleNamespace(status=lambda: SimpleNamespace(ranks=ranks))
    session.use(session.Session(backend))
    checkpoint: Any = SimpleNamespace(components={"transformer": "WanTransformer3DModel"})
    handle = connection.Handle(spec=new, checkpoint=checkpoint)
    assert {part for part in parts if handle.holds([part], ranks=2)} == held


def test_a_plan_may_leave_ranks_idle() -> None:
    def rank(index: int, *parts: str) -> RankStatus:
        one = ParallelLayout() if "transformer" in parts else None
        model = LoadedModel(path="m", stamp="now", layout=one, dtype="float32", parts=parts, loads=1)
        return RankStatus(rank=index, pid=index, device="cpu", memory=0, models=(model,))

    ranks = [rank(0, "transformer", "vae"), rank(1)]
    session.use(session.Session(SimpleNamespace(status=lambda: SimpleNamespace(ranks=ranks))))
    checkpoint: Any = SimpleNamespace(components={"transformer": "WanTransformer3DModel"})
    planned, ruled = (connection.Handle(spec=spec(mode=mode), checkpoint=checkpoint) for mode in ("fastest", "auto"))
    assert planned.holds(["transformer"], ranks=2)
    assert not planned.holds(["vae"], ranks=2), "all ranks decode"
    assert not ruled.holds(["transformer"], ranks=2)


def test_gpus_are_numbered_as_in_this_process() -> None:
    two = Devices(kind="cuda", indices=(3, 1), visible=(("CUDA_VISIBLE_DEVICES", "0,2,4,6"),))
    assert comfyui_models.gpus(two, 2) == [torch.device("cuda", 3), torch.device("cuda", 1)]
    assert comfyui_models.gpus(two, 1) == [torch.device("cuda", 3)]
    assert comfyui_models.gpus(Devices(kind="cpu", indices=(0, 1)), 2) == []
