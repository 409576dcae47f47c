"""Every VAE on stand-in GPUs, split by rows and in tiles: nothing that CUDA or NCCL refuses, and nothing that hangs."""

import pytest

from lab.verify.vae import kinds
from lab.verify.vae.kinds import KINDS
from tests.support.stand_in.requests import CODING

NARROW = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """``folder("wan21")`` is the folder of a small VAE."""
    written = {}

    def write(kind):
        if kind not in written:
            written[kind] = kinds.write(tmp_path_factory.mktemp("vae") / kind, KINDS[kind].module(NARROW))
        return written[kind]

    return write


@pytest.mark.parametrize("task", CODING)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.daily(9)
def test_split_and_tiled(check, folder, kind, task):
    check(CODING[task](folder(kind), ranks=3, frames=2, rows=11, columns=2))
    if kind == "minimax_h3":  # it has tiles of its own; here three parts on two ranks
        check(CODING[task](folder(kind), ranks=2, frames=17, rows=2, columns=2))
    else:
        check(CODING[task](folder(kind), ranks=3, frames=1, rows=9, columns=8, tile=8))
