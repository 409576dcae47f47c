"""The page about ComfyUI's nodes says what the sweep over them has found."""

import json

from scripts import node_table


def test_the_page_is_up_to_date():
    found = json.loads(node_table.FOUND.read_text(encoding="utf-8"))
    assert node_table.PAGE.read_text(encoding="utf-8") == node_table.page(found), "run python -m scripts.node_table"


def test_nothing_is_unknown():
    found = json.loads(node_table.FOUND.read_text(encoding="utf-8"))
    for outcomes in found["outcomes"].values():
        assert all(set(letters) <= {*node_table.COLUMNS, "-"} for letters in outcomes.values())
        assert all(len(letters) == len(found["models"]) for letters in outcomes.values())


def test_a_row_names_the_fewest_models():
    found = {
        "models": ["A", "B", "C", "D"],
        "outcomes": {
            "0.9.0": {"Old": "WWWW", "New": "RRWW"},
            "0.10.0": {"Mixed": "WWWR", "New": "-RRW", "Gone": "FFFF"},
        },
    }
    text = node_table.page(found)
    assert "ComfyUI 0.10.0 that takes" in text
    assert "| Mixed | all but D |  | D |  |" in text
    assert "| New | D |  | all but D |  |" in text
    assert "| Gone |  |  |  | all |" in text
    assert "0.9.0 has the same but for: New with C: same effect. Nodes that only it has: Old." in text
