"""Plans: what is chosen, what is never chosen, and what is said."""

from dataclasses import replace

import pytest

from parallel_backend.errors import InvalidRequest
from parallel_backend.layout.modes import MODES
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.planner.enumeration import layouts, of_the_rule
from parallel_backend.planner.hardware import shipped
from parallel_backend.planner.hardware.description import Hardware, Link
from parallel_backend.planner.models import find
from parallel_backend.planner.planning import choose, plan, rivals, rule_prediction
from parallel_backend.planner.prediction import predict
from parallel_backend.planner.request import prompt
from parallel_backend.planner.table import as_json, table


def of(links: float, count: int = 2, kind: str = "RTX 4090") -> Hardware:
    devices = (shipped.card(kind),) * count
    return Hardware(
        name=f"{count} cards", devices=devices,
        links=(Link(devices=tuple(range(count)), bandwidth=links, latency=1e-5),) if count > 1 else (),
    )  # fmt: skip


@pytest.fixture(scope="module")
def small():
    return prompt(find("wan2.1-t2v-1.3b"), "480x480x17", steps=8, guided=True)


@pytest.fixture(scope="module")
def alone():
    return prompt(find("wan2.1-t2v-1.3b"), "480x480x17", steps=8)


def test_every_layout_is_valid_and_exact(small):
    found = layouts(small, of(1e10))
    assert ParallelLayout() in found
    assert all(not layout.approximate and layout.ranks <= 2 for layout in found)
    assert len(found) == len(set(found))


def test_approximate_layouts_come_only_if_they_are_allowed(small):
    assert any(layout.approximate for layout in layouts(small, of(1e10), approximate=True))


def test_without_guidance_no_layout_splits_branches(alone):
    assert all(layout.cfg == 1 for layout in layouts(alone, of(1e10)))


@pytest.mark.parametrize("links", [1e8, 1e11])
def test_what_is_chosen_is_never_predicted_worse_than_the_rule(small, alone, links):
    for asked in (small, alone):
        made = plan(asked, of(links))
        assert made.chosen.seconds <= made.rule.seconds


@pytest.mark.parametrize(
    ("launch", "gain", "taken"),
    [(1e-6, 0.99, "rule"), (1e-6, 0.95, "other"), (0.0, 0.97, "rule"), (0.0, 0.85, "other")],
)
def test_a_small_gain_is_not_certain_on_cores_even_less(alone, launch, gain, taken):
    rule = rule_prediction(alone, of(1e10))
    other = replace(rule, layout=ParallelLayout(tensor=2), sampling=gain * rule.sampling, decoding=None)
    rule = replace(rule, decoding=None)
    chosen = choose([other, rule], rule, "auto", replace(of(1e10), launch=launch))
    assert chosen is {"rule": rule, "other": other}[taken]


@pytest.mark.parametrize(("launch", "taken"), [(1e-6, "one"), (0.0, "rule")])
def test_fewer_devices_that_are_as_fast_are_enough_but_not_by_what_cores_measure(alone, launch, taken):
    rule = replace(rule_prediction(alone, of(1e10)), decoding=None)
    one = replace(rule, layout=ParallelLayout(), sampling=0.99 * rule.sampling)
    chosen = choose([one, rule], rule, "auto", replace(of(1e10), launch=launch))
    assert chosen is {"rule": rule, "one": one}[taken]


def test_a_gain_is_not_lost_to_fewer_devices(alone):
    rule = replace(rule_prediction(alone, of(1e10)), decoding=None)
    best = replace(rule, layout=ParallelLayout(tensor=2), sampling=0.945 * rule.sampling)
    one = replace(rule, layout=ParallelLayout(), sampling=0.953 * rule.sampling)
    assert choose([best, one, rule], rule, "auto", replace(of(1e10), launch=0.0)) is best


def test_slow_links_make_one_device_the_fastest(alone):
    made = plan(alone, of(1e6))
    assert made.chosen.layout == ParallelLayout()
    assert "1 of 2 devices" in made.reason


def test_fast_links_use_all_devices(small):
    assert plan(small, of(1e12)).chosen.layout.ranks == 2


def test_on_slow_links_branches_are_split_and_tokens_are_not(small):
    assert plan(small, of(2e7, count=4)).chosen.layout == ParallelLayout(cfg=2)


def test_a_prediction_falls_with_faster_links_and_grows_with_steps(small):
    layout = ParallelLayout(ulysses=2)
    slow, fast = (predict(small, layout, of(links)) for links in (1e8, 1e11))
    assert slow.step.exchange > 10 * fast.step.exchange
    assert predict(replace(small, steps=16), layout, of(1e8)).sampling == pytest.approx(2 * slow.sampling)


def test_cores_hide_no_gathered_weights(alone):
    layout, cards = ParallelLayout(ulysses=2, shard_weights=True), of(1e10)
    hidden, shown = (predict(alone, layout, each).step.exchange for each in (cards, replace(cards, launch=0.0)))
    whole = predict(alone, replace(layout, shard_weights=False), cards).step.exchange
    assert shown - whole > 2 * (hidden - whole) > 0


