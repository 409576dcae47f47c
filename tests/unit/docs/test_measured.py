"""The page of measured steps says what the benchmark has printed."""

import msgspec

from lab.bench import results
from lab.bench.ranks.cases import Case
from lab.bench.step.run import Row, Table
from scripts.docs_pictures import measured


def test_the_page_is_made_from_the_files():
    assert measured.documents()
    assert measured.PAGE.read_text(encoding="utf-8") == measured.page(), "run python -m scripts.generate"


def table(tokens, frames=0, **speedups):
    rows = [
        Row(name=name, ours=name != "one process", seconds=1 / ratio, all_seconds=(1 / ratio,), speedup=ratio,
            fastest=ratio + 0.1, against_best=None, max_rel_error=1e-7 * tokens, sent_bytes=(8, 8))
        for name, ratio in speedups.items()
    ]  # fmt: skip
    case = Case(family="wan", tokens=tokens, text_tokens=128, branches=1 + (tokens > 2000), frames=frames)
    return Table(case=case, rows=tuple(rows), left_out={}, best_peer=None, load=(0.0, 0.0))


def read(monkeypatch, *tables):
    monkeypatch.setattr("sys.argv", ["lab", "bench", "--family", "wan", "--layout", "pipe=2 patches=1"])
    return msgspec.json.decode(results.document(tables), type=measured.Document)


def test_a_section_has_every_case_and_the_command(monkeypatch):
    small, large = table(1024, **{"one process": 1.0, "ring=2": 1.5}), table(4096, **{"ring=2": 1.9, "cfg=2": 2.04})
    text = measured.section("steps", read(monkeypatch, small, large))
    lines = text.splitlines()
    assert "| layout | 1,024 tokens | 4,096 tokens with guidance | difference |" in lines
    assert "| `ring=2` | 1.50x (1.60x) | 1.90x (2.00x) | 4e-04 |" in lines
    assert "| `cfg=2` |  | 2.04x (2.14x) | 4e-04 |" in lines
    assert "one process`" not in text
    assert lines[0] == "## Wan on 2 ranks"
    assert "`python -m lab bench --family wan --layout 'pipe=2 patches=1'`, on " in text
    assert "torch " in text


def test_the_picture_has_the_layouts_that_ran_in_every_case(monkeypatch):
    small, large = table(1024, **{"ring=2": 1.5, "tensor=2": 1.31}), table(4096, **{"ring=2": 1.9, "cfg=2": 2.04})
    drawn = measured._picture(read(monkeypatch, small, large).results)
    assert "1.50x" in drawn
    assert "1.90x" in drawn
    assert "2.04x" not in drawn


def test_frames_and_numbers_of_ranks_are_said(monkeypatch):
    text = measured.section("steps", read(monkeypatch, table(1024, frames=4, **{"ring=3": 1.5, "ulysses=4": 2.0})))
    assert text.startswith("## Wan on 3 and 4 ranks\n")
    assert "| layout | 1,024 tokens in 4 frames | difference |" in text


def test_the_picture_says_once_what_all_cases_share(monkeypatch):
    small, large = (table(tokens, frames=4, **{"ring=2": 1.5}) for tokens in (1024, 1536))
    assert "one process, wan, in 4 frames<" in measured._picture(read(monkeypatch, small, large).results)
    assert "one process, wan, 1,024 tokens, in 4 frames<" in measured._picture(read(monkeypatch, small).results)
    unlike = table(4096, **{"ring=2": 1.5})
    assert ">1,024 tokens in 4 frames<" in measured._picture(read(monkeypatch, small, unlike).results)
