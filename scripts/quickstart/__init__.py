"""From a fresh clone to an image and a video made by two ranks."""
