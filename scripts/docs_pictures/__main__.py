"""Write all pictures: ``python -m scripts.docs_pictures``."""

from scripts.docs_pictures import files

if __name__ == "__main__":
    files.write()
