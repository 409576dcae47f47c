"""The first variant of each family."""

from parallel_backend.verify.forward.examples import short_name, variants
from parallel_backend.verify.forward.matrix import is_first_variant

FIRSTS = {short_name(name): (name, kind) for name, kind in variants() if is_first_variant(name, kind)}
"""Class name and variant, by the family's short name."""
