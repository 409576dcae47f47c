"""Ranks on unlike cards decide alike. There is no GPU here: one CPU rank behaves as if its card were an older one."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from parallel_backend.attention import kernels
from parallel_backend.distributed import bfloat16
from parallel_backend.engine import arranging, autoencoding
from parallel_backend.errors import InvalidRequest
from parallel_backend.protocol.messages import Decode
from tests.ranks import driver, requests
from tests.ranks.requests import Case

OLDER = 1
"""The rank with the older card."""


def handle_with_a_turing_card(rank, message, tensors):
    """Carry a request out on ranks whose cards are said to be of Ampere, but that of ``OLDER``."""
    capability = (7, 5) if rank == OLDER else (8, 6)
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        mock.patch.object(torch.cuda, "get_device_name", return_value="mock GPU"),
    ):
        reason = kernels._needs_half_on_cuda(torch.device("cuda"), torch.float16)
    with (
        mock.patch.object(kernels, "_needs_half_on_cuda", return_value=reason),
        mock.patch.object(kernels.Flash, "head_sizes", None),  # those of the tiny model are too odd
    ):
        return driver.handle(rank, message, tensors)


def handle_without_bfloat16(rank, message, tensors):
    """Carry a request out on ranks of which ``OLDER`` cannot compute in its dtype."""

    def check_dtype(dtype, device):
        if rank == OLDER:
            raise InvalidRequest(f"{dtype} cannot be used on this card")

    with (
        mock.patch.object(arranging, "check_dtype", check_dtype),
        mock.patch.object(autoencoding, "check_dtype", check_dtype),
    ):
        return driver.handle(rank, message, tensors)


def native_everywhere(rank, natives):
    """What each rank finds if the cards of the ranks have bfloat16 as ``natives`` says."""
    device = torch.device("cuda", rank)
    with mock.patch.object(torch.cuda, "is_bf16_supported", return_value=natives[rank]):
        return bfloat16.native(device), bfloat16.native_everywhere(device, len(natives))


def refused(pools, function, message, tensors):
    answers = pools(3).run(function, message, tensors)
    assert all(message.model.path not in {model.path for model in answer["models"]} for answer in answers)
    return [answer["error"] for answer in answers]


def with_flash(path):
    """A request on the first two of three ranks."""
    return requests.sample(replace(requests.spec(path, "ulysses=2", ranks=3), attention="flash"), Case())


@pytest.fixture
def path(checkpoints):
    """A checkpoint that no test of this file loads, with heads of a size on which the ranks have not agreed yet."""
    return checkpoints(heads=2, head_dim=36, seed=17)


def test_a_kernel_that_one_card_lacks_is_refused_on_all_ranks(pools, path):
    """Also on the one without a part."""
    request = with_flash(path)
    sentence = (
        "InvalidRequest: rank 1: attention 'flash' cannot be used: it needs an NVIDIA GPU of the Ampere generation or "
        "newer, and this is a mock GPU; sdpa would work here"
    )
    assert refused(pools, handle_with_a_turing_card, *request) == [sentence] * 3


def test_a_kernel_that_no_card_has_names_no_rank(pools, path):
    request = with_flash(path)
    errors = refused(pools, driver.handle, *request)
    assert errors[0] == errors[1]
    assert errors[0].startswith("InvalidRequest: attention 'flash' cannot be used: it needs a CUDA GPU")


def test_a_dtype_that_one_card_lacks_is_refused_on_all_ranks(pools, path):
    request = requests.sample(requests.spec(path, "ring=3"), Case())
    sentence = "InvalidRequest: rank 1: torch.float32 cannot be used on this card"
    assert refused(pools, handle_without_bfloat16, *request) == [sentence] * 3
    decode = Decode(model=request[0].model, dtype="bfloat16"), {"latent": torch.zeros(1, 16, 1, 3, 4)}
    sentence = "InvalidRequest: rank 1: torch.bfloat16 cannot be used on this card"
    assert refused(pools, handle_without_bfloat16, *decode) == [sentence] * 3


@pytest.mark.parametrize("natives", [(True, True, True), (True, False, True), (False, False, False)])
def test_auto_is_bfloat16_only_if_every_card_has_it(pools, natives):
    assert pools(3).run(native_everywhere, natives) == [(native, all(natives)) for native in natives]
