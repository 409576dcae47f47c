"""Write the corpus: ``python -m tests.fuzz.seeds``. Findings, which are not made here, stay."""

from ..seed_files import FOLDER, made

if __name__ == "__main__":
    for kind, target, name, data in made():
        file = FOLDER / target / kind / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
