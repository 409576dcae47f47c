"""Nodes for Open-Sora 1.2, where ComfyUI has none that does the same."""
