# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A first sharpness
#
# The *sharpness* of a trained network is the rise of its loss when the weights are moved a little, in the worst
# direction. The same network can be written down with many different weights, and a sharpness that depends on which
# of them one happens to hold says something about the notation. This tutorial measures a small vision transformer in
# two ways: one measure depends on the notation, the other does not. It ends with the limits of the second.
#
# You need PyTorch and some linear algebra. No GPU and no download: the network and its data come with the package.

# %%
import copy

import geoopt
import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy

from quotient_nets import AdaptiveEuclidean, InvariantFixedRank, model_sharpness, parameter_manifold
from quotient_nets.architectures.norm_gains import norm_gains, rescale_norm_gains
from quotient_nets.demo import load_digits_split, load_digits_vit

torch.set_num_threads(1)

# %% [markdown]
# ## A network and its data
#
# Three pre-norm transformer layers of width 64 with four attention heads of width 16, trained on 600 of
# scikit-learn's handwritten digits. Sharpness is measured on training images, in batches. The size of a batch is part
# of the definition: the worst direction is searched for each batch on its own, and the results are averaged.

# %%
model = load_digits_vit()
split = load_digits_split()
batches = [(split.train_images[i : i + 64], split.train_labels[i : i + 64]) for i in (0, 64)]


def loss(network, batch):
    images, labels = batch
    return cross_entropy(network(images), labels)


with torch.no_grad():
    accuracy = (model(split.test_images).argmax(-1) == split.test_labels).float().mean()
print(f"{sum(p.numel() for p in model.parameters()):,} parameters, test accuracy {accuracy:.3f}")
print("loss on the two batches:", [round(loss(model, batch).item(), 5) for batch in batches])

# %% [markdown]
# ## One function, two sets of weights
#
# An attention head compares tokens by the scores $(x W_Q + b_Q)(y W_K + b_K)^\top$. Put the bias under the weight as
# one more row, $G = [W_Q; b_Q]$ and $H = [W_K; b_K]$: the scores see only the product $G H^\top$. Any invertible
# matrix $a$ gives the same product from $(G a^{-1}, H a^\top)$. We do this to one head of the first layer, with a
# matrix of condition number 1000. PyTorch stores queries, keys and values in one matrix, by rows: query row 32 is
# where head 2 starts, and its keys are 64 rows further down.

# %%
attention = model.layers[0].self_attn
queries, keys = slice(32, 48), slice(64 + 32, 64 + 48)


def factor(attention, rows):
    weight, bias = attention.in_proj_weight[rows], attention.in_proj_bias[rows]
    return torch.cat([weight.mT, bias[None]]).detach()


manifold = InvariantFixedRank(65, 65)  # 64 inputs and a bias, for queries and for keys
x = manifold.pack_point(factor(attention, queries), factor(attention, keys)).double()
generator = torch.Generator().manual_seed(0)
a = manifold.random_element(16, condition=1e3, generator=generator)
y = manifold.action(x, a)
print("a point:", tuple(x.shape))
print(f"change of the weights: {(y - x).norm() / x.norm():.2f} of their norm")
print(f"change of G H^T:       {(manifold.product(y) - manifold.product(x)).norm() / manifold.product(x).norm():.1e}")

# %% [markdown]
# The rewritten head goes into a copy of the network. The logits stay where they were, up to rounding in float32.

# %%
rewritten = copy.deepcopy(model)
with torch.no_grad():
    for rows, part in zip((queries, keys), manifold.unpack_tensor(y), strict=True):
        rewritten.layers[0].self_attn.in_proj_weight[rows] = part[:-1].mT.float()
        rewritten.layers[0].self_attn.in_proj_bias[rows] = part[-1].float()
    before, after = model(split.test_images), rewritten(split.test_images)
print(f"largest logit {before.abs().max():.1f}, largest change {(after - before).abs().max():.1e}")

