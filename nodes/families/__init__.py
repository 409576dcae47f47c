"""One bridge a family between ComfyUI's objects and the backend's arguments."""
