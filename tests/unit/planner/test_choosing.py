"""Layouts to try: what earlier processes found, what ended them, and what is kept on disk."""

from dataclasses import replace
from unittest import mock

import pytest
from msgspec import structs

from parallel_backend.distributed.mesh import Axis
from parallel_backend.engine.layout_trial import CALLS
from parallel_backend.engine.planned import Planned
from parallel_backend.errors import InvalidRequest
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.loading.room import Room
from parallel_backend.planner import agreed, choosing, kept_times, own_machine, record
from parallel_backend.planner.agreed import AgreedPlan
from parallel_backend.planner.choosing import Chooser
from parallel_backend.planner.hardware import shipped
from parallel_backend.planner.hardware.description import Hardware
from parallel_backend.planner.kept_times import KeptTimes
from parallel_backend.planner.models import find
from parallel_backend.planner.own_machine import OwnMachine, with_memory
from parallel_backend.planner.request import prompt
from parallel_backend.planner.slowdown import EVERY, Watch
from parallel_backend.protocol.model_spec import Devices, ModelSpec

ALONE = Axis(name="all", group=None, ranks=(0,), index=0, gloo=True)
A, B, C = (ParallelLayout.parse(text) for text in ("ulysses=2", "cfg=2", "ring=2"))
MODEL = ModelSpec(path="/", stamp="1", devices=Devices(kind="cpu", indices=(0, 1)))


@pytest.fixture(scope="module")
def made():
    asked = replace(prompt(find("wan2.1-t2v-1.3b"), "480x480x17", guided=True), loop=False)
    hardware = Hardware(name="one card", devices=(shipped.card("RTX 4090"),))
    return AgreedPlan(prompt=asked, measured=hardware, layouts=(A, B, C), reason="predicted")


@pytest.fixture
def begun(made, tmp_path):
    """Begins in a process of its own."""
    return lambda made=made, model=MODEL: Chooser(tmp_path)._begun("work", made, model, ALONE)


@pytest.fixture
def kept(made, tmp_path):
    return lambda model=MODEL: KeptTimes(made, model, tmp_path, 1)


def tries(planned):
    """Run a trial to its end, and return the layouts that it moves to."""
    trial, found = planned.trial(), []
    while not trial.settled:
        for _ in range(CALLS):
            with trial.timed():
                pass
        found.append(trial.move(ALONE))
    return found


def test_all_are_tried_and_the_next_process_knows(begun, kept):
    planned = begun()
    assert (planned.layout, planned.reason) == (A, "predicted")
    assert tries(planned)[:2] == [B, C]
    assert set(kept().times()) == {str(A), str(B), str(C)}
    again = begun()
    assert again.trial is None
    assert "tried in the first steps" in again.reason


def test_the_fastest_of_what_is_known_is_taken_by_the_ranks_own_loop_too(begun, kept, made):
    loop = replace(made, prompt=replace(made.prompt, loop=True))
    assert begun(loop).trial is None
    assert begun(loop).layout == A
    kept().add({str(A): 1.0, str(B): 0.5, str(C): 2.0})
    assert begun(loop).layout == B
    assert begun().layout == B


def test_a_layout_with_which_the_ranks_ended_is_not_tried_again(begun, kept):
    trial = begun().trial()
    for _ in range(CALLS):
        with trial.timed():
            pass
    assert trial.move(ALONE) == B
    assert kept().times()[str(B)] is None  # and here the process ends
    assert B not in tries(begun())[:1]
    assert kept().times().keys() - {str(B)} == {str(A), str(C)}
    assert begun().trial is None  # not in the third process, either


def test_times_hold_for_the_same_work_alone(begun, kept):
    kept().add({str(A): 1.0, str(B): 0.5, str(C): 2.0})
    for other in (replace(MODEL, attention="sage"), replace(MODEL, stamp="2")):
        assert begun(model=other).trial is not None


def test_what_is_tried_on_a_machine_that_has_changed_is_not_kept(begun, kept, made):
    words = "now rank 1 at 50 % of the speed that was measured: "
    planned, settled = begun(replace(made, changed=words)), list[Planned]()
    trial = planned.trial()
    trial._notes._settled = settled.append
    tries(replace(planned, trial=lambda: trial))
    assert settled[0].reason.startswith(words)
    assert not kept().times()