# %% [markdown]
# ## Adaptive sharpness moves
#
# *Adaptive* sharpness measures every weight relative to its own size: the ball is $\sum_i (u_i / w_i)^2 \le \rho^2$.
# It does not change when single weights are rescaled. The matrix $a$, however, mixes weights. `parameter_manifold`
# says how steps are measured; with `attention=AdaptiveEuclidean` it treats all weights alike and divides nothing out.

# %%
adaptive = parameter_manifold(model, attention=AdaptiveEuclidean)
for name, network in {"original": model, "one head rewritten": rewritten}.items():
    result = model_sharpness(network, loss, batches, rho=0.1, space=adaptive)
    print(f"{name:20s} {result.value:.6f} ± {result.standard_error:.6f}")

# %% [markdown]
# The function is the same and one head of twelve was rewritten. Which of the two numbers belongs to the network?

# %% [markdown]
# ## The quotient, in one head
#
# All pairs $(G a^{-1}, H a^\top)$ form the *orbit* of $(G, H)$. Call the whole orbit one point, and nothing that is
# measured can depend on the choice within it. Such a space is a *quotient*; here it is the manifold of $65 \times 65$
# matrices of rank 16. The pair we hold is a *representative*.
#
# A step $u = (u_G, u_H)$ has a part along the orbit, which changes the notation and not the function: for every
# $\xi$, $(-G\xi, H\xi^\top)$ is such a *vertical* vector. What is orthogonal to all of them is *horizontal*.
# Orthogonal in a metric that does not depend on the representative either:
#
# $$
# \langle u, v\rangle = \operatorname{tr}\bigl((G^\top G)^{-1} u_G^\top v_G\bigr) + \operatorname{tr}\bigl((H^\top
# H)^{-1} u_H^\top v_H\bigr).
# $$

# %%
u = torch.randn(x.shape, generator=generator, dtype=x.dtype)
v = torch.randn(x.shape, generator=generator, dtype=x.dtype)


def moved(vector):
    """What the action does to a vector: it is linear in the pair, so the same formula."""
    return manifold.action(vector, a)


print(f"<u, v> at x:             {manifold.inner(x, u, v):.12f}")
print(f"<u, v> moved along to y: {manifold.inner(y, moved(u), moved(v)):.12f}")
print(f"plain dot products:      {(u * v).sum():.3f} and {(moved(u) * moved(v)).sum():.3f}")

# %% [markdown]
# `proju` keeps the horizontal part. A vertical vector has none, and projecting commutes with the group.

# %%
vertical = manifold.infinitesimal_action(x, torch.randn(16, 16, generator=generator, dtype=x.dtype))
horizontal = manifold.proju(x, u)
print(f"horizontal part of a vertical vector: {manifold.norm(x, manifold.proju(x, vertical)):.1e}")
print(f"<horizontal, vertical>:               {manifold.inner(x, horizontal, vertical):.1e}")
print(f"norm of u {manifold.norm(x, u):.3f}, of its horizontal part {manifold.norm(x, horizontal):.3f}")
print(f"projected then moved, moved then projected: {(moved(horizontal) - manifold.proju(y, moved(u))).norm():.1e}")

# %% [markdown]
# ## Geodesic sharpness does not move
#
# The parameter manifold of a network collects the query/key and the value/output pairs of all heads as points of such
# quotients, and gives all other weights the adaptive metric. *Geodesic* sharpness is the worst rise of the loss over
# horizontal steps of length $\rho$, along geodesics, the straightest paths of the quotient. Before it measures,
# `model_sharpness` proves on your data that the symmetries are exact.

# %%
space = parameter_manifold(model)
print(space)
for name, network in {"original": model, "one head rewritten": rewritten}.items():
    result = model_sharpness(network, loss, batches, rho=0.1, space=space)
    print(f"{name:20s} {result.value:.6f} ± {result.standard_error:.6f}")

# %% [markdown]
# Now all 24 pairs at once, by random matrices whose condition number grows. `random_action` moves a point of the
# parameter manifold along its orbit, and also shifts key and value biases where that is exact.


