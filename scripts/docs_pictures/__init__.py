"""The pictures of the documentation, the icon and the banner, as SVG: ``python -m scripts.docs_pictures``."""
