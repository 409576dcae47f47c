"""``bench prompt``: its prompts, where their time goes, and its table."""

import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from lab.__main__ import main
from lab.bench.whole_prompt.command import COLD, LIMIT, WARM, Way, Ways
from lab.bench.whole_prompt.graphs import FILE, NATIVE, OURS, OWN, SHAPES, WAYS, WRAPPED, Graph, write_files
from lab.bench.whole_prompt.timeline import QUEUE, RequestLog, Requests, Timed, by_kind, by_node, timed
from parallel_backend.checkpoint.safetensors_file import read_header
from parallel_backend.protocol import request_log
from parallel_backend.protocol.request_log import RequestLine, encode
from scripts.comfy_api import ExecutionFailed
from scripts.comfy_events import Event


def graph(model: str, way: str, lora: bool = True) -> Graph:
    return Graph(model=model, way=way, devices="0,1", steps=4, cfg=1.0, lora=lora, side=64)


@pytest.mark.parametrize(("model", "way"), [(model, way) for model in WAYS for way in WAYS[model]])
@pytest.mark.parametrize("lora", [False, True])
def test_each_link_of_a_prompt_leads_to_a_node_and_each_node_is_used(model, way, lora):
    prompt = graph(model, way, lora).prompt(3, "a red star")
    links = {value[0] for node in prompt.values() for value in node["inputs"].values() if isinstance(value, list)}
    assert links == prompt.keys() - {"save"}
    assert ("lora" in prompt) == lora
    assert prompt["sample"]["class_type"] == ("ParallelSampler" if way == OURS else "KSampler")


def test_ways_differ_in_what_stands_before_the_sampler():
    def chain(way):
        prompt, node, found = graph(FILE, way).prompt(1, ""), "sample", []
        while "model" in prompt[node]["inputs"]:
            node = prompt[node]["inputs"]["model"][0]
            found.append(prompt[node]["class_type"])
        return found[1:]

    assert chain(OWN) == ["UNETLoader"]
    assert chain(WRAPPED) == ["ParallelModel", "UNETLoader"]
    assert chain(NATIVE) == chain(OURS) == ["ParallelLoader"]


@pytest.mark.parametrize("model", WAYS)
def test_the_lora_fits_the_model_and_texts_need_a_node_only_without_an_encoder(model, tmp_path):
    write_files(tmp_path, model, heads=1, layers=2)
    lora = read_header(tmp_path / "models/loras/bench-lora.safetensors").tensors
    assert {name.partition(".self_attn")[0] for name in lora} >= {f"diffusion_model.blocks.{i}" for i in range(2)}
    assert (tmp_path / "custom_nodes/bench_text.py").exists() == (model == FILE)


def line(number: int, kind: str, **seconds: float) -> RequestLine:
    return RequestLine(
        time="", id=str(number), kind=kind, model="", layout="", size=(), steps=0, seconds=seconds, received=0, sent=0,
        outcome="done",
    )  # fmt: skip


def executing(node: str | None, at: float, prompt_id: str = "ours", **data: str) -> Event:
    return Event("executing", {"node": node, "prompt_id": prompt_id, **data}, at)


SUCCESS = "execution_success"


def test_time_by_node():
    events = [
        executing("text", 10.5), executing("other", 11.0, "theirs"), executing("empty", 11.5),
        executing("sample", 12.0), executing("sample.0.1", 12.5, display_node="sample"),
        Event(SUCCESS, {"prompt_id": "ours"}, 16.0), executing(None, 17.0),
    ]  # fmt: skip
    found = by_node(events, graph(SHAPES, NATIVE).prompt(1, ""), "ours", 10.0)
    assert found == {QUEUE: 0.5, "CLIPTextEncode": 1.5, "KSampler": 4.0}


def test_requests_add_up_by_kind():
    lines = [line(1, "Forward", queued=0.5, running=2.0, denoising=1.5), line(2, "Decode", running=1.0),
             line(3, "Forward", running=1.0, replying=0.25)]  # fmt: skip
    found = by_kind(lines)
    assert found["Forward"].count == 2
    assert found["Forward"].seconds == {"queued": 0.5, "running": 3.0, "denoising": 1.5, "replying": 0.25}
    assert found["Forward"].total == 3.5
    assert Timed(seconds=6.0, nodes={}, requests=found).outside == 1.5


