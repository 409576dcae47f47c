"""Seconds of computing: roofline, tiles and waves, and measured curves."""

import pytest

from parallel_backend.planner.compute import attention_seconds, interpolated, product_seconds, seconds
from parallel_backend.planner.hardware.description import Device
from parallel_backend.planner.work import Attended, Product, Work

GPU = Device(name="gpu", matrix=100e12, attention=50e12, memory=1e10, bandwidth=1e12, units=100)
CPU = Device(name="cpu", matrix=1e11, attention=5e10, memory=1e10, bandwidth=1e10)


def product(rows: int, columns: int = 4096, inner: int = 4096) -> Product:
    return Product(rows=rows, inner=inner, columns=columns)


def test_a_large_product_takes_its_operations_over_the_speed():
    large = product(32768, 32768)
    assert product_seconds(large, GPU) == pytest.approx(large.operations / GPU.matrix, rel=0.02)


def test_a_product_of_few_rows_takes_the_time_of_its_weights_bytes():
    small = product(1)
    assert product_seconds(small, GPU) == pytest.approx(small.moved / GPU.bandwidth)


def test_a_last_round_of_tiles_takes_as_long_as_a_full_one():
    full, more = product(256 * 100, 128), product(256 * 101, 128)
    assert product_seconds(more, GPU) == pytest.approx(1.25 * product_seconds(full, GPU))


def test_halves_of_a_small_product_take_more_than_half():
    assert product_seconds(product(1024), GPU) > 0.5 * 1.05 * product_seconds(product(2048), GPU)


def test_on_a_cpu_products_take_their_operations():
    assert product_seconds(product(100), CPU) == pytest.approx(product(100).operations / CPU.matrix)


def test_attention_of_nothing_takes_nothing():
    assert attention_seconds(Attended(heads=0, queries=8, keys=8, head_dim=64), GPU) == 0.0


def test_attention_with_few_heads_and_queries_leaves_processors_idle():
    few = Attended(heads=1, queries=128, keys=4096, head_dim=128)
    many = Attended(heads=100, queries=128, keys=4096, head_dim=128)
    assert attention_seconds(few, GPU) == pytest.approx(attention_seconds(many, GPU))


def test_what_is_between_products_takes_its_bytes_and_less_if_compiled():
    work = Work(moved=2e12, moved_cut=1e12, between=1e12)
    assert seconds(work, GPU) == pytest.approx(3.0)
    assert seconds(work, GPU, compiled=True) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("at", "expected"), [(0.5, 3.0), (1.0, 5.0), (0.75, 4.0), (2.0, 10.0), (0.25, 2.0), (0.01, 1.04)]
)
def test_a_curve_is_followed_between_and_beyond_its_points(at, expected):
    assert interpolated(((1.0, 5.0), (0.5, 3.0)), at) == pytest.approx(expected, rel=0.02)


def test_a_curve_of_one_point_is_in_proportion():
    assert interpolated(((1.0, 5.0),), 0.2) == pytest.approx(1.0)


def test_measured_attention_takes_the_place_of_the_speed():
    measured = Device(name="x", matrix=1.0, attention=1.0, memory=1.0, bandwidth=1.0, attends=((4e6, 0.25),))
    assert attention_seconds(Attended(heads=1, queries=1000, keys=1000, head_dim=1), measured) == pytest.approx(0.25)
