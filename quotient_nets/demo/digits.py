"""The scikit-learn handwritten digits, split once and for all.

1797 grey images of 8 x 8 pixels come with scikit-learn, so nothing is downloaded. Few of them train
and many of them test: a gap between the two is what sharpness is meant to explain.

Imports: torch, and scikit-learn when the data are asked for.
"""

from typing import NamedTuple

import torch
from torch import Tensor

TRAIN_SIZE = 600


class DigitsSplit(NamedTuple):
    """600 training and 1197 test images with their labels.

    Images are float32 of shape ``(n, 8, 8)``, labels int64 of shape ``(n,)``.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits_split() -> DigitsSplit:
    """Load the digits, shuffled with a fixed seed and standardised.

    One mean and one standard deviation, those of all pixels of the training images, standardise
    both parts. Every call returns fresh tensors with the same values.

    Returns:
        The split.

    Raises:
        ImportError: scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "The digits come with scikit-learn, which is not installed. "
            'Install it with `pip install "quotient-nets[demo]"`.'
        ) from error
    pixels, target = load_digits(return_X_y=True)
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(0))
    images = torch.as_tensor(pixels, dtype=torch.float32).view(-1, 8, 8)[order]
    labels = torch.as_tensor(target, dtype=torch.int64)[order]
    std, mean = torch.std_mean(images[:TRAIN_SIZE])
    images = (images - mean) / std
    return DigitsSplit(
        train_images=images[:TRAIN_SIZE],
        train_labels=labels[:TRAIN_SIZE],
        test_images=images[TRAIN_SIZE:],
        test_labels=labels[TRAIN_SIZE:],
    )
