"""One bridge per family between ComfyUI's objects and the backend's inputs."""
