"""What a spare rank imports, and how it becomes a rank."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from parallel_backend import processes
from parallel_backend.protocol import rank_control

ROOT = Path(__file__).parents[3]

WATCHED = """
import logging, os, sys, threading
import torch

asked = []
torch.cuda._device_count_nvml = lambda: 1  # as on a machine with NVIDIA's driver
for name in ("_cuda_getDeviceCount", "init", "_lazy_init", "current_device", "get_device_capability",
             "get_device_properties", "get_device_name", "is_bf16_supported", "mem_get_info"):
    owner = torch._C if name.startswith("_cuda") else torch.cuda
    def ask(*arguments, name=name, then=getattr(owner, name, None), **options):
        asked.append(name)
        return then(*arguments, **options)
    if hasattr(owner, name):  # a CPU build lacks the first
        setattr(owner, name, ask)

from parallel_backend.rank.spare import imports
for _ in imports():
    pass
from parallel_backend.loading.load import SUPPORTED
import diffusers, transformers

def imported(name):
    ours = [vars(module).get(name) for file, module in list(sys.modules.items()) if file.startswith("parallel_backend")]
    return next((each for each in (vars(diffusers).get(name), *ours) if each is not None), None)

classes = [imported(name) for part in ("transformer", "vae") for name in SUPPORTED[part]]
classes += [vars(transformers).get(name) for name in SUPPORTED["text_encoder"]]
files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd.isdecimal()
         and os.path.exists(f"/proc/self/fd/{fd}")]
print(asked, [c for c in classes if not isinstance(c, type)], logging.root.handlers, threading.active_count(),
      [file for file in files if file.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri"))])
"""

SPARE = """
import os, socket, sys
from parallel_backend.rank.spare import wait_for_role

def prepare():
    {prepare}
    yield

role = wait_for_role(socket.socket(fileno=int(sys.argv[1])), prepare)
store = "none" if role.store is None else socket.socket(fileno=role.store).getsockname()[1]
print(role.device, role.collectives, store, os.environ["RANK"], {after})
os.system("echo from a child")
print("and an error", file=sys.stderr)
"""
THREADS = "__import__('torch').get_num_threads(), sys.modules['torch._inductor.config'].compile_threads"


def run(code: str, *arguments: str, **options: object) -> "subprocess.Popen[bytes]":
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, env=environment, **options
    )  # type: ignore[call-overload]


def become(**environment: str) -> rank_control.Become:
    numbers = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return rank_control.Become(device="cpu", collectives="gloo", environment=numbers | environment)


def test_it_imports_every_class_that_ranks_load_and_asks_nothing_of_a_gpu() -> None:
    process = run(WATCHED)
    said, _ = process.communicate(timeout=120)
    assert said.decode().splitlines()[-1] == "[] [] [] 1 []"


@pytest.mark.parametrize("rank", [0, 1])
def test_it_becomes_the_rank_that_the_message_says(tmp_path: Path, rank: int) -> None:
    ours, theirs = rank_control.pair()
    with ours, theirs, socket.create_server(("127.0.0.1", 0)) as store, (tmp_path / "log").open("wb") as log:
        code = SPARE.format(prepare="import torch._inductor.config", after=THREADS)
        process = run(code, str(theirs.fileno()), pass_fds=[theirs.fileno()])
        theirs.close()
        ours.settimeout(60)
        assert msgspec.json.decode(ours.recv(1000), type=rank_control.FromRank) == rank_control.Prepared()
        descriptors = [log.fileno(), store.fileno()][: 2 - rank]
        numbers = {"OMP_NUM_THREADS": "3", "TORCHINDUCTOR_COMPILE_THREADS": "5"}
        rank_control.send(ours, become(RANK=str(rank), **numbers), descriptors=descriptors)
        assert process.communicate(timeout=60)[0] == b""
        port = "none" if rank else store.getsockname()[1]
    expected = [f"cpu gloo {port} {rank} 3 5", "and an error", "from a child"]
    assert sorted((tmp_path / "log").read_text().splitlines()) == sorted(expected)


def test_a_message_ends_its_imports(tmp_path: Path) -> None:
    ours, theirs = rank_control.pair()
    with ours, theirs, (tmp_path / "log").open("wb") as log:
        rank_control.send(ours, become(RANK="1"), descriptors=[log.fileno()])
        code = SPARE.format(prepare="yield\n    import time; time.sleep(600)", after="0")
        process = run(code, str(theirs.fileno()), pass_fds=[theirs.fileno()])
        process.communicate(timeout=60)
        assert (tmp_path / "log").read_text().startswith("cpu gloo none 1 0")
        with pytest.raises(BlockingIOError):
            rank_control.receive(ours, rank_control.FromRank)


def test_it_ends_with_its_supervisor() -> None:
    ours, theirs = rank_control.pair()
    with theirs:
        process = run(SPARE.format(prepare="pass", after="0"), str(theirs.fileno()), pass_fds=[theirs.fileno()])
        ours.close()
        assert process.communicate(timeout=60)[0] == b""
    assert process.returncode == 0


PINNED = """
import os, threading
from parallel_backend import processes

stay = threading.Event()
threading.Thread(target=stay.wait, daemon=True).start()
processes.pin_to_core_share(1, 2)
print({tuple(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")})
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_threads_that_libraries_have_started_are_pinned_too() -> None:
    cores = sorted(os.sched_getaffinity(0), key=processes._core_position)
    share = tuple(sorted(cores[len(cores) // 2 :]))
    said, _ = run(PINNED).communicate(timeout=60)
    assert said.decode().strip() == str({share})
