"""A real transformer and real data that ship with the package: no download, no accelerator.

:func:`load_digits_vit` is a small vision transformer trained on the scikit-learn digits of
:func:`load_digits_split`; :func:`load_sentences` gives short sentences with a sentiment for a
sentence encoder of your own. ``python -m quotient_nets.demo.train`` trains the transformer again.
"""

from quotient_nets.demo.digits import DigitsSplit, load_digits_split
from quotient_nets.demo.sentences import load_sentences
from quotient_nets.demo.vit import DigitsViT
from quotient_nets.demo.weights import digits_vit_metadata, load_digits_vit, save_digits_vit

__all__ = [
    "DigitsSplit",
    "DigitsViT",
    "digits_vit_metadata",
    "load_digits_split",
    "load_digits_vit",
    "load_sentences",
    "save_digits_vit",
]