# %%
def relative_change(point):
    """Largest change of a logit, over the largest logit."""
    with torch.no_grad():
        return ((space.call(model, point, split.test_images) - before).abs().max() / before.abs().max()).item()


origin = space.pack(model)
measures = {"adaptive": adaptive, "geodesic": space}
points = {"original": origin}
for condition in (1.0, 10.0, 100.0, 1e4):
    points[f"condition {condition:g}"] = space.random_action(origin, condition=condition)
table = {}
for name, point in points.items():
    row = {
        measure: model_sharpness(model, loss, batches, rho=0.1, space=s, x=point, check=False).value
        for measure, s in measures.items()
    }
    table[name] = row
    print(f"{name:16s}", *(f"{m} {value:.5g}  " for m, value in row.items()), f"logits {relative_change(point):.0e}")

# %% [markdown]
# ## A certificate with every number
#
# A sharpness comes from a search, and a search finds a lower bound of the maximum. What to look at:
#
# - `converged`: the last quarter of the steps added less than 1 %. If not, take more `steps`.
# - `first_order_share`: $\rho$ times the norm of the gradient, over the sharpness. Near 1, the ball is so small that
#   the sharpness *is* a gradient norm; near 0, curvature decides. Two networks can be in opposite orders in the two
#   regimes.
# - `horizontality_residual`: how much of the worst direction is notation after all; rounding, if all is well.
# - `relative_norm`: length of the worst direction over $\rho$; below 1 the maximum lies inside the ball.
# - `condition_number`: of $G H^\top$, the worst of all heads. Near $10^7$, float32 would have no digits left.
#
# A sequence of radii is measured on the same batches.

# %%
radii = (0.01, 0.03, 0.1, 0.3, 1.0)
exact = model_sharpness(model, loss, batches, rho=radii, space=space)
for result in exact:
    print(
        f"rho {result.rho:<5g} sharpness {result.value:<10.4g} first-order share {result.first_order_share:.3f}  "
        f"converged {result.converged}"
    )
for name, figure in exact[2].certificates.items():
    print(f"  {name:24s} {figure:.3g}")

# %% [markdown]
# At $\rho = 0.1$ the search was still gaining when its 20 steps were over. The number is a lower bound, and one can
# see how much it lacks. It has been the same for all representatives nevertheless: the search itself takes the same
# steps wherever on the orbit it starts.

# %%
longer = model_sharpness(model, loss, batches, rho=0.1, steps=60, space=space, check=False)
print(f"20 steps: {exact[2].value:.5g}, 60 steps: {longer.value:.5g}, converged {longer.converged}")

# %% [markdown]
# ## Two paths
#
# The paper that introduced geodesic sharpness follows the second-order Taylor polynomial of the geodesic. For this
# metric the geodesic itself has a closed form, and costs about as much; it is the default, `path="exact"`. Both paths
# are defined on the quotient. They part at third order: ten times the length, about a thousand times the difference.

# %%
step = horizontal / manifold.norm(x, horizontal)
for length in (0.01, 0.1, 1.0):
    ends = [manifold.product(path(x, length * step)) for path in (manifold.expmap, manifold.second_order)]
    print(f"length {length:<5g} relative difference of G H^T {(ends[0] - ends[1]).norm() / ends[0].norm():.1e}")
taylor = model_sharpness(model, loss, batches, rho=(0.1, 1.0), space=space, path="second_order", check=False)
for result, other in zip(taylor, (exact[2], exact[4]), strict=True):
    print(f"rho {result.rho:<5g} exact {other.value:.6g}, second order {result.value:.6g}")

# %% [markdown]
# ## What is not divided out
#
# The heads' groups are not the only symmetries. In a pre-norm layer a LayerNorm multiplies each channel by a *gain*,
# and only linear layers read the result: multiply gain and bias of the norm by $c$ and divide the readers' columns by
# $c$, and the function is the same. Geodesic sharpness treats gains like any other weight and does *not* divide this
# symmetry out. Here the roles change: single weights are rescaled, which the adaptive measure does not notice.