def test_lines_of_earlier_prompts_are_left_out(tmp_path: Path):
    path = tmp_path / "requests.log"
    log = RequestLog(path)
    assert log.new() == []
    path.write_text(encode(line(1, "Sample")) + "\n")
    assert [each.id for each in log.new()] == ["1"]
    path.write_text(encode(line(1, "Sample")) + "\n" + encode(line(2, "Decode")) + "\n")
    assert [each.id for each in log.new()] == ["2"]


class FakeComfyUI:
    """Answers a prompt with events at once, and a line in the backend's log."""

    def __init__(self, log: Path, end: str) -> None:
        self.seen: list[Event] = [Event(SUCCESS, {"prompt_id": "before"}, 0.0)]
        self._log, self._end = log, end

    def submit(self, prompt):
        begun = time.monotonic()
        self.seen += [executing("sample", begun + 1), Event("progress", {"value": 1}, begun + 2),
                      Event(self._end, {"prompt_id": "ours"}, begun + 5)]  # fmt: skip
        self._log.write_text(encode(line(1, "Sample", running=3.0)) + "\n")
        return "ours"

    def wait(self, wanted, deadline=0.0):
        if wanted == "ours":
            if self._end != SUCCESS:
                raise ExecutionFailed(node_type="KSampler", exception_type="Error", message="no")
            return None
        return next(event for event in self.seen if wanted(event))


def test_a_prompt_is_timed_to_its_end(tmp_path: Path):
    fake: Any = FakeComfyUI(tmp_path / "log", SUCCESS)
    found = timed(fake, fake, RequestLog(tmp_path / "log"), graph(SHAPES, OURS).prompt(1, ""), deadline=1.0)
    assert list(found.nodes) == [QUEUE, "ParallelSampler"]
    assert found.seconds == pytest.approx(5.0, abs=0.2)
    assert found.outside == pytest.approx(2.0, abs=0.2)


def test_a_prompt_that_fails_says_so(tmp_path: Path):
    fake: Any = FakeComfyUI(tmp_path / "log", "execution_error")
    with pytest.raises(ExecutionFailed, match="KSampler: Error: no"):
        timed(fake, fake, RequestLog(tmp_path / "log"), graph(SHAPES, OURS).prompt(1, ""), deadline=1.0)


def ways(model: str, slower: float) -> Ways:
    def way(name, factor, node):
        nodes = {QUEUE: 0.5, node: 2.0 * factor}
        requests = {"Forward": Requests(count=4, seconds={"running": 1.0, "denoising": 0.75})}
        prompt = Timed(seconds=sum(nodes.values()), nodes=nodes, requests=requests)
        return Way(name=name, prompts={COLD: prompt, WARM: prompt})

    return Ways(model=model, ways=(way(OURS, 1.0, "ParallelSampler"), way(NATIVE, slower, "KSampler")))


def test_the_table_compares_with_the_first_way():
    text = ways(SHAPES, 1.5).describe()
    assert "Parallel Loader, cold: 3.500 s, 1.40x" in text
    assert "4 x Forward: running 1.000, denoising 0.750" in text
    assert "2.500  outside of requests" in text
    assert text.endswith("KSampler's node takes 1.50 times Parallel Sampler's, with another seed")


def test_ksampler_of_the_shipped_checkpoint_may_not_take_much_longer():
    assert ways(SHAPES, LIMIT + 0.01).failed
    assert not ways(SHAPES, LIMIT - 0.01).failed
    assert not ways(FILE, 2.0).failed
    assert not Ways(model=SHAPES, ways=ways(SHAPES, 2.0).ways[1:]).failed


def test_an_unknown_way_is_refused(capsys):
    assert main(["bench", "prompt", "--way", OWN]) == 1
    assert f"--way {OWN}: with --model shapes there are {OURS}, {NATIVE}" in capsys.readouterr().err


def test_the_log_is_read_until_it_is_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    numbers = itertools.count(1)
    monkeypatch.setattr(request_log, "read", lambda path: iter([line(min(next(numbers), 5), "Forward")]))
    assert [each.id for each in RequestLog(tmp_path).new()] == ["1", "2", "3", "4", "5"]
