r"""The exponential of the invariant metric in the span of a factor and its velocity.

From an orthonormal ``g`` with velocity ``v`` the geodesic is :math:`e^{W} e^{V^\top} g` with :math:`V = v g^\top` and
:math:`W = V - V^\top`. In the basis ``[g, v - g a]`` the first column of a function of ``W`` obeys a recurrence of
``r x r`` matrices. ``W`` is skew-symmetric, and :math:`|W|_2 \le \sqrt 2\, |v|` for the Frobenius norm of ``v``, so the
expansion of its exponential in Chebyshev polynomials, whose coefficients are Bessel functions, is the shortest one.

Imports: torch, scipy, :mod:`quotient_nets.linalg`. Knows no manifold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from scipy.special import jv
from torch import Tensor

from quotient_nets.linalg import add_product, matrix_exp, times

LONGEST, SHORTEST = 4.0, 1e-4  # radius of a series: beyond, terms cancel; below, squares of its inverse overflow
MAX_DEGREE = 32  # of the Chebyshev series, enough for every radius up to the longest
INVERSE_FACTORIALS = tuple(1 / math.factorial(k) for k in range(100))  # floats; integers overflow torch's

Pullback = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@torch.compiler.assume_constant_result  # the compiler cannot follow SciPy
def bessel_weights(radius: float, tolerance: float) -> tuple[float, ...]:
    r"""Coefficients :math:`2 J_k(\sqrt 2\,\rho)`, ``k = 1, ..., d``, of the series for steps of norm ``radius``.

    The degree ``d`` is the least for which the first neglected term is below ``tolerance`` relative to the step.
    """
    return _bessel_weights(radius, tolerance)


@lru_cache
def _bessel_weights(radius: float, tolerance: float) -> tuple[float, ...]:
    theta = math.sqrt(2) * radius
    values = 2 * jv(range(MAX_DEGREE + 2), theta)
    degree = max(int(theta), 1)
    # Term k of the sums for m1 and m2 is at most k times its coefficient; the coefficients fall from k = theta on.
    while degree < MAX_DEGREE and (degree + 1) * abs(values[degree + 1]) > tolerance * min(theta, 1.0):
        degree += 1
    return tuple(map(float, values[1 : degree + 1]))


def _series_radius(radius: float | None) -> float | None:
    """The radius for which a series serves, or None where there is no bound or the step is long."""
    return None if radius is None or not radius <= LONGEST else max(float(radius), SHORTEST)


def velocity_exponential(a: Tensor, a_star: Tensor, b: Tensor, radius: float | None = None) -> tuple[Tensor, Tensor]:
    r"""Coefficients of the geodesic of the right-invariant metric that starts at ``g`` with velocity ``v``.

    With :math:`S = g^\top g`, :math:`a = S^{-1} g^\top v`, :math:`a_* = S^{-1} v^\top g`,
    :math:`b = S^{-1} v^\top v`, the end point is

    .. math:: [g, v] \exp\begin{pmatrix} -a_* & -b \\ I & a \end{pmatrix}_{[:, :r]} \exp(a_*)
              = g + v + g\,m_1 + v\,m_2 .

    In the basis ``[g, v - g a]`` the generator is :math:`[[\Omega, -C], [I, 0]]` with :math:`\Omega = a - a_*` and
    :math:`C = b - a_* a`. It is never formed.

    Args:
        a: :math:`S^{-1} g^\top v`, ``(..., r, r)``.
        a_star: :math:`S^{-1} v^\top g`, not the transpose of ``a`` unless ``S = I``.
        b: :math:`S^{-1} v^\top v`.
        radius: Upper bound on the norm of ``v`` in the metric, known to the caller; the series then has the degree that
            this bound needs. A longer ``v`` gets wrong digits. None, or a bound above 4, takes ``torch.matrix_exp``
            in float64.

    Returns:
        ``(m1, m2)``, both of order one in ``v`` or higher, so short steps lose no digits. Differentiable.

    Cost: in float32, 15, 22 and 34 products of ``r x r`` matrices at ``radius`` .1, .5 and 2.
    """
    radius = _series_radius(radius)
    if radius is None:
        return _matrix_exponential(a, a_star, b)
    rotation = _Rotation(a - a_star, b - times(a_star, a), radius)
    return _combine(a, rotation.f1, rotation.f2, _Stretch(a_star, radius).e)


def velocity_exponential_vjp(
    a: Tensor, a_star: Tensor, b: Tensor, radius: float | None = None
) -> tuple[Tensor, Tensor, Pullback]:
    """:func:`velocity_exponential` and the adjoint of its derivative, without autograd where the series is used.

    Returns:
        ``m1``, ``m2`` and the map from derivatives of a function with respect to them to derivatives with respect to
        ``a``, ``a_star`` and ``b``.

    Cost: the adjoint takes twice the products of the function.
    """
    radius = _series_radius(radius)
    if radius is None:
        return _vjp_by_autograd(a, a_star, b)
    rotation, stretch = _Rotation(a - a_star, b - times(a_star, a), radius), _Stretch(a_star, radius)
    m1, m2 = _combine(a, rotation.f1, rotation.f2, stretch.e)

    def pullback(m1_bar: Tensor, m2_bar: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m2_bar = add_product(m2_bar, a.mT, m1_bar, -1.0)
        f1_bar, f2_bar = (add_product(bar, bar, stretch.e.mT) for bar in (m1_bar, m2_bar))
        e_bar = add_product(add_product(m1_bar + m2_bar, rotation.f1.mT, m1_bar), rotation.f2.mT, m2_bar)
        omega_bar, c_bar = rotation.adjoint(f1_bar, f2_bar)
        a_star_bar = add_product(stretch.adjoint(e_bar) - omega_bar, c_bar, a.mT, -1.0)
        a_bar = add_product(add_product(omega_bar - m1_bar, m1_bar, m2.mT, -1.0), a_star.mT, c_bar, -1.0)
        return a_bar, a_star_bar, c_bar

    return m1, m2, pullback


def _combine(a: Tensor, f1: Tensor, f2: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    m2 = add_product(f2 + e, f2, e)
    return add_product(add_product(f1 + e - a, f1, e), a, m2, -1.0), m2


class _Rotation:
    r"""First column ``(I + f1, I + f2)`` of the exponential of ``[[omega, -c], [I, 0]]``.

    With :math:`\theta = \sqrt 2\,\rho`, :math:`\hat\Omega = 2\Omega/\theta` and :math:`\hat C = 4C/\theta^2`, the
    Chebyshev polynomials have first columns :math:`(p_k, (2/\theta)\, q_k)` with

    .. math:: p_{k+1} = \hat\Omega p_k - \hat C q_k + p_{k-1}, \quad q_{k+1} = p_k + q_{k-1}.

    What they are at :math:`\Omega = C = 0`, multiples of ``I`` that cancel in the sums, is split off, so that a step
    much shorter than the radius has a relative error of one rounding unit.
    """

    def __init__(self, omega: Tensor, c: Tensor, radius: float):
        self.unit = 2 / (math.sqrt(2) * radius)
        self.weights = weights = bessel_weights(radius, torch.finfo(omega.dtype).eps / 2)
        self.omega, self.c = omega * self.unit, c * self.unit**2
        zero = torch.zeros_like(omega)
        before_p, p, before_q, q = zero, self.omega / 2, zero, zero
        self.ps, self.qs = [p], [q]
        self.f1, self.f2 = weights[0] * p, torch.zeros_like(omega)
        for k, weight in enumerate(weights[1:], start=1):
            driven = torch.add(before_p, self.c, alpha=-k / 2) if k % 2 else before_p + self.omega
            # Out of place: vmap knows no other batched product.
            ahead = add_product(add_product(driven, self.omega, p), self.c, q, -1.0)
            before_p, p, before_q, q = p, ahead, q, p + before_q
            self.ps.append(p)
            self.qs.append(q)
            self.f1.add_(p, alpha=weight)
            self.f2.add_(q, alpha=self.unit * weight)

    def adjoint(self, f1_bar: Tensor, f2_bar: Tensor) -> tuple[Tensor, Tensor]:
        """Derivatives with respect to ``omega`` and ``c``: the recurrence run backwards."""
        back_omega, back_c = self.omega.mT, -self.c.mT
        p_after = p_bar = q_after = q_bar = torch.zeros_like(f1_bar)
        omega_bar, c_bar = torch.zeros_like(f1_bar), torch.zeros_like(f1_bar)
        for k in range(len(self.weights), 0, -1):
            weight = self.weights[k - 1]
            ahead = torch.add(p_after, q_bar).add_(f1_bar, alpha=weight)
            q_ahead = torch.add(q_after, f2_bar, alpha=self.unit * weight)
            if k < len(self.weights):
                add_product(ahead, back_omega, p_bar, out=ahead)
                add_product(q_ahead, back_c, p_bar, out=q_ahead)
            p_after, p_bar, q_after, q_bar = p_bar, ahead, q_bar, q_ahead
            if k == 1:
                break
            if k % 2:
                omega_bar.add_(p_bar)
            else:
                c_bar.add_(p_bar, alpha=-(k - 1) / 2)
            add_product(omega_bar, p_bar, self.ps[k - 2].mT, out=omega_bar)
            add_product(c_bar, p_bar, self.qs[k - 2].mT, -1.0, out=c_bar)
        return omega_bar.add_(p_bar, alpha=0.5).mul_(self.unit), c_bar.mul_(self.unit**2)


class _Stretch:
    """``e = exp(a) - I`` for ``|a| <= radius``: Taylor's polynomial in the form of Paterson and Stockmeyer."""

    def __init__(self, a: Tensor, radius: float):
        count, sections = _powers_and_sections(radius, torch.finfo(a.dtype).eps / 2)
        self.powers = [a]
        for _ in range(count - 1):
            self.powers.append(times(a, self.powers[-1]))
        self.sums: list[Tensor] = []
        for section in range(sections - 1, -1, -1):
            first = section * count + 1
            total = self.powers[0] * INVERSE_FACTORIALS[first]
            for i, power in enumerate(self.powers[1:], start=first + 1):
                total.add_(power, alpha=INVERSE_FACTORIALS[i])
            self.sums.append(add_product(total, self.powers[-1], self.sums[-1]) if self.sums else total)
        self.e = self.sums[-1]

    def adjoint(self, e_bar: Tensor) -> Tensor:
        """Derivative with respect to ``a``."""
        count = len(self.powers)
        bars = [torch.zeros_like(e_bar) for _ in range(count)]
        for section in range(len(self.sums)):
            for i in range(count):
                bars[i].add_(e_bar, alpha=INVERSE_FACTORIALS[section * count + 1 + i])
            if section < len(self.sums) - 1:
                add_product(bars[-1], e_bar, self.sums[-2 - section].mT, out=bars[-1])
                e_bar = times(self.powers[-1].mT, e_bar)
        total = torch.zeros_like(e_bar)
        for i in range(count - 1, 0, -1):
            add_product(total, bars[i], self.powers[i - 1].mT, out=total)
            add_product(bars[i - 1], self.powers[0].mT, bars[i], out=bars[i - 1])
        return total + bars[0]


