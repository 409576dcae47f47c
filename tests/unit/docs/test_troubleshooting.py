"""Each heading of the page *Troubleshooting* is a text that the code has, with ``...`` for what it puts in."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^### (.+)$", PAGE, re.MULTILINE)


def texts() -> list[str]:
    """Return every text of the nodes and the backend, with ``...`` for each value that is put in."""
    found = []
    for file in [*(ROOT / "nodes").rglob("*.py"), *(ROOT / "parallel_backend").rglob("*.py")]:
        for each in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(each, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in each.values)
                )
            elif isinstance(each, ast.Constant) and isinstance(each.value, str):
                found.append(each.value)
    return found


def missing(messages: list[str]) -> list[str]:
    """Return the messages that no text contains."""
    there = texts()
    return [message for message in messages if not any(message in text for text in there)]


def test_every_message_is_one_of_the_code():
    assert len(MESSAGES) > 15
    assert missing(MESSAGES) == []


def test_a_message_that_nobody_sees_is_noticed():
    assert missing(["there is no device ...", "the moon is full"]) == ["the moon is full"]


def test_every_message_has_a_remedy():
    parts = re.split(r"^#+ .+$", PAGE, flags=re.MULTILINE)
    headings = re.findall(r"^(#+) .+$", PAGE, re.MULTILINE)
    bodies = [body.strip() for heading, body in zip(headings, parts[1:], strict=True) if heading == "###"]
    assert len(bodies) == len(MESSAGES)
    assert all(len(body) > 40 for body in bodies)
