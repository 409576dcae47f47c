"""What we hand to ComfyUI bears being looked at by any code of it, in any thread.

An attribute that is not there is an ``AttributeError``. Nothing loads, asks the backend or waits for a look.
"""

import copy
import gc
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.model_base
import comfy.model_patcher
import comfy.sd
import pytest
import torch
from any_folder_name.nodes.backend import session
from any_folder_name.nodes.families.registry import bridge_class, bridge_for
from any_folder_name.nodes.remote.clip import checkpoint_clip, core_clip
from any_folder_name.nodes.remote.record_replay import one_request_per_step
from any_folder_name.nodes.remote.vae import vae_alone
from any_folder_name.parallel_backend.checkpoint.opening import open_checkpoint
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from comfy.ldm.wan.model import WanModel
from helpers.core_names import core_names
from helpers.inside_fixtures import Loaded, empty_latent
from helpers.watched import SilentClient, watched
from natives.files import FILE_CASES
from safetensors.torch import save_file

pytestmark = pytest.mark.newest

LAYER = "blocks.0.self_attn.q"
MISSING = object()


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What our nodes give: a loader's outputs, a VAE's, and the CLIP of a file without text encoder, and of a folder.

    Attributes:
        model, clip, vae: of Parallel Loader for a folder whose text encoder the ranks run.
        vae_alone: of Parallel VAE.
        file_clip: of Parallel Loader for a file without text encoder.
        folder_clip: of Parallel Loader for a folder whose text encoder ComfyUI runs.
    """

    model: Any
    clip: Any
    vae: Any
    vae_alone: Any
    file_clip: Any
    folder_clip: Any

    @property
    def transformer(self) -> Any:
        return self.model.model.diffusion_model


@pytest.fixture(scope="module")
def plain_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a transformer alone."""
    path: Path = tmp_path_factory.mktemp("plain") / "tiny.safetensors"
    weights = FILE_CASES["wan t2v"].native().model.diffusion_model.state_dict()
    save_file({name: tensor.clone().contiguous() for name, tensor in weights.items()}, path)
    return path


@pytest.fixture
def outputs(loaded: Loaded, plain_file: Path, tmp_path: Path) -> Outputs:
    (tmp_path / "model_index.json").write_text('{"transformer": ["diffusers", "MochiTransformer3DModel"]}')
    file, folder = open_checkpoint(plain_file), open_checkpoint(tmp_path)
    handle: Any = SimpleNamespace(checkpoint=file)
    made = Outputs(
        model=loaded.model, clip=loaded.clip, vae=loaded.vae,
        vae_alone=vae_alone(loaded.vae.handle, bridge_for(loaded.vae.handle.checkpoint).latent_scale()),
        file_clip=checkpoint_clip(handle, bridge_for(file).text, loaded.model),
        folder_clip=core_clip(folder, bridge_class(folder.components["transformer"]).text),
    )  # fmt: skip
    session.current().client = SilentClient()
    return made


def recording_model(outputs: Outputs) -> Any:
    """Return what ComfyUI's ``calc_cond_batch`` gets as the model while calls are recorded."""
    seen: list[Any] = []

    class Executor:
        def original(self, model: Any, *args: Any) -> None:
            seen.append(model)

        def __call__(self, *args: Any) -> None:
            return

    model = outputs.model.model
    model.current_patcher = outputs.model
    one_request_per_step(Executor(), model, [[{}], [{}]], torch.zeros(1), torch.zeros(1), {})
    return seen[0]


OBJECTS: dict[str, Callable[[Outputs], Any]] = {
    "MODEL": lambda each: each.model,
    "MODEL's clone": lambda each: each.model.clone(),
    "model": lambda each: each.model.model,
    "model of the recording run": recording_model,
    "sampling": lambda each: each.model.get_model_object("model_sampling"),
    "latent format": lambda each: each.model.get_model_object("latent_format"),
    "model's config": lambda each: each.model.model.model_config,
    "transformer": lambda each: each.transformer,
    "list of layers": lambda each: each.transformer.blocks,
    "group of layers": lambda each: each.transformer.blocks[0],
    "layer": lambda each: each.model.get_model_object(f"diffusion_model.{LAYER}"),
    "layer's weight": lambda each: each.transformer.blocks[0].self_attn.q.weight,
    "listed layer": lambda each: dict(each.transformer.named_modules())[LAYER],
    "listed layer's weight": lambda each: dict(each.transformer.named_modules())[LAYER].weight,
    "CLIP": lambda each: each.clip,
    "CLIP's clone": lambda each: each.clip.clone(),
    "CLIP's patcher": lambda each: each.clip.patcher,
    "text encoder": lambda each: each.clip.cond_stage_model,
    "text encoder's layer": lambda each: each.clip.cond_stage_model.umt5xxl.transformer,
    "tokenizer": lambda each: each.clip.tokenizer,
    "a file's CLIP": lambda each: each.file_clip,
    "a file's CLIP's patcher": lambda each: each.file_clip.patcher,
    "a file's text encoder": lambda each: each.file_clip.cond_stage_model,
    "a file's text encoder in its patcher": lambda each: each.file_clip.patcher.model,
    "a file's tokenizer": lambda each: each.file_clip.tokenizer,
    "a folder's CLIP": lambda each: each.folder_clip,
    "a folder's CLIP's patcher": lambda each: each.folder_clip.patcher,
    "VAE": lambda each: each.vae,
    "VAE's patcher": lambda each: each.vae.patcher,
    "VAE's module": lambda each: each.vae.first_stage_model,
    "Parallel VAE's": lambda each: each.vae_alone,
    "Parallel VAE's patcher": lambda each: each.vae_alone._model,
    "Parallel VAE's model": lambda each: each.vae_alone._model.model,
    "layout": lambda each: ParallelLayout(cfg=2),
    "latent": lambda each: empty_latent(),
}
every_object = pytest.mark.parametrize("name", OBJECTS)


