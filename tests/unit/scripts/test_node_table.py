"""The page about ComfyUI's nodes says what the sweep over them has found."""

import json

from scripts import node_table

IN_PACKS = node_table.FOUND_IN_PACKS


def test_the_page_is_up_to_date():
    found, in_packs = (json.loads(file.read_text(encoding="utf-8")) for file in (node_table.FOUND, IN_PACKS))
    assert node_table.PAGE.read_text(encoding="utf-8") == node_table.page(found, in_packs), (
        "run python -m scripts.node_table"
    )


def test_nothing_is_unknown():
    found = json.loads(node_table.FOUND.read_text(encoding="utf-8"))
    for outcomes in found["outcomes"].values():
        assert all(set(letters) <= {*node_table.COLUMNS, "-"} for letters in outcomes.values())
        assert all(len(letters) == len(found["models"]) for letters in outcomes.values())
    in_packs = json.loads(IN_PACKS.read_text(encoding="utf-8"))
    for nodes in in_packs["packs"].values():
        assert all(set(letters) <= {*node_table.COLUMNS} for letters in nodes.values())
        assert all(len(letters) == len(in_packs["models"]) for letters in nodes.values())


def test_a_row_names_the_fewest_models():
    found = {
        "models": ["A", "B", "C", "D"],
        "outcomes": {
            "0.9.0": {"Old": "WWWW", "New": "RRWW"},
            "0.10.0": {"Mixed": "WWWR", "New": "-RRW", "Gone": "FFFF"},
        },
    }
    text = node_table.page(found, {"models": ["A", "B"], "packs": {"Their-Pack": {"Cache": "RW"}}})
    assert "Not tried" not in text
    only = {"models": ["A", "B"], "outcomes": {"0.9.0": {"Mixed": "W-"}}}
    assert "with these models:\n\nA. Not tried with it: B." in node_table.page(only, {"models": [], "packs": {}})
    assert "| Their-Pack | Cache | B |  | A |  |" in text
    assert "ComfyUI 0.10.0 that takes" in text
    assert "| Mixed | all but D |  | D |  |" in text
    assert "| New | D |  | all but D |  |" in text
    assert "| Gone |  |  |  | all |" in text
    assert "0.9.0 has the same but for: New with C: same effect. Nodes that only it has: Old." in text