def test_new_memory_for_gathered_weights_takes_time_where_it_is_measured(alone):
    layout, machine = ParallelLayout(ulysses=2, shard_weights=True), of(1e10)
    slow = replace(machine, devices=tuple(replace(each, fresh=1e9) for each in machine.devices))
    added = predict(alone, layout, slow).step.exchange - predict(alone, layout, machine).step.exchange
    assert added == pytest.approx(sum(alone.sizes.blocks) / 1e9, rel=0.02)
    whole = replace(layout, shard_weights=False)
    assert predict(alone, whole, slow).step == predict(alone, whole, machine).step


def test_the_slowest_device_decides(small):
    uneven = replace(of(1e12), devices=(shipped.card("RTX 4090"), shipped.card("RTX 3060")))
    even = predict(small, ParallelLayout(ulysses=2), of(1e12))
    assert predict(small, ParallelLayout(ulysses=2), uneven).step.layers > 3 * even.step.layers


def test_the_rule_is_that_of_the_backend(small, alone):
    assert of_the_rule(small, of(1e10, count=4)) == ParallelLayout(cfg=2, ulysses=2)
    assert of_the_rule(alone, of(1e10, count=4)) == ParallelLayout(ulysses=4)


def test_where_weights_do_not_fit_they_are_shared_or_stream():
    big = prompt(find("wan2.1-t2v-14b"), "480x480x17", guided=True)
    hardware = of(2.4e10)  # 24 GB each, and the weights take 28 GB
    assert rule_prediction(big, hardware).layout.splits_weights
    made = plan(big, hardware)
    assert made.chosen.room.fits
    one = next(each for each in made.predictions if each.layout == ParallelLayout())
    assert one.room.streams > 0


def test_what_fits_nowhere_is_refused_with_a_sentence():
    big = prompt(find("wan2.1-t2v-14b"), "480x480x17")
    tiny = replace(of(1e10, count=1), devices=(replace(shipped.card("RTX 3060"), memory=1e8),), host_memory=1e8)
    with pytest.raises(InvalidRequest, match="in no layout") as refusal:
        plan(big, tiny)
    assert "smaller" in str(refusal.value)


def test_the_least_memory_shares_the_weights(small):
    made = plan(small, of(1e10), mode="fit memory")
    near = [each for each in made.predictions if each.room.taken <= 1.1 * min(e.room.taken for e in made.predictions)]
    assert made.chosen.layout.splits_weights
    assert made.chosen.seconds == min(each.seconds for each in near)


def test_over_slow_links_what_sends_least_is_taken_of_what_takes_little(small):
    made = plan(small, of(1e8), mode="fit memory over slow links")
    near = [each for each in made.predictions if each.room.taken <= 1.5 * min(e.room.taken for e in made.predictions)]
    assert made.chosen.layout.splits_weights
    assert made.chosen.sent == min(each.sent for each in near)


def test_rivals_are_exact_near_whole_and_on_no_further_devices(small):
    made = plan(small, of(1e12, count=4))
    by_layout = {each.layout: each for each in made.predictions}
    found = rivals(made)
    assert 1 <= len(found) <= 2
    assert made.chosen.layout not in found
    for layout in found:
        assert by_layout[layout].step.seconds <= 1.25 * made.chosen.step.seconds
        assert layout.ranks <= made.chosen.layout.ranks
        assert not layout.approximate
        assert not layout.splits_weights
    assert rivals(replace(made, predictions=(made.chosen,))) == ()


def test_what_is_taken_without_a_plan_is_tried_before_others(small):
    made = plan(small, of(1e12, count=4))
    alike = [replace(each, step=made.chosen.step) for each in made.predictions if not each.layout.splits_weights]
    near = replace(made, predictions=tuple(alike))
    last = alike[-1]
    assert last.layout not in rivals(near)
    assert rivals(replace(near, rule=last))[0] == last.layout


def test_rivals_need_no_device_that_the_choice_leaves_idle(small):
    made = plan(small, of(2e7, count=4))
    assert made.chosen.layout.ranks == 2
    alike = [replace(each, step=made.chosen.step) for each in made.predictions if each.layout.ranks > 2]
    assert alike
    assert rivals(replace(made, predictions=tuple(alike))) == ()


def test_what_needs_much_memory_is_no_rival(small):
    made = plan(small, of(1e12, count=4))
    most = max(each.room.taken for each in made.predictions if each.layout in rivals(made))
    card = replace(made.hardware.devices[0], memory=most)
    assert not rivals(replace(made, hardware=replace(made.hardware, devices=(card,) * 4)))


def test_one_device_has_no_rivals(alone):
    assert rivals(plan(alone, of(1e6))) == ()


def test_an_unknown_mode_is_refused(small):
    with pytest.raises(InvalidRequest, match=MODES[0]):
        plan(small, of(1e10), mode="quickest")


def test_the_table_says_the_choice_and_marks_it(small):
    made = plan(small, of(1e10))
    text = table(made)
    assert f"* {made.chosen.layout}" in text
    assert text.endswith(f"Choice: {made.reason}.")
    assert str(made.rule.layout) in text
    assert f'"chosen": "{made.chosen.layout}"' in as_json(made)


def test_all_layouts_are_shown_if_asked_for(small):
    made = plan(small, of(1e10))
    lines = table(made, every=True).splitlines()
    assert all(any(str(each.layout) in line for line in lines) for each in made.predictions)
