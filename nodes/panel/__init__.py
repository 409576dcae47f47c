"""What the web page's panel asks for: routes on ComfyUI's own server."""
