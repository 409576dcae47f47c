"""Which errors are whose fault, as torch raises them."""

import pytest

from parallel_backend.error_texts import Cause, breaks_device, cause
from parallel_backend.errors import OutOfMemory, RankFailed
from parallel_backend.rank.diagnosis import diagnose
from tests.support import device_errors

ALL_TABLES = {**device_errors.TABLES, "BUGS": device_errors.BUGS}
ALL = {f"{table}: {name}": error for table, errors in ALL_TABLES.items() for name, error in errors.items()}


@pytest.mark.parametrize("name", ALL)
def test_a_text_says_what_caused_the_error(name):
    assert (cause(ALL[name].text), breaks_device(ALL[name].text)) == (ALL[name].cause, ALL[name].breaks)


@pytest.mark.parametrize(
    ("table", "code", "by_peer", "beginning"),
    [
        ("FULL", OutOfMemory.code, False, "ran out of memory while starting: "),
        ("OWN", RankFailed.code, False, "failed while starting: "),
        ("PEER", RankFailed.code, True, "failed while starting: "),
        ("UNKNOWN", RankFailed.code, True, "failed while starting: "),
        ("BUGS", RankFailed.code, False, "failed while starting: "),
    ],
)
def test_what_a_rank_reports(table, code, by_peer, beginning):
    for name, error in ALL_TABLES[table].items():
        finished = diagnose(error.make(), "", when=" while starting")
        assert (finished.code, finished.by_peer) == (code, by_peer), name
        assert finished.message.startswith(beginning), name
        assert " ".join(error.text.split())[:100] in finished.message, name


def test_every_cause_is_covered():
    assert {error.cause for error in ALL.values()} == set(Cause)
