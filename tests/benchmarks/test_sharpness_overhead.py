"""What geometry adds to a step of the ascent: one encoder layer of ViT-B/32, batch 256.

A step is one forward and one backward pass and the work on the parameters. The passes are timed at a smaller batch, to
which they are proportional; the work on the parameters is all that `ascent_step` does, with a loss that costs nothing.
The adaptive metric pays most of it too: the difference is what the quotient costs. Never asserts a time.
"""

from collections.abc import Callable
from functools import partial

import geoopt
import pytest
import torch
from torch import Tensor, nn

from quotient_nets import AdaptiveEuclidean, InvariantFixedRank, parameter_manifold
from quotient_nets.sharpness.ascent import Workspace, ascent_step, start
from quotient_nets.tangent_space import TangentSpace
from tests.benchmarks.timing import side_by_side, table

BATCH, TIMED_BATCH, TOKENS = 256, 8, 50
RADIUS = 0.3


def layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)


def one_step(model: nn.Module, attention: type[geoopt.Manifold], path: str) -> Callable[[], object]:
    """One step of the ascent on all parameters of the model without the model."""
    space = parameter_manifold(model, attention=attention)
    x = space.canonicalize(space.pack(model))
    tangent: TangentSpace = space.section().at(x, balanced=True)
    slope = torch.randn_like(x)
    higher = iter(range(10**9))

    def evaluate(y: Tensor, differentiate: bool) -> tuple[Tensor, Tensor | None]:
        return torch.tensor(float(next(higher))), slope if differentiate else None

    gradient = tangent.gradient(tangent.pull_gradient(slope))
    c, before = (0.9 * RADIUS * tangent.random(torch.Generator().manual_seed(seed)) for seed in (0, 1))
    state = start(tangent, torch.zeros(1), gradient, c, RADIUS)
    state = type(state)(**(vars(state) | {"previous": before}))
    return partial(ascent_step, tangent, evaluate, state, path=path, rho=RADIUS, workspace=Workspace(reuse_points=True))


@pytest.mark.parametrize("layers", [1])
def test_share_of_geometry_in_a_step(report: Callable[[str], None], layers: int) -> None:
    model = nn.Sequential(*(layer() for _ in range(layers)))
    inputs = torch.randn(TIMED_BATCH, TOKENS, 768)
    parameters = list(model.parameters())

    def passes() -> None:
        torch.autograd.grad(model(inputs).square().mean(), parameters)

    steps = {
        "exact": one_step(model, InvariantFixedRank, "exact"),
        "second_order": one_step(model, InvariantFixedRank, "second_order"),
        "adaptive": one_step(model, AdaptiveEuclidean, "exact"),
    }
    times = side_by_side({"passes": passes, **steps}, repeats=7)
    whole = times["passes"] * BATCH / TIMED_BATCH
    rows = {
        name: {
            "s": times[name],
            "share of passes %": 100 * times[name] / whole,
            "beyond adaptive %": 100 * (times[name] - times["adaptive"]) / whole,
            "goal %": "<= 3",
        }
        for name in steps
    }
    rows["passes, batch 256"] = {"s": whole}
    count = sum(p.numel() for p in parameters)
    report(table(f"(b) {layers} layer(s) of ViT-B/32, {count / 1e6:.1f} M parameters, rho {RADIUS}", rows))
