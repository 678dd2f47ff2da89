"""Sharpness: how much a loss can rise in a ball around a point, on any manifold."""

from quotient_nets.sharpness.result import BatchSharpness, ModelSharpness, Sharpness
from quotient_nets.sharpness.worst_case import worst_case_sharpness

__all__ = ["BatchSharpness", "ModelSharpness", "Sharpness", "worst_case_sharpness"]
