"""The extension's folder may have any name: a backend of two real ranks starts from a copy of the code."""

import os
import shutil
import subprocess
import sys

from parallel_backend.client.launch import ROOT

SCRIPT = """
import pathlib, torch
import parallel_backend
from parallel_backend.client.client import Client
from parallel_backend.protocol.messages import Echo
from parallel_backend.protocol.model_spec import Devices, ModelSpec
spec = ModelSpec(path="/no/such/model", devices=Devices(kind="cpu", indices=(0, 1)))
print(Client().call(Echo(model=spec), {"x": torch.arange(3.0)})["x"].tolist())
print(pathlib.Path(parallel_backend.__file__).parents[1].name)
"""


def test_the_backend_starts_from_a_folder_of_any_name(runtime, tmp_path):
    name = "Größe 模型 🎨 & 'quotes'.v2 (1)"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "parallel_backend", tmp_path / name / "parallel_backend", ignore=ignored)
    path = os.pathsep.join([str(tmp_path / name), str(ROOT / "scripts" / "cpu_shim")])
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": path},
        cwd=runtime,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines() == ["[0.0, 1.0, 2.0]", name], done.stderr
