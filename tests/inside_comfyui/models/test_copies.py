"""A copy of a MODEL that ComfyUI has loaded says the same about itself as the MODEL's file."""

from pathlib import Path

import comfy.model_detection
import comfy.sd
import pytest
from any_folder_name.nodes.remote.adopt import copy_model
from any_folder_name.parallel_backend.checkpoint.opening import open_checkpoint
from any_folder_name.parallel_backend.errors import InvalidRequest
from natives import HEAVY
from natives.loadable import CASES, FIRST, file_name, with_assumed_sizes, write

pytestmark = pytest.mark.newest


@pytest.fixture(autouse=True)
def assumed_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    detect = with_assumed_sizes(comfy.model_detection.detect_unet_config)
    monkeypatch.setattr(comfy.model_detection, "detect_unet_config", detect)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.grid if name in HEAVY else ()) for name in CASES]
)
@pytest.mark.daily(17)
def test_a_copy_is_recognised_as_its_file_is(name: str, tmp_path: Path) -> None:
    write(name, tmp_path)
    path = tmp_path / file_name(name)
    copy = copy_model(comfy.sd.load_diffusion_model(str(path)))
    copied, file = open_checkpoint(copy.path), open_checkpoint(path)
    assert copied.components == file.components
    assert copied.config("transformer") == file.config("transformer")


def test_settings_that_are_lists_are_kept(tmp_path: Path) -> None:
    [name] = [name for name in FIRST if name.startswith("ltx ")]
    write(name, tmp_path)
    loaded = comfy.sd.load_diffusion_model(str(tmp_path / file_name(name)))
    loaded.model.model_config.unet_config["positional_embedding_max_pos"] = [20, 4096, 4096]
    copy = copy_model(loaded)
    with pytest.raises(InvalidRequest, match="positional_embedding_max_pos"):
        open_checkpoint(copy.path)
