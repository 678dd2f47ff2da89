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
# # Between two matrices
#
# Two matrices of rank 2, and the shortest way from one to the other along matrices of rank 2. What "short" means is a
# choice of metric, and the way depends on it. This tutorial walks along it in two metrics, halves it, and ends where
# there is no shortest way.
#
# You need PyTorch and the singular value decomposition.

# %%
import matplotlib.pyplot as plt
import torch

from quotient_nets import EmbeddedFixedRank, InvariantFixedRank, PreconditionedFixedRank

torch.manual_seed(0)
g, h = (torch.linalg.qr(torch.randn(rows, 2, dtype=torch.float64))[0] for rows in (6, 5))
first = g @ torch.diag(torch.tensor([4.0, 1.0], dtype=torch.float64)) @ h.mT
turned = torch.linalg.qr(g + 0.1 * torch.randn(6, 2, dtype=torch.float64))[0]
second = turned @ torch.diag(torch.tensor([4.0, 0.3], dtype=torch.float64)) @ h.mT  # a smaller second singular value

# %% [markdown]
# A point of these manifolds is a pair of factors of the matrix. `best_rank_r` makes one; any other pair with the same
# product is the same point, and no result depends on which pair one holds.

# %%
manifolds = {"invariant": InvariantFixedRank(6, 5), "embedded": EmbeddedFixedRank(6, 5)}
for name, manifold in manifolds.items():
    x, y = manifold.best_rank_r(first, 2), manifold.best_rank_r(second, 2)
    other = manifold.action(y, manifold.random_element(2, condition=100.0))
    print(f"{name:9}  distance {manifold.dist(x, y).item():.6f}, to another pair {manifold.dist(x, other).item():.6f}")

# %% [markdown]
# `logmap` returns the velocity with which the geodesic leaves, `expmap` follows it. The invariant metric counts changes
# relative to the singular values, so halfway the second of them is near the geometric mean of 1 and 0.3. In the
# embedded metric, the Frobenius distance along the way, it is near the arithmetic one.

# %%
times = torch.linspace(0, 1, 21, dtype=torch.float64)
figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True)
for axis, (name, manifold) in zip(axes, manifolds.items(), strict=True):
    x, y = manifold.best_rank_r(first, 2), manifold.best_rank_r(second, 2)
    u = manifold.logmap(x, y)
    way = manifold.expmap(x, times[:, None, None] * u)
    axis.semilogy(times, manifold.frame(way).spectrum)
    axis.set(title=name, xlabel="time")
    halfway = manifold.expmap(x, u / 2)
    print(f"{name:9}  halves {manifold.dist(x, halfway).item():.6f} and {manifold.dist(halfway, y).item():.6f}")
axes[0].set_ylabel("singular values")
figure.tight_layout()

# %% [markdown]
# The logarithm above rank one comes from a solver. `logmap_report` says what certifies it.

# %%
manifold = manifolds["invariant"]
report = manifold.logmap_report(manifold.best_rank_r(first, 2), manifold.best_rank_r(second, 2))
print(f"converged {bool(report.converged)}, length {report.length.item():.6f}, off by {report.residual.item():.0e}")

# %% [markdown]
# Not every pair is joined by a shortest way. In the preconditioned metric, a matrix of rank one and its negative are
# joined through zero only, and zero has another rank. The distance is still an infimum; the logarithm refuses.

# %%
preconditioned = PreconditionedFixedRank(6, 5)
x = preconditioned.best_rank_r(first, 1)
left, right = preconditioned.unpack_tensor(x)
opposite = preconditioned.pack_point(left, -right)
print(f"distance {preconditioned.dist(x, opposite).item():.6f}")
try:
    preconditioned.logmap(x, opposite)
except ValueError as error:
    print(error)

# %% [markdown]
# Which metric to take for what is in [the concept page](../concepts/which-metric).
