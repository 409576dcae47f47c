"""The extension's folder may have any name: a backend of two real ranks starts from a copy of the code."""

import os
import shutil
import subprocess
import sys

from parallel_backend.client.launch import ROOT

SCRIPT = """
import pathlib
import parallel_backend
from parallel_backend.client.client import Client
from parallel_backend.protocol.messages import Trial
from parallel_backend.protocol.model_spec import Devices, ModelSpec
spec = ModelSpec(path="/no/such/model", devices=Devices(kind="cpu", indices=(0, 1)))
print(sorted(Client().call(Trial(name="exchange", model=spec, amount=4))))
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
    assert done.stdout.splitlines() == ["['latency', 'seconds']", name], done.stderr
