"""Sharpness: how much a loss can rise in a ball around a point, on any manifold."""

from quotient_nets.sharpness.result import Sharpness
from quotient_nets.sharpness.worst_case import worst_case_sharpness

__all__ = ["Sharpness", "worst_case_sharpness"]
