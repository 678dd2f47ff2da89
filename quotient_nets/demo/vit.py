r"""A small vision transformer for the 8 x 8 handwritten digits of scikit-learn.

The smallest real transformer with every symmetry this package studies: pre-LN blocks of
:class:`torch.nn.TransformerEncoderLayer`, whose four heads each carry a query/key and a
value/output pair of factors up to :math:`\mathrm{GL}(16)`. About 100,000 parameters: one forward
and one backward pass on 256 images take some 60 ms on one core, so examples, tests and tutorials
run on it.

Imports: torch. Knows nothing of manifolds.
"""

import torch
from torch import Tensor, nn
from typing_extensions import override

IMAGE_SIDE = 8
PATCH_SIDE = 2
GRID_SIDE = IMAGE_SIDE // PATCH_SIDE
CLASSES = 10


class DigitsViT(nn.Module):
    """Pre-LN vision transformer: 2 x 2 patches, width 64, four heads of width 16, three layers.

    The image is cut into 16 patches of four pixels; each becomes a token, a class token is put in
    front and learned positions are added. After the last layer the class token, normalised, is read
    by a linear head. There is no dropout: training and evaluation mode compute the same function.

    The weights are drawn from the global random state, as in every :class:`torch.nn.Module`;
    :func:`quotient_nets.demo.load_digits_vit` returns the trained ones.

    Attributes:
        patch_embedding: Pixels of a patch to a token, ``4 -> 64``.
        class_token: Shape ``(64,)``.
        positions: One vector for the class token and one for each patch, shape ``(17, 64)``.
        layers: The three :class:`torch.nn.TransformerEncoderLayer`.
        norm: The last LayerNorm.
        head: Class token to logits, ``64 -> 10``.
    """

    def __init__(self) -> None:
        super().__init__()
        width = 64
        self.patch_embedding = nn.Linear(PATCH_SIDE**2, width)
        self.class_token = nn.Parameter(0.02 * torch.randn(width))
        self.positions = nn.Parameter(0.02 * torch.randn(1 + GRID_SIDE**2, width))
        # Not `nn.TransformerEncoder`, which copies one layer: all would start alike.
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                d_model=width,
                nhead=4,
                dim_feedforward=128,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(3)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Classify a batch of images.

        Args:
            images: Standardised as by :func:`quotient_nets.demo.load_digits_split`, shape
                ``(batch, 8, 8)`` or ``(batch, 1, 8, 8)``, in the dtype of the weights.

        Returns:
            Logits, shape ``(batch, 10)``.

        Raises:
            ValueError: The images have another shape.
        """
        tokens = self.patch_embedding(_patches(images))
        first = self.class_token.expand(tokens.shape[0], 1, -1)
        tokens = torch.cat((first, tokens), dim=1) + self.positions
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head(self.norm(tokens[:, 0]))


def _patches(images: Tensor) -> Tensor:
    """Cut images into patches in reading order: ``(batch, [1,] 8, 8)`` to ``(batch, 16, 4)``.

    Raises:
        ValueError: The images have another shape.
    """
    shape = tuple(images.shape)
    side = (IMAGE_SIDE, IMAGE_SIDE)
    if shape[1:] not in (side, (1, *side)):
        raise ValueError(
            f"`images` must have shape (batch, 8, 8) or (batch, 1, 8, 8); got {shape}. "
            "Give one image as `image[None]` and flat pixels as `pixels.view(-1, 8, 8)`."
        )
    grid = images.reshape(shape[0], GRID_SIDE, PATCH_SIDE, GRID_SIDE, PATCH_SIDE)
    return grid.transpose(2, 3).reshape(shape[0], GRID_SIDE**2, PATCH_SIDE**2)
