"""Descriptions of machines: their form, those that are shipped, and those that a probe has measured."""