def _powers_and_sections(radius: float, tolerance: float) -> tuple[int, int]:
    """Sizes ``(s, t)`` of a Taylor polynomial of degree ``s t`` whose error is below ``tolerance`` times ``radius``."""
    term, degree = radius, 1
    while term > tolerance * radius:
        degree += 1
        term *= radius / degree
    degree = max(degree - 1, 1)
    powers = max(round(math.sqrt(degree)), 1)
    return powers, -(-degree // powers)


def _matrix_exponential(a: Tensor, a_star: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    dtype, r = a.dtype, a.shape[-1]
    a, a_star, b = a.double(), a_star.double(), b.double()
    eye = torch.eye(r, dtype=a.dtype, device=a.device)
    top = torch.cat([a - a_star, times(a_star, a) - b], dim=-1)
    bottom = torch.cat([eye.expand_as(a), torch.zeros_like(a)], dim=-1)
    f1, f2 = matrix_exp(torch.cat([top, bottom], dim=-2)).narrow(-1, 0, r).split(r, dim=-2)
    e = matrix_exp(a_star)
    m2 = f2 @ e
    m1 = f1 @ e - times(a, m2)
    return (m1 - eye).to(dtype), (m2 - eye).to(dtype)


def _vjp_by_autograd(a: Tensor, a_star: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Pullback]:
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_() for t in (a, a_star, b)]
        outputs = _matrix_exponential(*inputs)

    def pullback(m1_bar: Tensor, m2_bar: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a_bar, a_star_bar, b_bar = torch.autograd.grad(outputs, inputs, (m1_bar, m2_bar), retain_graph=True)
        return a_bar, a_star_bar, b_bar

    return outputs[0].detach(), outputs[1].detach(), pullback
