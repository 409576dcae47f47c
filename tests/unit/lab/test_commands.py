"""The commands of ``python -m lab``, and where the product sends who asks it for them."""

import argparse
import importlib
import subprocess
import sys

import pytest

from lab.__main__ import COMMANDS, main
from parallel_backend.__main__ import main as product
from parallel_backend.client.launch import ROOT

LISTED = """
import sys
from lab.__main__ import main
try:
    main(["--help"])
except SystemExit:
    assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    module = importlib.import_module(f"lab.{COMMANDS[name].module}")
    module.add_arguments(argparse.ArgumentParser())
    with pytest.raises(SystemExit) as ended:
        main([*name.split(), "--help"])
    assert ended.value.code == 0
    assert f"usage: python -m lab {name} [" in capsys.readouterr().out


def test_all_commands_are_listed_without_torch(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LISTED], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert all(f"  {name} " in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("arguments", [[], ["bake"], ["bench-wire"]])
def test_what_is_no_command_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "instead"), [("bench", "bench"), ("bench-wire", "bench wire"), ("soak", "soak")])
def test_the_product_says_where_its_measurements_are(name, instead, capsys):
    assert product([name, "--devices", "0"]) == 1
    assert f"run python -m lab {instead} there" in capsys.readouterr().err
