"""Nodes for Open-Sora 2.0, where ComfyUI has none that does the same."""
