"""Which blocks stay on the devices: every rank decides alike, from the numbers of all ranks."""

import pytest
import torch

from parallel_backend.errors import InvalidRequest, NoRoom
from parallel_backend.loading.offload_plan import (
    ALL,
    SLOTS,
    UNDECIDED,
    PartSizes,
    TransformerClaim,
    decide,
    lacks_cpu_memory,
    streamed,
)

GB = 10**9
IN_GB = ("free", "freeable", "total", "limit", "whole", "least", "block", "work", "cpu_free", "cpu_idle", "cpu_own")


def claim(**changed):
    """A rank of a card of 24 GB, with a model of 40 GB in 40 blocks, which nothing is known of; numbers in GB."""
    numbers = {
        "free": 23, "freeable": 0, "total": 24, "limit": 24, "device": 0, "whole": 41, "least": 3, "block": 1,
        "blocks": 40, "work": 4, "resident": UNDECIDED, "part": 0, "host": 7, "cpu_free": 100, "cpu_idle": 0,
        "cpu_own": 0, "experts": 1,
    } | changed  # fmt: skip
    scaled = {name: int(value * GB) if name in IN_GB else value for name, value in numbers.items()}
    return TransformerClaim(needed=scaled["whole"], **scaled)


def decided(*claims, stream=True):
    return decide(claims, "flux", torch.bfloat16, stream=stream)


def test_blocks_that_stream_are_spread_evenly():
    assert streamed(6, ALL) == ()
    assert streamed(6, 6) == ()
    assert streamed(6, 3) == (1, 3, 5)
    assert streamed(7, 2) == (1, 2, 4, 5, 6)
    assert streamed(3, 0) == (0, 1, 2)


def test_sizes_count_the_slots_and_what_stays():
    sizes = PartSizes(whole=111, outside=11, blocks=(10, 20, 30, 40))
    assert sizes.on_device(ALL) == 111
    assert sizes.on_device(0) == 11 + SLOTS * 40
    assert sizes.on_device(2) == 11 + 10 + 30 + SLOTS * 40
    assert [sizes.in_cpu(resident) for resident in (ALL, 0, 2)] == [0, 100, 60]


def test_nothing_streams_where_everything_fits():
    assert decided(claim(whole=15), claim(whole=17, device=1)) == [ALL, ALL]


def test_as_many_blocks_stay_as_the_tensors_leave_room_for():
    assert decided(claim()) == [23 - 5 - 3]  # a quarter more than the tensors take at least
    assert decided(claim(limit=11)) == [3]
    assert decided(claim(free=7.5)) == [0]
    assert decided(claim(whole=19, least=3, blocks=16, work=4)) == [13]  # with fewer, nothing would be saved


def test_ranks_of_one_part_keep_as_many_as_the_fullest_card_and_others_do_not_care():
    two = [claim(), claim(device=1, free=13)]
    assert decided(*two) == [5, 5]
    assert decided(two[0], claim(device=1, free=13, part=1)) == [15, 5]
    assert decided(claim(whole=12, least=3, part=1), two[1]) == [ALL, 5]


def test_ranks_that_share_a_card_share_its_room():
    assert decided(claim(free=30, total=48, limit=48), claim(free=30, total=48, limit=48)) == [7, 7]


def test_what_the_ranks_agreed_on_stays_while_it_fits():
    assert decided(claim(resident=3), claim(resident=3, device=1)) == [3, 3]
    assert decided(claim(resident=3, free=40, total=80, limit=80)) == [3]
    assert decided(claim(resident=20)) == [15]
    assert decided(claim(resident=3), claim(resident=UNDECIDED, device=1)) == [15, 15]
    assert decided(claim(resident=ALL, free=1, freeable=22)) == [15]
    for resident, whole in ((15, 41), (ALL, 18.5)):
        assert decided(claim(resident=resident, whole=whole, free=22.99)) == [resident], (
            "a little less room is no reason"
        )


def test_without_leave_to_stream_it_is_a_lack_of_room_unless_it_streams_already():
    with pytest.raises(NoRoom, match=r"^rank 0 \(cuda:0\) has room for 23.0 of 24.0 GB, .* take at least 45.0 GB"):
        decided(claim(), stream=False)
    assert decided(claim(resident=3), stream=False) == [3]
    with pytest.raises(NoRoom, match=r"take at least 45\.0 GB"):
        decided(claim(resident=15, free=19), stream=False)
    assert decided(claim(whole=18.5), stream=False) == [ALL]


def test_what_fits_only_without_spare_room_is_not_refused():
    assert decided(claim(whole=18.5, blocks=2)) == [ALL]


def test_what_does_not_fit_even_streamed_is_refused_by_its_least_numbers():
    with pytest.raises(InvalidRequest, match=r"^rank 1 \(cuda:1\) has room for 2.5 .* take 3.0 GB: .*shard_weights"):
        decided(claim(), claim(device=1, free=2.5))
    with pytest.raises(NoRoom, match=r"^rank 0 .* take at least 23.0 GB: .* make a smaller or shorter latent"):
        decided(claim(free=22, work=20), claim(device=1))


def test_a_model_of_few_blocks_is_refused_by_all_of_its_weights():
    with pytest.raises(InvalidRequest, match=r"take 41\.0 GB"):
        decided(claim(blocks=2, least=41))


def test_the_machine_needs_room_for_each_part_once():
    ranks = [claim(device=i, part=i // 2, cpu_free=51) for i in range(4)]
    assert decided(*ranks) == [15] * 4
    with pytest.raises(InvalidRequest, match=r"take 41.0 GB: make 1.0 GB of the machine's memory free, from which "):
        decided(*(claim(device=i, part=i // 2, cpu_free=49) for i in range(4)))
    idle = [claim(device=i, part=i // 2, cpu_free=30, cpu_idle=25 if i == 2 else 0) for i in range(4)]
    assert decided(*idle) == [15] * 4
    assert lacks_cpu_memory(idle, [15] * 4)
    assert not lacks_cpu_memory(ranks, [15] * 4)
    assert decided(claim(resident=3, cpu_free=0)) == [3], "what is there needs no more"
    larger = {"resident": 8, "work": 14, "cpu_free": 20}
    assert decided(claim(**larger, cpu_own=32)) == [2], "its own memory is made anew"
    with pytest.raises(InvalidRequest, match=r"make 50\.0 GB of the machine's memory free"):
        decided(claim(experts=2, cpu_free=0))


def test_cpu_ranks_take_everything_from_the_machines_memory():
    cpu = {"device": -1, "total": 64, "limit": 64, "cpu_free": 50, "free": 50}
    assert decided(claim(**cpu)) == [ALL]
    roomier = cpu | {"cpu_free": 60, "free": 60}
    assert decided(*(claim(**roomier) for _ in range(2))) == [0, 0]
    with pytest.raises(InvalidRequest, match=r"make 4\.0 GB of the machine's memory free"):
        decided(*(claim(**cpu) for _ in range(2)))
    with pytest.raises(InvalidRequest, match="of the machine's memory free"):
        decided(claim(**(cpu | {"cpu_free": 40, "free": 40})))
    limited = cpu | {"limit": 12}
    assert decided(*(claim(**(limited | {"cpu_free": 70})) for _ in range(2))) == [4, 4]
    with pytest.raises(InvalidRequest, match="of the machine's memory free"):
        decided(*(claim(**limited) for _ in range(2)))
