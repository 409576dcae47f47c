"""The list of what nodes/ relies on in ComfyUI is complete and in use; it holds for every checkout, and can fail."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import comfy_paths, workflows
from scripts.core_contract.check import differences
from scripts.core_contract.contract import CONTRACT
from scripts.core_contract.core_source import CoreSource
from scripts.core_contract.entry import Entry, core_module
from scripts.core_contract.kinds import Calls, Overrides
from scripts.core_contract.model_kinds import Node
from scripts.core_contract.signatures import Parameters
from scripts.core_contract.typed import messages
from scripts.core_contract.uses import Use, uses, words

ROOT = comfy_paths.ROOT
FILES = [ROOT / "__init__.py", *sorted((ROOT / "nodes").rglob("*.py"))]


def all_uses() -> list[Use]:
    return [use for file in FILES for use in uses(file, str(file.relative_to(ROOT)))]


def unlisted() -> list[Use]:
    listed = {path for entry in CONTRACT for path in entry.paths}
    return [use for use in all_uses() if use.path not in listed]


def check_listed(missing: list[Use]) -> None:
    lines = [f"{use.file}:{use.line}: {use.path}" for use in missing]
    assert not lines, "no type checker sees this, and scripts/core_contract/lists lacks it:\n" + "\n".join(lines)


def test_every_name_of_core_that_is_a_string_is_listed():
    check_listed([use for use in unlisted() if use.quoted])


@pytest.mark.newest
def test_every_other_name_of_core_is_listed_or_seen_by_mypy(comfyui_path, tmp_path):
    core = CoreSource(comfyui_path)
    names = [use for use in unlisted() if not core.module(use.path)]
    owners = {use.path.rpartition(".")[0] for use in names}
    unseen = unseen_by_mypy(core, [*owners, "comfy.cli_args.args"], tmp_path / "probe.py")
    assert "comfy.cli_args.args" in unseen, "the probe cannot fail"
    check_listed([use for use in names if use.path.rpartition(".")[0] in unseen])


def unseen_by_mypy(core: CoreSource, owners: list[str], probe: Path) -> set[str]:
    """Which of these names have no type that mypy knows, so that it does not name what they lack."""
    parts = [owner.split(".") for owner in owners]
    prefixes = {".".join(names[:count]) for names in parts for count in range(1, len(names) + 1)}
    imports = [f"import {name}" for name in sorted(prefixes) if core.module(name)]
    probe.write_text("\n".join([*imports, *(f"{owner}.not_there" for owner in owners)]), encoding="utf-8")
    named = {int(line.split(":")[1]) for line in messages(core.root, str(probe)) if '"not_there"' in line}
    return {owner for line, owner in enumerate(owners, len(imports) + 1) if line not in named}


def test_every_kind_of_text_encoder_is_listed():
    found = {
        keyword.value.value
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "clip_type"
        and isinstance(keyword.value, ast.Constant)
        and isinstance(keyword.value.value, str)
    }
    assert found
    assert {f"comfy.sd.CLIPType.{name}" for name in found} <= {path for entry in CONTRACT for path in entry.paths}


def test_every_node_of_core_in_the_workflows_is_listed_with_its_inputs():
    wanted: dict[str, set[str]] = {}
    for name in workflows.names():
        for node in workflows.api(name).values():
            if not node["class_type"].startswith("Parallel"):
                wanted.setdefault(node["class_type"], set()).update(node["inputs"])
    listed = [entry for entry in CONTRACT if isinstance(entry, Node) and entry.by == "workflows/api"]
    assert {entry.node_id: set(entry.inputs.split()) for entry in listed} == wanted


def is_used(entry: Entry) -> Iterator[str]:
    """What an entry says of our files that is not true any more."""
    if entry.by == "workflows/api":
        return  # held by the test above
    texts = {name: words(ROOT / name) if (ROOT / name).is_file() else set() for name in entry.files}
    for name, text in texts.items():
        if not text.intersection(entry.words):
            yield f"{entry.path}: {name} has nothing of {' '.join(entry.words)}"
    for word in set(entry.words) - set().union(*texts.values()):
        yield f"{entry.path}: {word} is not in {entry.by}"


def test_no_entry_is_left_over():
    left = [line for entry in CONTRACT for line in is_used(entry)]
    assert not left, "in scripts/core_contract/lists, but not in use:\n" + "\n".join(left)


def test_a_left_over_entry_is_noticed():
    (entry,) = core_module("comfy.sample", Calls("gone(model)", by="nodes/sampler.py", why="test"))
    assert list(is_used(entry))
    assert list(is_used(replace(entry, by="nodes/gone.py", word="comfy")))


def our_functions(entry: Entry) -> Iterator[Parameters]:
    """Parameters of what we define under an entry's name."""
    for name in entry.files:
        for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name == entry.name.rpartition(".")[2]:
                yield Parameters.of(node.args, bound=True)


