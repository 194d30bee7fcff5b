"""Artifacts into a decoder's prompt: one placeholder token per image becomes as many rows as it has.

``layout`` (here) is the standard library alone; what holds tensors is in ``retinue.prompt.tensors``.
"""

from retinue.prompt.layout import Layout, Span, lay_out

__all__ = ["Layout", "Span", "lay_out"]
