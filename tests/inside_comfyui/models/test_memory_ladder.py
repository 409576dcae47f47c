"""Where a rank runs out of memory, other layouts go on from the last finished step, and one that works stays."""

from collections.abc import Callable
from typing import Any

import comfy.model_management
import pytest
from any_folder_name.nodes.backend import session
from any_folder_name.parallel_backend.errors import OutOfMemory
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from any_folder_name.parallel_backend.protocol.messages import Forward, Progress, Sample
from helpers.inside_fixtures import Loaded, empty_latent, ksampler, parallel_sampler

SHARDED = ParallelLayout(ulysses=2, shard_weights=True)
STEPS, FULL_AFTER = 4, 2


class SmallDevices:
    """A client whose ranks have room for one layout only. With the others they run out of memory after two steps."""

    def __init__(self, real: Any, fits: ParallelLayout | None) -> None:
        self.real, self.fits = real, fits
        self.asked: list[tuple[ParallelLayout | None, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def attempt(self, message: Any, tensors: Any, *, on_progress: Any = None, **options: Any) -> Any:
        if not isinstance(message, Forward | Sample):
            return self.real.attempt(message, tensors, on_progress=on_progress, **options)
        self.asked.append((message.model.layout, getattr(message, "first_step", 0)))
        if message.model.layout == self.fits:
            return self.real.attempt(message, tensors, on_progress=on_progress, **options)

        def full(progress: Progress, extra: Any) -> None:
            on_progress(progress, extra)
            if progress.phase == "sampling" and progress.value >= FULL_AFTER:
                raise OutOfMemory(f"rank 1 (cpu) is full with {message.model.layout}")

        if isinstance(message, Forward):
            raise OutOfMemory(f"rank 1 (cpu) is full with {message.model.layout}")
        return self.real.attempt(message, tensors, on_progress=full, **options)


@pytest.fixture
def remote(load_remote: Callable[..., Loaded]) -> Loaded:
    """A model on the real backend's two ranks."""
    return load_remote(ParallelLayout(cfg=2))


def with_room_for(fits: ParallelLayout | None) -> SmallDevices:
    session.current().client = client = SmallDevices(session.current().client, fits)
    return client


@pytest.mark.parametrize("sampler", [ksampler, parallel_sampler])
def test_the_first_layout_with_room_goes_on_and_stays(
    remote: Loaded, caplog: pytest.LogCaptureFixture, sampler: Any
) -> None:
    wanted = sampler(remote.model, empty_latent(), steps=STEPS)
    client = with_room_for(SHARDED)
    got = sampler(remote.model, empty_latent(), steps=STEPS)
    assert float((got - wanted).abs().max() / wanted.abs().max()) <= 1e-4
    tried = [layout for layout, _ in client.asked[:3]]
    assert tried == [ParallelLayout(cfg=2), ParallelLayout(ulysses=2), SHARDED]
    if sampler is parallel_sampler:
        assert [step for _, step in client.asked] == [0, FULL_AFTER, FULL_AFTER + 1]
    assert "trying again with layout ulysses=2 shard_weights, since rank 1 (cpu) is full with ulysses=2" in caplog.text
    assert all(layout == SHARDED for layout, _ in client.asked[2:])
    client.asked.clear()
    sampler(remote.model, empty_latent(), steps=1)
    assert {layout for layout, _ in client.asked} == {SHARDED}, "the next prompt begins with what has had room"
    remote.model.model.diffusion_model.handle.keep_weights()
    client.asked.clear()
    sampler(remote.model, empty_latent(), steps=STEPS)
    assert client.asked[0][0] == ParallelLayout(cfg=2), "a loader that runs again tries the wanted layout"


def test_without_room_in_any_layout_the_first_error_names_them(remote: Loaded) -> None:
    client = with_room_for(None)
    sentence = "full with cfg=2; the layouts ulysses=2 and ulysses=2 shard_weights have no room for it, either"
    with pytest.raises(comfy.model_management.OOM_EXCEPTION, match=sentence):
        ksampler(remote.model, empty_latent(), steps=1)
    assert len(client.asked) == 3
