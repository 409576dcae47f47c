"""Samplers and prediction types. Elementwise maths; nothing here communicates."""
