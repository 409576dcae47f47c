"""Tests that run inside a ComfyUI process without its server, started by ``tests/comfyui/test_nodes_inside.py``.

They need ComfyUI's folder as the working directory and on ``sys.path``, so an ordinary pytest run ignores them.
"""

import importlib.util
import os
import sys
from pathlib import Path

INSIDE = "PARALLEL_DIT_INSIDE_COMFYUI" in os.environ
collect_ignore_glob = [] if INSIDE else ["*"]

if INSIDE:
    root = Path(__file__).resolve().parents[2]
    sys.path.insert(0, str(Path(__file__).parent))

    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    from helpers import dynamic_vram

    dynamic_vram.start()
    name = "any_folder_name"
    spec = importlib.util.spec_from_file_location(name, root / "__init__.py", submodule_search_locations=[str(root)])
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])

    pytest_plugins = ["helpers.inside_fixtures"]
