"""The host waits for a GPU no more often than docs/synchronisations.md says, and the page is up to date."""

import itertools
from unittest import mock

import pytest

from lab import synchronisations
from lab.synchronisations import PAGE, grown, page
from parallel_backend.families.sd3.transformer import SD3
from parallel_backend.interfaces.geometry import IMAGE
from tests.support.stand_in import counts

SMALL = ("SD3Transformer2DModel", "sd3 medium")


FEW = 4


def test_there_are_no_more_waits_of_a_few():
    counted = list(itertools.islice(synchronisations.count_all(), FEW))
    assert len(counted) == FEW
    assert grown(PAGE.read_text(encoding="utf-8"), counted) == []


@pytest.mark.long
def test_there_are_no_more_waits_and_the_page_is_up_to_date():
    counted = list(synchronisations.count_all())
    assert grown(PAGE.read_text(encoding="utf-8"), counted) == []
    assert page(counted) == PAGE.read_text(encoding="utf-8"), "run python -m lab synchronisations --write"


def test_one_more_wait_is_found_and_needs_a_reason(tmp_path):
    head = SD3.head

    def reading(family, state):
        state.streams[IMAGE].sum().item()
        return head(family, state)

    with mock.patch.object(SD3, "head", reading):
        found = [("sd3 sd3 medium", counts.of_family(*SMALL, tmp_path / "model"))]
    forward, step = grown(PAGE.read_text(encoding="utf-8"), found)
    assert forward.startswith("sd3 sd3 medium, forward: 1 waits instead of 0: reads a number")
    assert step.startswith("sd3 sd3 medium, step: 3 waits instead of 1")
    with pytest.raises(LookupError, match="nothing says why the host waits"):
        page(found)
