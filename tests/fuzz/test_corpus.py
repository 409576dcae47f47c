"""The corpus in the repository: every input has the outcome of its folder, and together they reach every refusal."""

import ast
import importlib
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import coverage
import pytest

from .seed_files import ACCEPTED, FOLDER, inputs, made
from .targets import TARGETS, check

READERS = (
    "checkpoint.adapter_file",
    "checkpoint.gguf_file",
    "checkpoint.overlay_file",
    "checkpoint.quantised",
    "checkpoint.safetensors_file",
    "layout.parallel_layout",
    "layout.suggestions",
    "protocol.frames",
    "machines.nodes.host_control",
    "protocol.hosts",
    "protocol.messages",
    "protocol.model_spec",
    "protocol.rank_control",
    "step_cache.settings",
    "supervisor.request_queue",
)
"""The modules of ``parallel_backend`` that refuse what they read."""

OTHER_FUNCTIONS = {
    "pack": "refuses what this process wants to send",
    "parse": "reads what a user writes into a node",
    "_parse_value": "reads what a user writes into a node",
    "parse_balance": "reads what a user writes into a node",
    "preset": "takes a name that a node offers",
    "_check_method": "takes a name that a node offers; a message with another one does not decode",
    "add": "refuses by the length of the queue",
    "recv_header": "waits on a socket",
    "flush": "refuses to wait for a peer that does not read",
    "_content": "refuses a file that is deleted while it is read; its other refusal is an input of its own",
    "read_gguf": "refuses without the package gguf; its other refusals are inputs",
}
"""Functions of these modules that may hold a refusal that no bytes reach, and why."""
FEW = {"_content": 1, "read_gguf": 1}
"""How many refusals of such a function no bytes reach, where bytes reach others."""


def test_the_files_are_those_that_the_seeds_make() -> None:
    for kind, target, name, data in made():
        file = FOLDER / target / kind / name
        assert file.is_file(), f"{file} is missing: python -m tests.fuzz.seeds"
        assert file.read_bytes() == data, f"{file} is another one: python -m tests.fuzz.seeds"


@pytest.mark.parametrize("name", TARGETS)
def test_every_input_has_the_outcome_of_its_folder(name: str) -> None:
    for kind, file, data in inputs(name):
        start = time.monotonic()
        refusal = check(TARGETS[name], data)
        assert (refusal is None) == (kind == ACCEPTED), f"{name}/{kind}/{file}: {refusal}"
        assert time.monotonic() - start < 2.0, f"{name}/{kind}/{file}"


def test_the_inputs_reach_every_refusal() -> None:
    modules = [importlib.import_module(f"parallel_backend.{name}") for name in READERS]
    measured = coverage.Coverage(data_file=None, include=[str(module.__file__) for module in modules])
    measured.start()
    try:
        for name, target in TARGETS.items():
            for _, _, data in inputs(name):
                check(target, data)
    finally:
        measured.stop()
    refusals, missed = 0, list[str]()
    for module in modules:
        unreached = set(measured.analysis2(module)[3])
        for function, lines in _refusals(module):
            refusals += len(lines)
            left = lines & unreached
            if function not in OTHER_FUNCTIONS or len(left) > FEW.get(function, len(left)):
                missed += [f"{module.__name__}:{line} in {function}" for line in sorted(left)]
    assert not missed
    assert refusals > 60


def _refusals(module: ModuleType) -> Iterator[tuple[str, set[int]]]:
    """Yield each function with the lines on which it raises."""
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            lines = {node.lineno for node in ast.walk(function) if isinstance(node, ast.Raise)}
            if lines:
                yield function.name, lines
