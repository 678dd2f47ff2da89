"""Parameters of a model as one point of one manifold."""

from quotient_nets.parameters.blocks import Block
from quotient_nets.parameters.invariance import InvarianceReport
from quotient_nets.parameters.layout import Component, Entry, Heads, Layout
from quotient_nets.parameters.manifold import ParameterManifold
from quotient_nets.parameters.substitution import at_parameters, untouched
from quotient_nets.parameters.views import Pair, Translation, View

__all__ = [
    "Block",
    "Component",
    "Entry",
    "Heads",
    "InvarianceReport",
    "Layout",
    "Pair",
    "ParameterManifold",
    "Translation",
    "View",
    "at_parameters",
    "untouched",
]
