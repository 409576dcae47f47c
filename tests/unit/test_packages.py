"""Broken packages: those that ranks do without are never imported, and those that they need are named."""

import importlib.metadata
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from parallel_backend import packages
from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.client.launch import ROOT
from parallel_backend.errors import BrokenPackage, InvalidRequest
from parallel_backend.loading import row_map
from parallel_backend.rank.diagnosis import diagnose
from tests.support import broken_packages

NEEDED = {
    "PIL", "diffusers", "google", "huggingface_hub", "jinja2", "numpy", "psutil", "pydantic", "pygments", "pynvml",
    "rich", "safetensors", "tokenizers", "torch", "torchsde", "transformers", "triton",
}  # fmt: skip
"""What the libraries or torch need, or try by themselves."""
DEVICES = {"torch_mlu", "torch_musa", "torch_neuronx", "torch_npu", "torch_tpu"}
"""Plug-ins of torch for devices that ranks do not use: torch itself imports what is installed of them, and fails."""

RANK = """
from parallel_backend import packages
packages.hide()
from parallel_backend.rank.spare import imports
for _ in imports():
    pass
from diffusers.loaders import single_file_utils
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

import einops
import torch
assert einops.rearrange(torch.zeros(2, 3), "a b -> b a").shape == (3, 2)

from parallel_backend.checkpoint.stored_tensor import Compression
from parallel_backend.loading.decoding import decode
packed = torch.tensor([[0, 0x3C, *range(32)]], dtype=torch.uint8)
decoded = decode(Compression(format="Q8_0", block=32, block_bytes=34), packed, {}, torch.float32)
print(decoded.int().flatten().tolist() == list(range(32)))
"""


def looked_for() -> set[str]:
    """The optional packages that the installed diffusers and transformers look for."""
    text = ""
    for library in ("diffusers", "transformers"):
        spec = find_spec(library)
        assert spec is not None
        assert spec.origin is not None
        text += (Path(spec.origin).parent / "utils" / "import_utils.py").read_text(encoding="utf-8")
    names = re.findall(r'(?:_is_package_available|find_spec)\(\s*"([\w.]+)"', text)
    return {name.partition(".")[0] for name in names} - NEEDED - DEVICES


def test_no_broken_package_ends_a_ranks_imports_and_gguf_is_found_where_it_is_needed(tmp_path):
    names = sorted({*looked_for(), *packages.HIDDEN, "flax", "jax", "tensorflow"} - {"gguf"})
    assert len(names) > 50
    broken_packages.write(tmp_path, names)
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", RANK], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr
    assert broken_packages.imported(tmp_path) == set()


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """Return a function that puts a broken package of a name first on the module path."""

    def make(name: str, error: str, version: str = "0.1.0") -> None:
        for module in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, module)
        folder = broken_packages.write(tmp_path / name, [name], version=version, errors=(error,))
        monkeypatch.syspath_prepend(str(folder))

    return make


def hidden(monkeypatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("error", broken_packages.ERRORS)
def test_a_gguf_file_names_the_broken_package_and_not_the_file(tmp_path, monkeypatch, broken, error):
    broken("gguf", error)
    hidden(monkeypatch, "gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(InvalidRequest) as caught:
        open_checkpoint(tmp_path / "model.gguf")
    said = str(caught.value)
    assert f"the package gguf 0.1.0 cannot be imported ({error}: gguf does not work here)" in said
    assert f"{sys.executable} -m pip install --upgrade --force-reinstall --no-deps 'gguf>=" in said
    assert "PARALLEL_DIT_PYTHON" in said
    assert "download" not in said
    assert sys.modules["gguf"] is None


@pytest.mark.parametrize("error", broken_packages.ERRORS)
def test_a_converter_that_cannot_be_imported_is_no_fault_of_the_file(broken, error):
    broken("bitsandbytes", error)

    def convert(tensors):
        try:
            import bitsandbytes  # noqa: F401
        except Exception as cause:  # as diffusers' lazy modules do
            raise RuntimeError("Failed to import diffusers.loaders") from cause

    with pytest.raises(BrokenPackage, match=r"the package bitsandbytes 0\.1\.0 cannot be imported") as caught:
        row_map.converted({"weight": (2, 2)}, convert)
    assert caught.value.package == "bitsandbytes"
    with pytest.raises(InvalidRequest, match="lacks a weight"):
        row_map.converted({"weight": (2, 2)}, lambda tensors: {"x": tensors["bias"]})


def test_a_rank_reports_a_broken_package_of_another_one(tmp_path, monkeypatch, broken):
    broken("outer", "OSError", version="2.0")
    (tmp_path / "outer" / "outer" / "__init__.py").write_text("from inner import missing\n")
    inner = broken_packages.write(tmp_path / "inner", ["inner"], version="0.9")
    (inner / "inner" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(inner))
    monkeypatch.delitem(sys.modules, "inner", raising=False)
    with pytest.raises(ImportError) as caught:
        import outer  # noqa: F401
    finished = diagnose(caught.value, "request")
    assert finished.code == BrokenPackage.code
    assert "the package inner 0.9, which outer 2.0 imports, cannot be imported (ImportError: cannot" in finished.message
    assert "pip install --upgrade outer inner" in finished.message


def test_a_rank_reports_a_missing_package():
    with pytest.raises(ModuleNotFoundError) as caught:
        import no_such_package  # noqa: F401
    finished = diagnose(caught.value, "", when=" while starting")
    assert finished.message.startswith("failed while starting: the package no-such-package is missing: run ")
    assert "pip install no-such-package, or name another Python with PARALLEL_DIT_PYTHON" in finished.message


def test_other_errors_are_of_no_package():
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(2) @ torch.zeros(3)
    assert packages.broken_by(caught.value) is None


@pytest.mark.parametrize("error", ["MemoryError()", "OSError(24, 'Too many open files')"])
def test_a_package_is_sound_for_whose_import_the_machine_lacks_something(tmp_path, monkeypatch, error):
    (tmp_path / "sound.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises((MemoryError, OSError)) as caught:
        import sound  # noqa: F401
    assert packages.broken_by(caught.value) is None


def test_a_hidden_package_is_found_by_those_who_need_it(monkeypatch):
    hidden(monkeypatch, "einops")
    assert find_spec("einops") is None
    assert packages.is_installed("einops")
    assert sys.modules["einops"] is None
    assert packages.load("einops").__name__ == "einops"
    assert not packages.is_installed("no_such_package")


def test_the_version_of_diffusers_is_found_without_a_look_at_all_packages(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: pytest.fail("it takes long"))
    packages.check_diffusers("Some", "0.1")
    with pytest.raises(InvalidRequest, match=r"Some needs diffusers 999\.0, and [\d.]+"):
        packages.check_diffusers("Some", "999.0")
