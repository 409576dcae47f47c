"""Records of measurements: kept, found again, and not believed if anything has changed."""

import os
from dataclasses import replace as replaced

import msgspec
import pytest
import torch

from parallel_backend.planner import record
from parallel_backend.planner.hardware import shipped
from parallel_backend.planner.models import find
from parallel_backend.planner.record import Facts
from parallel_backend.planner.request import prompt
from parallel_backend.protocol.model_spec import Devices

FACTS = Facts(version="1", torch="2", driver="3", devices=("a", "b"))
HARDWARE = shipped.machine("2x3090")
CPU = Devices(kind="cpu", indices=(0, 1))


@pytest.fixture
def kept(tmp_path):
    path = tmp_path / "probes" / "one.json"
    assert record.write(path, FACTS, HARDWARE) == ""
    return path


def test_a_record_is_found_again(kept):
    assert record.read(kept, FACTS) == record.Found(hardware=HARDWARE)


def test_a_measurement_that_has_begun_is_none(kept):
    assert record.write(kept, FACTS, None) == ""
    found = record.read(kept, FACTS)
    assert found.begun
    assert (found.hardware, found.note) == (None, "measuring this machine did not end")
    os.utime(kept, (0, 0))
    assert not record.read(kept, FACTS).begun, "long ago"


def test_a_record_is_private(kept):
    assert kept.stat().st_mode & 0o777 == 0o600
    assert kept.parent.stat().st_mode & 0o777 == 0o700


def test_without_a_record_nothing_is_said(tmp_path):
    assert record.read(tmp_path / "none.json", FACTS) == record.Found(hardware=None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": "9"}, "version 1 of this extension, and this is 9"),
        ({"torch": "9"}, "torch 2, and this is 9"),
        ({"driver": "9"}, "another driver (3), and this is 9"),
        ({"devices": ("a",)}, "other devices (a, b), and these are a"),
        ({"kernels": ("flash_attn",)}, "other packages for attention (none), and now there are flash_attn"),
    ],
)
def test_what_has_changed_is_said(kept, change, said):
    found = record.read(kept, msgspec.structs.replace(FACTS, **change))
    assert found.hardware is None
    assert said in found.note


@pytest.mark.parametrize("damage", [b"", b"{}", b"nonsense", b"[[[[", b'{"form": 1}'])
def test_a_damaged_file_is_noticed(kept, damage):
    kept.write_bytes(damage)
    found = record.read(kept, FACTS)
    assert found.hardware is None
    assert "damaged" in found.note


def test_a_changed_number_is_noticed(kept):
    text = kept.read_bytes()
    changed = text.replace(b'"bandwidth":936000000000.0', b'"bandwidth":936000000001.0', 1)
    assert changed != text
    kept.write_bytes(changed)
    assert "damaged" in record.read(kept, FACTS).note


def test_a_file_of_any_length_is_not_read_whole(kept):
    kept.write_bytes(kept.read_bytes() + b" " * (2 << 20))
    assert record.read(kept, FACTS).hardware is None


def test_a_folder_that_cannot_be_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be kept" in record.write(tmp_path / "file" / "one.json", FACTS, HARDWARE)


def test_devices_model_and_size_have_files_of_their_own(tmp_path):
    small, large = (prompt(find("flux"), size) for size in ("512x512", "1024x1024"))
    files = {
        record.file_of(CPU, small, tmp_path),
        record.file_of(CPU, large, tmp_path),
        record.file_of(replaced(CPU, indices=(0,)), small, tmp_path),
        record.file_of(CPU, prompt(find("z-image"), "512x512"), tmp_path),
        record.file_of(CPU, small, tmp_path, "sage"),
    }
    assert len(files) == 5
    assert record.file_of(CPU, prompt(find("flux"), "512x512", steps=3), tmp_path) in files


def test_a_card_that_is_gone_is_said(tmp_path, monkeypatch):
    asked = prompt(find("flux"), "512x512")
    both, one = (record.file_of(Devices(kind="cuda", indices=indices), asked, tmp_path) for indices in ((0, 1), (0,)))
    record.write(both, FACTS, HARDWARE)
    left = msgspec.structs.replace(FACTS, devices=("a",))
    assert record.read(one, left) == record.Found(hardware=None), "no GPU is asked here"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for count, said in ((2, ""), (1, "this machine was measured with more devices (a, b)")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert record.read(one, left).note == said
    other = record.file_of(Devices(kind="cuda", indices=(0,)), prompt(find("flux"), "1024x1024"), tmp_path)
    assert record.read(other, left).note == ""
    both.write_text("damaged")
    assert record.read(one, left).note == ""


def test_texts_of_about_one_length_are_measured_once(tmp_path):
    asked = prompt(find("flux"), "512x512")

    def file(tokens):
        other = replaced(asked, steps=2)
        other.__dict__["shapes"] = asked.shapes | {"encoder_hidden_states": (1, tokens, 4096)}
        return record.file_of(CPU, other, tmp_path)

    assert file(257) == file(512) == record.file_of(CPU, asked, tmp_path)
    assert file(256) != file(257)