# %%
rescaled = rescale_norm_gains(space.unpack(origin), norm_gains(model), condition=10.0)
point = space.pack(rescaled)
for measure, s in measures.items():
    value = model_sharpness(model, loss, batches, rho=0.1, space=s, x=point, check=False).value
    table.setdefault("norm gains", {})[measure] = value
    print(f"{measure}: {table['original'][measure]:.5g} -> {value:.5g}")
print(f"logits {relative_change(point):.0e}")

# %% [markdown]
# A sharpness is a property of a function only with respect to the symmetries that have been divided out. Say which.
#
# ## One picture

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")
places = [name for name in table if name != "original"]
for measure, marker, colour, shift in (("adaptive", "o", "#c44e52", -0.1), ("geodesic", "D", "#1f5aa6", 0.1)):
    ratios = [table[name][measure] / table["original"][measure] for name in places]
    left.plot([i + shift for i in range(len(places))], ratios, marker, color=colour, label=measure)
left.axhline(1.0, color="0.6", linewidth=0.8, zorder=0)
left.axvline(len(places) - 1.5, color="0.8", linewidth=0.8, linestyle=":")
left.set_yscale("log")
left.set_xticks(range(len(places)), [name.replace(" ", "\n") for name in places])
left.set_xlim(-0.5, len(places) - 0.5)
left.set_ylabel("sharpness, ratio to the original")
left.set_title("one function, rewritten", fontsize=10)
left.legend(frameon=False, loc="upper left")
right.plot(radii, [result.value for result in exact], "D-", color="#1f5aa6", label="geodesic sharpness")
first_order = [sum(b.first_order_share * b.value for b in result.batches) / len(batches) for result in exact]
right.plot(radii, first_order, "--", color="0.5", label="ρ times the gradient norm")
right.set_xscale("log")
right.set_yscale("log")
right.set_xlabel("radius ρ")
right.set_title("where curvature takes over", fontsize=10)
right.legend(frameon=False, loc="upper left")
for axes in (left, right):
    axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## The same manifold in an optimizer
#
# A manifold of this package is a `geoopt.Manifold`, so that geoopt's optimizers run on it. Completing a low-rank
# matrix from half of its entries: the parameter is a pair of factors, the loss sees its product only, and every step
# is the same whichever representative one starts from.

# %%
torch.manual_seed(0)
n, m, r = 40, 30, 3
target = torch.randn(n, r) @ torch.randn(r, m)
seen = torch.rand(n, m) < 0.5
fixed_rank = InvariantFixedRank(n, m)
factors = geoopt.ManifoldParameter(fixed_rank.random(n + m, r), manifold=fixed_rank)
optimizer = geoopt.optim.RiemannianAdam([factors], lr=0.1)
for _ in range(1000):
    optimizer.zero_grad()
    (fixed_rank.product(factors) - target)[seen].square().mean().backward()
    optimizer.step()
error = (fixed_rank.product(factors) - target)[~seen].abs().max()
print(f"{int(seen.sum())} of {n * m} entries seen, largest error on the others {error:.1e}")

# %% [markdown]
# ## Exercises
#
# 1. Rewrite the value/output pair of a head: $G$ holds the value rows of `in_proj_weight`, transposed, with their
#    bias as one more row, and $H$ the head's columns of `out_proj.weight`. Check that the logits stay. Then apply `a`
#    to the values alone, and see that they do not.
# 2. Load the rescaled norm gains into a copy of the network and measure it with `parameter_manifold(network,
#    scope="attention")`, which holds all weights outside attention fixed, the gains among them. Geodesic sharpness
#    still moves. Which rows of $G$ and $H$ have been rescaled, and why does the metric notice?
# 3. With `translations=False`, key and value biases are measured where they are, as in the paper; by default, exact
#    shifts first set them to zero. Measure the points of the table in this way. Then draw new points with
#    `random_action(origin, translations=False)`, and explain the difference.
