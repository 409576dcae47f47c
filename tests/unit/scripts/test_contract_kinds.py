"""Each kind of entry, on a small made-up checkout: what holds, and the sentence for what does not."""

import pytest

from scripts.core_contract.check import asked, differences
from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Has, Mentions, Overrides, Passes, ReadsOnly
from scripts.core_contract.model_kinds import Detects, Equals, Node

SOURCE = {
    "comfyui_version.py": '__version__ = "1.2.3"\n',
    "comfy/things.py": """
from dataclasses import dataclass
from . import others
from .others import *
LIMIT = 16
try:
    MAYBE = torch.cuda.Error
except AttributeError:
    MAYBE = Exception
class Base:
    kind = "base"
    def __init__(self, a, b=1):
        self.a = a
        self.register_buffer("sigmas", a)
    @staticmethod
    def made(path, **options): ...
    @property
    def size(self): return 1
    def work(self, x, y=None, *, z): return self.stand_in.read(x, mode="m")
class Child(Base):
    other = others.thing
@dataclass
class Record:
    width: int
    height: int = 2
models = [Record]
def _size_input(): return io.Int.Input(id="size")
class Resize:
    def define_schema(cls): return io.Schema(node_id="Resize", inputs=[io.Image.Input("image"), _size_input()])
""",
    "comfy/others.py": "def thing(x, *args, **kwargs): ...\ndef moved_here(): ...\n",
}
"""The files of the checkout."""

HOLDS = [
    Has("", "LIMIT MAYBE Base moved_here", by="", why=""),
    Has("Child", "a sigmas kind size work other", by="", why=""),
    Calls("Child(a, *, b)", by="", why=""),
    Calls("Child.made(path, *, anything)", by="", why=""),
    Calls("Child.other(x, y, *, anything)", by="", why=""),
    Calls("Record(*, width)", by="", why=""),
    Calls("Child.work(x, *, z)", by="", why=""),
    Overrides("Child.work(x, y, z)", by="", why=""),
    Overrides("Child.work(x, *args, **kwargs)", by="", why=""),
    Passes("Base.work", 'self.stand_in.read(x, mode="m")', by="", why=""),
    Passes("Base.work", "self.stand_in.read(*args, **kwargs)", by="", why=""),
    Mentions("Base.work", "m x", by="", why=""),
    ReadsOnly("Base", "self.stand_in", "read write", by="", why=""),
    Equals("LIMIT", 16, by="", why=""),
    Node("Resize", "image size", by="", why=""),
    Has("", "absent", by="", why="", optional=True),
    Calls("absent(x)", by="", why="", optional=True),
    Calls("absent(x)", by="", why="", since=(1, 3, 0)),
]
DIFFERS = [
    (Has("", "absent LIMIT", by="", why=""), "no absent in comfy/things.py"),
    (Has("Child", "b", by="", why=""), "no b in comfy/things.py:20"),
    (Has("Gone", "b", by="", why=""), "it is missing from comfy/things.py"),
    (Calls("Gone.method(x)", by="", why=""), "comfy.things.Gone is missing"),
    (Calls("Child(b)", by="", why=""), "parameter 1 is a, and we pass b"),
    (Calls("Child()", by="", why=""), "it also requires a"),
    (Calls("Child(a, b, c)", by="", why=""), "no parameter 3, which we pass as c"),
    (Calls("Record(*, width, depth)", by="", why=""), "no parameter depth, which we pass by name"),
    (Calls("LIMIT(x)", by="", why=""), "it is no function"),
    (Overrides("Child.work(x, z)", by="", why=""), "ours lacks the parameter y"),
    (Overrides("Child.work(y, x, z)", by="", why=""), "another order than in ours"),
    (Overrides("Child.work(x, y, w, z)", by="", why=""), "no parameter w, which ours has"),
    (Overrides("Child.other(x, *args)", by="", why=""), "ours lacks **kwargs"),
    (Passes("Base.work", "self.stand_in.read(x)", by="", why=""), "there is self.stand_in.read(x, mode='m'), not"),
    (Passes("Base.work", "self.stand_in.write(x)", by="", why=""), "no call of self.stand_in.write"),
    (Mentions("Base.work", "n", by="", why=""), 'it does not contain "n"'),
    (ReadsOnly("Base", "self.stand_in", "write", by="", why=""), "it now reads self.stand_in.read"),
    (Equals("LIMIT", 48, by="", why=""), "it is 16, not 48"),
    (Calls("absent(x)", by="", why="", since=(1, 2, 3)), "it is missing from comfy/things.py"),
    (Calls("work(x)", by="", why="", optional=True), None),
    (Calls("Record(depth)", by="", why="", optional=True), "parameter 1 is width"),
    (Node("Gone", "x", by="", why=""), "there is no node of this id"),
    (Node("Resize", "image width", by="", why=""), "no input width: it has image, size"),
    (Detects("Gone", {}, "Model", "Format", by="", why=""), "it is missing from comfy/things.py"),
]


@pytest.fixture
def small_core(tmp_path):
    for name, text in SOURCE.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return tmp_path


def test_kinds_of_entries_hold(small_core):
    entries = core_module("comfy.things", *HOLDS)
    assert list(differences(entries, small_core)) == []
    assert len(asked(entries, small_core)) == len(entries) - 1


@pytest.mark.parametrize(("entry", "sentence"), DIFFERS, ids=[f"{type(e).__name__}-{e.name}" for e, _ in DIFFERS])
def test_kinds_of_entries_differ(small_core, entry, sentence):
    found = [difference.text for difference in differences(core_module("comfy.things", entry), small_core)]
    if sentence is None:
        assert found == []
    else:
        assert len(found) == 1, found
        assert sentence in found[0]


def test_a_name_that_moved_is_found_in_its_new_place(small_core):
    (entry,) = core_module("comfy.gone", Has("", "thing", by="", why=""))
    assert [d.text for d in differences([entry], small_core)] == ["there is no module comfy.gone"]
    (small_core / "comfy" / "things.py").write_text("LIMIT = 16\n", encoding="utf-8")
    (entry,) = core_module("comfy.things", Calls("moved_here()", by="", why=""))
    (difference,) = differences([entry], small_core)
    assert "there is one in comfy/others.py:2" in str(difference)
