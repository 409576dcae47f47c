"""What Open-Sora 2.0 reads at the end of a prompt: the frame rate and how much moves."""

import re

_NAMES_RATE = re.compile(r"\d+ FPS\.$")


def with_frame_rate(prompt: str, rate: int) -> str:
    """Return a prompt with its frame rate, unless it ends with one."""
    prompt = prompt if prompt.endswith(".") else f"{prompt}."
    return prompt if _NAMES_RATE.search(prompt) else f"{prompt} {rate} FPS."


def with_motion_score(prompt: str, score: str) -> str:
    """Return a prompt with how much moves: 1 is little, 4 the authors' usual score, 7 much."""
    prompt = prompt if prompt.endswith(".") else f"{prompt}."
    return f"{prompt} {score} motion score."
