"""The supervisor's logs: bounded, private, and never in its way."""

import logging
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallel_backend.client.status_text import format_requests
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol import request_log
from parallel_backend.protocol.endpoint import BACKEND_LOG
from parallel_backend.protocol.frames import TensorMeta
from parallel_backend.protocol.messages import MAX_ID, Decode, RankRequest, Sample
from parallel_backend.protocol.model_spec import MAX_PATH, Devices, ModelSpec
from parallel_backend.protocol.rank_control import Finished
from parallel_backend.protocol.status import LoadedModel
from parallel_backend.supervisor import log_files, request_lines
from parallel_backend.supervisor.event_loop import EventLoop
from parallel_backend.supervisor.log_files import LogFiles
from parallel_backend.supervisor.ranks.rank_output import RankOutput
from parallel_backend.supervisor.request_queue import QueuedRequest

DEVICES = Devices(kind="cpu", indices=(0, 1))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_are_private_and_bounded(tmp_path: Path):
    logs = LogFiles(tmp_path / "logs", max_bytes=1000, kept=2, queued=10_000)
    for number in range(500):
        logs.write("rank0.log", f"line {number}")
    logs.close()
    files = sorted((tmp_path / "logs").iterdir())
    assert [file.name for file in files] == ["rank0.log", "rank0.log.1", "rank0.log.2"]
    assert all(file.stat().st_size <= 1000 for file in files)
    assert all(mode(file) == 0o600 for file in files)
    assert mode(tmp_path / "logs") == 0o700
    assert files[0].read_text().endswith("line 499\n")
    assert logs.problem == ""


def test_a_very_long_line_is_cut_into_several(tmp_path: Path):
    logs = LogFiles(tmp_path)
    logs.write("a.log", "x" * (3 * log_files.MAX_LINE))
    logs.close()
    assert [len(line) for line in (tmp_path / "a.log").read_text().split()] == [log_files.MAX_LINE] * 3


def test_lines_with_percent_signs_and_traces(tmp_path: Path):
    logs = LogFiles(tmp_path)
    logs.handler().emit(logging.makeLogRecord({"msg": "100 %s\nTraceback"}))
    logs.close()
    first, second = (tmp_path / BACKEND_LOG).read_text().splitlines()
    assert first.endswith(" supervisor: 100 %s")
    assert second == "Traceback"


def test_a_full_disk_is_said_and_does_not_raise(capfd: pytest.CaptureFixture[str]):
    """``/dev/full`` refuses each write as a full disk does."""
    logs = LogFiles(Path("/dev"))
    for _ in range(3):
        logs.write("full", "line")
    logs.close()
    assert logs.problem == "3 lines are missing: No space left on device"
    assert logs._files["full"].stream is None, "the next line opens the file anew"
    assert capfd.readouterr() == ("", "")


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("")
    logs = LogFiles(tmp_path / "file" / "logs")
    logs.write("rank0.log", "line")
    logs.close()
    assert logs.problem.startswith("1 line is missing: ")


def test_links_are_not_followed(tmp_path: Path):
    target = tmp_path / "target"
    (tmp_path / "rank0.log").symlink_to(target)
    logs = LogFiles(tmp_path)
    logs.write("rank0.log", "line")
    logs.close()
    assert not target.exists()
    assert "1 line is missing" in logs.problem


def test_writing_goes_on_when_the_disk_recovers(tmp_path: Path):
    blocked = tmp_path / "logs"
    blocked.write_text("")
    logs = LogFiles(blocked)
    logs.write("rank0.log", "lost")
    _wait_until_written(logs)
    blocked.unlink()
    logs.write("rank0.log", "kept")
    logs.close()
    assert (blocked / "rank0.log").read_text() == "kept\n"
    assert "1 line is missing" in logs.problem


def test_a_removed_file_is_made_again(tmp_path: Path):
    logs = LogFiles(tmp_path)
    logs.write("rank0.log", "first")
    _wait_until_written(logs)
    (tmp_path / "rank0.log").unlink()
    logs.write("rank0.log", "second")
    logs.close()
    assert (tmp_path / "rank0.log").read_text() == "second\n"


def test_a_disk_that_hangs_stalls_nobody(tmp_path: Path):
    """Opening a FIFO that nobody reads waits for ever."""
    os.mkfifo(tmp_path / "rank0.log")
    logs = LogFiles(tmp_path, queued=10)
    start = time.monotonic()
    for _ in range(100):
        logs.write("rank0.log", "line")
    assert time.monotonic() - start < 1.0
    assert logs.problem.endswith("missing: the disk is too slow")
    logs.close()
    assert time.monotonic() - start < 3 * log_files._END


def _wait_until_written(logs: LogFiles) -> None:
    end = time.monotonic() + 10.0
    while logs._queue.qsize() and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.2)


def run_rank(tmp_path: Path, program: str) -> tuple[RankOutput, str]:
    """Run a program as a rank's process; return its output and its log."""
    events, logs = EventLoop(), LogFiles(tmp_path)
    output = RankOutput(0, "a title", logs, events)
    with output.writable() as write_end:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=write_end, stderr=write_end)
    while process.poll() is None:
        events.run_once(0.05)
    output.finish()
    logs.close()
    return output, (tmp_path / "rank0.log").read_text()


