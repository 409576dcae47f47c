"""The first variant of each family."""

from lab.verify.forward.matrix import is_first_variant
from parallel_backend.verify.examples import short_name, variants

FIRSTS = {short_name(name): (name, kind) for name, kind in variants() if is_first_variant(name, kind)}
"""Class name and variant, by the family's short name."""
