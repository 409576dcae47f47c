"""Measures and checks the planner: published scaling results, and cells that run here."""