def test_what_a_rank_and_its_libraries_write(tmp_path: Path):
    program = "import os; print('python', flush=True); os.write(2, b'native \\xff\\nunfinished')"
    output, log = run_rank(tmp_path, program)
    assert log == "--- a title ---\npython\nnative \ufffd\nunfinished\n"
    assert output.tail == "python\nnative \ufffd\nunfinished"


def test_a_rank_that_writes_much_is_not_stalled(tmp_path: Path):
    output, log = run_rank(tmp_path, "for i in range(100_000): print('line', i)")
    assert output.tail.endswith("line 99999\n")
    assert len(output.tail) <= 256 << 10
    assert log


def test_a_process_of_the_rank_that_lives_on_does_not_delay_its_end(tmp_path: Path):
    events, logs = EventLoop(), LogFiles(tmp_path)
    output = RankOutput(0, "a title", logs, events)
    program = "import subprocess; subprocess.Popen(['sleep', '30']); print('last')"
    with output.writable() as write_end:
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=write_end, stderr=write_end, start_new_session=True
        )
    try:
        process.wait(30)
        start = time.monotonic()
        output.finish()
        assert time.monotonic() - start < 2.0
        assert output.tail == "last\n"
    finally:
        os.killpg(process.pid, 9)
        logs.close()


METAS = (
    TensorMeta(name="x", dtype="float32", shape=(1, 16, 2, 8, 8)),
    TensorMeta(name="sigmas", dtype="float32", shape=(5,)),
    TensorMeta(name="0.encoder_hidden_states", dtype="float32", shape=(1, 12, 64)),
)


def queued(message: RankRequest, metas: tuple[TensorMeta, ...] = METAS) -> QueuedRequest:
    request = QueuedRequest(message=message, header=b"", connection=None, metas=metas, devices=DEVICES)  # type: ignore[arg-type]
    now = time.monotonic()
    request.queued_at, request.first_at, request.ran_at = now - 7.0, now - 6.0, now - 4.0
    return request


def line_of(
    request: QueuedRequest, outcome: str = "done", models: tuple[LoadedModel, ...] = ()
) -> request_log.RequestLine:
    return request_log.decode(request_lines.of_request(request, outcome, models))


def sample(**spec: object) -> Sample:
    model = ModelSpec(path="/home/somebody/models/shapes", devices=DEVICES, **spec)  # type: ignore[arg-type]
    return Sample(model=model, branches=1, sampler="euler", cfg=1.0)


def test_a_line_has_what_was_asked_and_what_it_took():
    request = queued(sample(layout=ParallelLayout(ulysses=2)))
    request.finished = Finished(
        request_id="", code="done", seconds={"sampling": 3.0, "replying": 0.5}, sent=8192, received=4096
    )
    line = line_of(request)
    assert (line.kind, line.model, line.layout, line.steps) == ("Sample", "shapes", "ulysses=2", 4)
    assert line.size == (1, 16, 2, 8, 8)
    assert (line.received, line.sent, line.outcome) == (4096, 8192, "done")
    assert line.seconds == pytest.approx(
        {"queued": 1.0, "starting": 2.0, "running": 4.0, "sampling": 3.0, "replying": 0.5}, abs=0.1
    )


def test_the_layout_that_the_ranks_chose():
    request = queued(sample(stamp="s"))
    path, layout = request.message.model.path, ParallelLayout(tensor=2)
    model = LoadedModel(path=path, stamp="s", layout=layout, dtype="float32", parts=(), loads=1)
    assert line_of(request, "rank_failed", (model,)).layout == str(request.layout)
    request.finished = Finished(request_id="", code="done")
    assert line_of(request, "done", (model,)).layout == "tensor=2"


def test_a_request_that_never_ran():
    request = queued(sample())
    request.ran_at = request.first_at = None
    line = line_of(request, "cancelled")
    assert line.seconds == pytest.approx({"queued": 7.0}, abs=0.1)
    assert (line.received, line.outcome) == (0, "cancelled")


def test_strange_requests_are_logged_too():
    """A client may send any names and shapes."""
    strange = (TensorMeta(name="sigmas", dtype="float32", shape=()),)
    message = Sample(
        model=ModelSpec(path="/" + "p" * (MAX_PATH - 1), devices=DEVICES),
        branches=1,
        sampler="",
        cfg=0.0,
        request_id="i" * MAX_ID,
    )
    text = request_lines.of_refused(message, strange, "queue_full")
    assert len(text) < log_files.MAX_LINE
    assert request_log.decode(text).steps == 0
    copied = Decode(model=ModelSpec(path="/proc/1/fd/5", devices=DEVICES))
    assert request_log.decode(request_lines.of_refused(copied, (), "queue_full")).model == "the copied model"


def test_the_table_of_requests(tmp_path: Path):
    request = queued(sample(layout=ParallelLayout(ulysses=2)))
    text = request_lines.of_request(request, "rank_failed", ())
    (tmp_path / "requests.log.1").write_text(text + "\n")
    (tmp_path / "requests.log").write_text('{"cut\n' + text + "\n")
    lines = list(request_log.read(tmp_path / "requests.log"))
    assert len(lines) == 2
    head, *rows = format_requests(lines).splitlines()
    assert head.split()[:3] == ["time", "request", "model"]
    assert len(rows) == 2
    assert "Sample" in rows[0]
    assert "1x16x2x8x8" in rows[0]
    assert rows[0].endswith("rank_failed")
    assert "7.00" in rows[0]
