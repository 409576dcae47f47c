"""The command ``plan``: its table, and its refusals in one sentence."""

import json

import pytest

from parallel_backend.__main__ import main
from parallel_backend.planner.hardware import description, shipped

WAN = ["plan", "--model", "wan2.1-t2v-1.3b", "--size", "480x480x17"]


def test_a_machine_that_is_not_here_is_planned_for(capsys):
    assert main([*WAN, "--guidance", "--hardware", "2x3090"]) == 0
    out = capsys.readouterr().out
    assert "on 2xRTX 3090 PCIe" in out
    assert 'Choice: "cfg=2"' in out


def test_a_description_of_a_machine_is_a_file(capsys, tmp_path):
    path = tmp_path / "mine.json"
    path.write_bytes(description.text(shipped.machine("2x3090")))
    assert main([*WAN, "--hardware", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hardware"] == "2xRTX 3090 PCIe"
    assert found["chosen"] == found["layouts"][0]["layout"]


def test_the_first_devices_alone(capsys):
    assert main([*WAN, "--hardware", "8xH100", "--first", "1", "--json"]) == 0
    assert [each["layout"] for each in json.loads(capsys.readouterr().out)["layouts"]] == ["one rank"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "none", "--size", "8x8", "--hardware", "2x3090"], "none is neither a file nor a folder"),
        (["--model", "flux", "--size", "1024", "--hardware", "2x3090"], "--size 1024: write WIDTHxHEIGHT"),
        (["--model", "flux", "--size", "0x8", "--hardware", "2x3090"], "--size 0x8: write"),
        (["--model", "flux", "--size", "512x512x9", "--hardware", "2x3090"], "flux makes single pictures"),
        (["--model", "flux", "--size", "4x4", "--hardware", "2x3090"], "4x4 is smaller than one position"),
        (["--model", "flux", "--size", "512x512", "--hardware", "none"], "none is neither a file nor a machine"),
        (["--model", "flux", "--size", "512x512", "--hardware", "2x3090", "--first", "3"], "--first 3: "),
        (["--model", "flux", "--size", "512x512", "--hardware", "2x3090", "--steps", "0"], "--steps 0: "),
        (["--model", "flux", "--size", "512x512", "--hardware", "2x3090", "--batch", "0"], "--batch 0: "),
        (["--model", "flux", "--size", "512x512", "--hardware", "2x3090", "--mode", "x"], "mode 'x' does not exist"),
        (["--model", "flux", "--size", "512x512", "--hardware", "2x3090", "--devices", "0"], "--devices is for"),
        (["--model", "flux", "--size", "512x512", "--first", "1"], "--first is for a machine of --hardware"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(capsys, options, said):
    assert main(["plan", *options]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1
