"""Measures and checks the product: ``python -m lab --help``."""
