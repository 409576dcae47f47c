"""Code that the documentation quotes is in the file that the quote names."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUOTES = re.findall(r"```python\n# (\S+)\n(.*?)```", (ROOT / "DEVELOPING.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize(("file", "quoted"), QUOTES)
def test_quoted_code_is_there(file, quoted):
    assert quoted in (ROOT / file).read_text(encoding="utf-8")


def test_there_are_quotes():
    assert len(QUOTES) >= 5