def refused(look: Callable[[], Any]) -> str:
    """Return what a look that fails in another way than by an ``AttributeError`` says, or an empty string."""
    try:
        look()
    except AttributeError:
        return ""
    except BaseException as error:  # whatever it is, it would leave a thread of ComfyUI
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def asked_for_each_name(looked_at: Any) -> dict[str, str]:
    """Return the names of ComfyUI's source that an object cannot be asked for, and what it says."""
    answers = {name: refused(lambda name=name: getattr(looked_at, name)) for name in core_names()}
    return {name: said for name, said in answers.items() if said}


@every_object
@pytest.mark.daily(3)
def test_it_can_be_asked_for_every_name_in_comfyuis_source(outputs: Outputs, name: str) -> None:
    looked_at = watched(lambda: OBJECTS[name](outputs))
    assert len(core_names()) > 4000
    assert watched(lambda: asked_for_each_name(looked_at)) == {}


LOOKS: dict[str, Callable[[Any], Any]] = {
    "kind": lambda each: [isinstance(each, kind) for kind in (dict, torch.nn.Module, comfy.sd.CLIP, comfy.sd.VAE)],
    "patcher": lambda each: isinstance(getattr(each, "patcher", None), comfy.model_patcher.ModelPatcher),
    "layers": lambda each: (
        isinstance(each, WanModel) and [each.get_submodule(LAYER), each.get_parameter(f"{LAYER}.bias")]
    ),
    "bool": bool,
    "text": lambda each: [repr(each), str(each), f"{each}", dir(each)],
    "equality": lambda each: [each == each, each != MISSING, each in [MISSING, each]],
    "hash": lambda each: {each: 1}[each],
    "size": sys.getsizeof,
    "weak reference": lambda each: weakref.ref(each)(),
    "references": lambda each: [gc.get_referents(each), gc.get_referrers(each)],
    "dynamic": lambda each: hasattr(each, "is_dynamic") and each.is_dynamic(),
    "usage": lambda each: hasattr(each, "get_ram_usage") and each.get_ram_usage(),
}
NATIVELY_WITHOUT = {"hash": dict, "weak reference": dict, "bool": torch.Tensor, "equality": torch.Tensor}
"""Looks that the plain objects among ours do not have."""
NATIVE: dict[str, Callable[[Any], Any]] = {
    "model": lambda native: native.model,
    "model of the recording run": lambda native: native.model,
    "model's config": lambda native: native.model.model_config,
}
"""ComfyUI's own objects that refuse some looks themselves, because a config of a model has None for every name."""


def said(name: str, native: Any, looked_at: Any, look: Callable[[Any], Any]) -> str:
    """Return what a look fails with, unless the same look at ComfyUI's own object does."""
    ours = refused(lambda: look(looked_at))
    return "" if name in NATIVE and ours == refused(lambda: look(NATIVE[name](native))) else ours


@every_object
def test_it_can_be_looked_at(outputs: Outputs, native: Any, name: str) -> None:
    looked_at = OBJECTS[name](outputs)
    looks = {each: look for each, look in LOOKS.items() if not isinstance(looked_at, NATIVELY_WITHOUT.get(each, ()))}
    answers = watched(lambda: {each: said(name, native, looked_at, look) for each, look in looks.items()})
    assert answers == dict.fromkeys(looks, "")


def test_it_is_of_comfyuis_class(outputs: Outputs, native: Any) -> None:
    model = native.model
    for ours, theirs in (
        (outputs.model, native), (outputs.model.model, model), (recording_model(outputs), model),
        (outputs.transformer, model.diffusion_model), (outputs.transformer.blocks, model.diffusion_model.blocks),
        (outputs.transformer.get_submodule(LAYER), model.diffusion_model.get_submodule(LAYER)),
    ):  # fmt: skip
        assert isinstance(ours, type(theirs))
    for clip in (outputs.clip, outputs.file_clip, outputs.folder_clip):
        assert isinstance(clip, comfy.sd.CLIP)
        assert isinstance(clip.patcher, comfy.model_patcher.ModelPatcher)
        assert isinstance(clip.cond_stage_model, torch.nn.Module)
        assert clip.patcher.model is clip.cond_stage_model
    for vae in (outputs.vae, outputs.vae_alone):
        assert isinstance(vae, comfy.sd.VAE)
        assert isinstance(vae.patcher, comfy.model_patcher.ModelPatcher)


@every_object
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
@pytest.mark.daily(18)
def test_its_copy_can_be_asked_for_every_name(
    outputs: Outputs, native: Any, name: str, copied: Callable[[Any], Any]
) -> None:
    looked_at, answers = OBJECTS[name](outputs), list[dict[str, str]]()

    def look(each: Any) -> None:
        answers.append(asked_for_each_name(copied(each)))

    assert watched(lambda: said(name, native, looked_at, look)) == ""
    assert not any(answers)