OVERRIDES = [entry for entry in CONTRACT if isinstance(entry, Overrides) and not entry.word and entry.parameters.names]


@pytest.mark.parametrize("entry", OVERRIDES, ids=lambda entry: entry.path)
def test_what_we_override_has_the_parameters_that_are_listed(entry):
    wanted = entry.parameters
    ours = list(our_functions(entry))
    assert any(
        (own.positional, own.rest, own.named_rest) == (wanted.positional, wanted.rest, wanted.named_rest)
        for own in ours
    ), f"{entry.signature} is listed, and ours are {'; '.join(map(str, ours))}"


def test_no_entry_is_listed_twice():
    keys = [(type(entry), entry.path, entry.by, str(entry)) for entry in CONTRACT]
    assert len(keys) == len(set(keys))


def test_uses_follow_imports_and_local_names(tmp_path):
    source = """
import comfy.samplers
import folder_paths as paths
from comfy.sd import CLIP
from ..nodes import ours
def f():
    import nodes
    management, other = comfy.model_management, 1
    management.free_memory(1)
    getattr(nodes.NODE_CLASS_MAPPINGS, "get")
    paths.get_folder_paths("x")
    other.thing
nodes.ours
CLIP.clone
"""
    file = tmp_path / "module.py"
    file.write_text(source, encoding="utf-8")
    assert {use.path for use in uses(file, "module.py")} == {
        "comfy.samplers",
        "folder_paths",
        "comfy.sd.CLIP",
        "nodes",
        "comfy.model_management",
        "comfy.model_management.free_memory",
        "nodes.NODE_CLASS_MAPPINGS",
        "nodes.NODE_CLASS_MAPPINGS.get",
        "folder_paths.get_folder_paths",
        "comfy.sd.CLIP.clone",
    }


@pytest.mark.each_version
def test_the_contract_holds(comfyui_path):
    assert [str(difference) for difference in differences(CONTRACT, comfyui_path)] == []


@pytest.mark.each_version
def test_mypy_sees_no_difference(comfyui_path):
    assert messages(comfyui_path) == []


@pytest.fixture
def copy_of_core(comfyui_path: Path, tmp_path: Path) -> Path:
    """ComfyUI's Python files."""

    def all_but_python(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if not name.endswith(".py") and not (Path(folder) / name).is_dir()]

    for folder in ("app", "comfy", "comfy_api", "comfy_extras", "comfy_execution"):
        shutil.copytree(comfyui_path / folder, tmp_path / folder, ignore=all_but_python)
    for file in comfyui_path.glob("*.py"):
        shutil.copy(file, tmp_path)
    return tmp_path


@pytest.mark.newest
def test_command_names_differences_of_a_newer_version_without_importing_anything(copy_of_core):
    done = run(copy_of_core)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2), done.stdout
    for name, old, new in (
        ("comfyui_version.py", '__version__ = "', '__version__ = "99.'),
        ("comfy/sample.py", "def prepare_noise(", "def make_noise("),
    ):
        text = (copy_of_core / name).read_text(encoding="utf-8")
        assert old in text
        (copy_of_core / name).write_text(text.replace(old, new), encoding="utf-8")
    done = run(copy_of_core)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^comfy\.sample\.prepare_noise: .*nodes/sampler\.py", done.stdout, re.MULTILINE)
    assert "ComfyUI 99." in done.stdout
    assert "nothing imported" in done.stdout


def run(path: Path) -> "subprocess.CompletedProcess[str]":
    """Run the command; its last line says whether it imported anything of ComfyUI's or anything large."""
    program = (
        "import runpy, sys\n"
        "try: runpy.run_module('scripts.core_contract', run_name='__main__')\n"
        "finally: print({'comfy', 'torch', 'numpy'} & sys.modules.keys() or 'nothing imported')"
    )
    command = [sys.executable, "-c", program, str(path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_command_refuses_a_folder_that_is_no_comfyui(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 1
    assert "is not a ComfyUI checkout" in done.stderr
