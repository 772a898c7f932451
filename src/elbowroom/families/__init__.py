"""Model families: one module each, and a registry."""

from elbowroom.families.base import Conditioning, Family
from elbowroom.families.registry import FAMILIES, block_patterns, family_of_pipeline, scope_patterns

__all__ = ["FAMILIES", "Conditioning", "Family", "block_patterns", "family_of_pipeline", "scope_patterns"]