def test_memory_is_not_what_was_free_while_the_ranks_measured(made):
    now = with_memory(made.hardware, 3_000, ALONE)
    assert [device.memory for device in now.devices] == [3_000]
    assert now.host_memory != made.hardware.host_memory


def test_what_is_tried_leaves_the_measurement_as_it_is(kept, made, tmp_path):
    assert kept()._hardware == made.hardware
    kept().add({str(A): 1.0})
    other = made.hardware.with_memory([5.0], 5.0)
    KeptTimes(replace(made, measured=other), MODEL, tmp_path, 1).add({str(B): 1.0})
    (path,) = tmp_path.glob("*.json")
    assert record.read(path, record.facts_of(MODEL.devices.first(1))).hardware == made.hardware


@pytest.fixture
def measure(monkeypatch):
    """Takes the place of a measurement in which the process ends."""
    measuring = mock.Mock(side_effect=RuntimeError)
    monkeypatch.setattr("parallel_backend.planner.probe.measure", measuring)
    return measuring


def test_ranks_that_ended_while_they_measured_do_not_measure_again(made, tmp_path, measure):
    memory = mock.Mock()
    memory.lacks.return_value = False
    with pytest.raises(RuntimeError):
        OwnMachine(tmp_path, Watch()).hardware(made.prompt, MODEL, ALONE, memory)
    assert "is removed" in str(OwnMachine(tmp_path, Watch()).hardware(made.prompt, MODEL, ALONE, memory))
    assert measure.call_count == 1


def test_the_kernel_of_the_model_is_asked_for(made, tmp_path, measure):
    memory = mock.Mock()
    memory.lacks.return_value = False
    for name in ("auto", "sage"):  # which have records of their own
        with pytest.raises(RuntimeError):
            OwnMachine(tmp_path, Watch()).hardware(made.prompt, replace(MODEL, attention=name), ALONE, memory)
    assert [call.args[0].attention for call in measure.call_args_list] == ["auto", "sage"]


def test_without_room_nothing_is_measured(made, tmp_path, measure):
    memory = mock.Mock()
    memory.lacks.side_effect = lambda nbytes, _: nbytes > 10**8
    for _ in range(2):  # it may have room the next time
        assert "no room" in str(OwnMachine(tmp_path, Watch()).hardware(made.prompt, MODEL, ALONE, memory))
    assert not measure.called
    memory.lacks.side_effect = lambda nbytes, _: nbytes > 10**10
    with pytest.raises(RuntimeError):
        OwnMachine(tmp_path, Watch()).hardware(made.prompt, MODEL, ALONE, memory)


def asked_of(monkeypatch, tmp_path, made, plans, chooser=None):
    """Return a function that asks for a plan, and what it plans for."""
    chooser, planning = chooser or Chooser(tmp_path), mock.Mock(side_effect=plans)
    monkeypatch.setattr(Chooser, "_plan", planning)
    monkeypatch.setattr(Chooser, "_as_now", lambda _, key, made, *__: (key, made))
    plan = made.prompt.plan(ParallelLayout())
    return lambda **given: chooser(plan, MODEL, mock.Mock(dtype="bf16"), {}, ALONE, **given), planning


def test_without_memory_that_others_may_give_back_a_plan_is_made_again(monkeypatch, tmp_path, made):
    whole, split = (
        replace(made, layouts=(layout,), adapted=layout == B) for layout in (A, B)
    )  # fmt: skip
    ask, planning = asked_of(monkeypatch, tmp_path, made, [whole, split])
    given = [False, False, True, True, False]
    assert [ask(adapt=adapt).layout for adapt in given] == [A, A, B, B, B]
    assert planning.call_count == 2


def test_what_nobody_can_measure_is_left_to_the_rule_and_asked_for_again(monkeypatch, tmp_path, made):
    unknown = AgreedPlan(prompt=made.prompt, reason="why")
    ask, planning = asked_of(monkeypatch, tmp_path, made, [unknown, replace(made, layouts=(A,))])
    assert ask(adapt=False) == Planned(layout=None, reason="why")
    assert [ask(adapt=False).layout for _ in range(2)] == [A, A]
    assert planning.call_count == 2


