"""Where transformer families keep the weights of their heads, and which group acts on them."""

from quotient_nets.architectures import hugging_face, torch_attention
from quotient_nets.architectures.build import parameter_manifold
from quotient_nets.architectures.registry import declares, known_classes

__all__ = ["declares", "hugging_face", "known_classes", "parameter_manifold", "torch_attention"]