@pytest.fixture
def planning(monkeypatch, tmp_path, made):
    """Plan for devices that other programs fill, on a machine with fast links or slow ones."""

    def planning(mode, *, total=10**11, slow=False, **given):
        measured = shipped.machine("8xH100").first(2)
        if slow:
            measured = replace(measured, links=tuple(replace(each, bandwidth=1e6) for each in measured.links))
        monkeypatch.setattr(OwnMachine, "hardware", lambda *_: measured)
        monkeypatch.setattr(Chooser, "_as_now", lambda _, key, made, *__: (key, made))
        monkeypatch.setattr(choosing, "of_plan", lambda *_, **__: made.prompt)
        monkeypatch.setattr("parallel_backend.planner.models.of", lambda _: None)
        monkeypatch.setattr(own_machine, "gather_numbers", lambda mine, _: [tuple(mine)] * 2)
        components = mock.Mock()
        components.memory.room = Room(free=1, freeable=0, total=total, limit=total)
        plan = made.prompt.plan(ParallelLayout())
        return Chooser(tmp_path)(plan, replace(MODEL, mode=mode), components, {}, ALONE, **given)

    return planning


def test_auto_plans_for_roomy_devices_and_tries_nothing(planning):
    found = planning("auto")
    assert found.layout is not None
    assert not found.layout.splits_weights
    assert (found.trial, found.holds) == (None, EVERY)


def test_auto_leaves_no_device_idle_and_streams_nothing(planning):
    assert planning("fastest", slow=True, adapt=False).layout.ranks == 1
    assert planning("auto", slow=True).layout.ranks == 2
    assert '"one rank" on 1 of 2 devices would take' in planning("auto", slow=True).reason
    assert "would take" not in planning("auto").reason + planning("fastest", slow=True, adapt=False).reason
    assert planning("auto", total=10**9).layout is None


def test_other_modes_plan_for_the_memory_that_there_is(planning):
    with pytest.raises(InvalidRequest, match="in no layout"):
        planning("fastest")
    assert planning("fastest", adapt=False).layout is not None


@pytest.mark.parametrize(
    ("error", "said"),
    [(InvalidRequest("it fits nowhere"), "it fits nowhere"), (RuntimeError("a mistake"), "RuntimeError.*mode auto")],
)
def test_auto_refuses_nothing(monkeypatch, planning, error, said):
    monkeypatch.setattr(agreed, "plan", mock.Mock(side_effect=error))
    assert planning("auto").layout is None
    with pytest.raises(InvalidRequest, match=said):
        planning("fastest")


def test_few_kinds_of_work_are_kept(kept):
    for stamp in range(kept_times._KINDS + 3):
        kept(replace(MODEL, stamp=str(stamp))).add({str(A): 1.0})
    known = [bool(kept(replace(MODEL, stamp=str(stamp))).times()) for stamp in range(kept_times._KINDS + 3)]
    assert known == [False] * 3 + [True] * kept_times._KINDS


def test_why_a_machine_is_measured_anew_is_said_once(monkeypatch, made, tmp_path):
    measured = replace(made.hardware, links=())
    monkeypatch.setattr("parallel_backend.planner.probe.measure", lambda *_: measured)
    memory = mock.Mock()
    memory.lacks.return_value = False
    facts = record.facts_of(MODEL.devices.first(1))
    path = record.file_of(MODEL.devices.first(1), made.prompt, tmp_path)
    assert record.write(path, structs.replace(facts, torch="9"), made.hardware) == ""
    memory.lacks.return_value = True
    machine = OwnMachine(tmp_path, Watch())
    assert isinstance(machine.hardware(made.prompt, MODEL, ALONE, memory), str)
    assert machine.take_note() == "", "nothing was measured"
    memory.lacks.return_value = False
    assert machine.hardware(made.prompt, MODEL, ALONE, memory) == measured
    note = machine.take_note()
    assert note.startswith("this machine was measured with torch 9, and this is")
    assert note.endswith(", so it was measured again")
    assert machine.hardware(made.prompt, MODEL, ALONE, memory) == measured
    assert machine.take_note() == ""


def test_a_note_is_said_once_before_the_reason(monkeypatch, tmp_path, made):
    chooser = Chooser(tmp_path)
    chooser._machine.note = "why"
    ask, _ = asked_of(monkeypatch, tmp_path, made, [replace(made, layouts=(A,))], chooser)
    assert [ask().reason for _ in range(2)] == ["why; predicted", "predicted"]
