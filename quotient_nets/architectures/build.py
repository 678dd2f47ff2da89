"""From a model to its parameter manifold."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import geoopt
import torch
from torch import Tensor, nn

from quotient_nets.architectures.registry import attention_modules, unknown_attention
from quotient_nets.manifolds import AdaptiveEuclidean, FixedRank, InvariantFixedRank
from quotient_nets.parameters import Block, Component, Entry, Heads, Pair, ParameterManifold, View


def parameter_manifold(
    model: nn.Module,
    *,
    attention: type[geoopt.Manifold] = InvariantFixedRank,
    rest: type[geoopt.Manifold] = AdaptiveEuclidean,
    scope: Literal["all", "attention"] = "all",
    block_weights: Mapping[str, float] | None = None,
    frozen: bool = False,
    degenerate: Literal["raise", "rest"] = "raise",
    strict: bool = False,
) -> ParameterManifold:
    """Parameter manifold of a model: the symmetries of its attention layers, and a metric on everything else.

    Args:
        model: Any module; it is only read.
        attention: Manifold class for the heads: a fixed-rank quotient, or an elementwise metric such as
            ``AdaptiveEuclidean`` to divide nothing out.
        rest: Manifold class for all other parameters: ``AdaptiveEuclidean`` or ``geoopt.Euclidean``.
        scope: ``"attention"`` leaves all parameters outside attention modules fixed.
        block_weights: Factors in the squared norm: ``"query_key"``, ``"value_output"``, ``"rest"``; 1 by default.
        frozen: Treat parameters with ``requires_grad=False`` like the others. They stay fixed otherwise.
        degenerate: What to do with heads of deficient rank, on which the quotient has no point: raise, or move exactly
            these heads to the rest.
        strict: Raise for attention classes that have no declaration; a warning names them otherwise.

    Returns:
        The manifold; ``notes`` says what was left out of the blocks and why.

    Raises:
        ValueError: The model has no trainable parameters, parameters on the meta device, or one module under two names;
            a head is rank deficient; an attention class is unknown and ``strict`` is set.
    """
    if scope not in ("all", "attention") or degenerate not in ("raise", "rest"):
        raise ValueError(
            f"expected scope 'all' or 'attention' and degenerate 'raise' or 'rest', got {scope!r}, {degenerate!r}"
        )
    _check_classes(attention, rest)
    _refuse_shared_modules(model)
    unknown = unknown_attention(model)
    if unknown:
        message = (
            f"attention classes without a declaration: {', '.join(unknown)}. Their symmetries are not divided out; "
            f"their parameters go to the rest. Known classes and their subclasses: see `quotient_nets.architectures`."
        )
        if strict:
            raise ValueError(message)
        warnings.warn(message, stacklevel=2)
    pairs, wrapped, inside, outside = _pairs(model)
    parameters = _parameters(model, frozen, inside if scope == "attention" else None)
    notes = [f"{name}: no declaration" for name in unknown]
    notes += [
        f"{pair.module} ({pair.kind}): a projection is parametrized, wrapped or has extra parameters"
        for pair in wrapped
    ]
    loose: list[Heads] = []
    components: dict[tuple[str, int, int, int], list[Heads]] = {}
    uses = Counter(view for pair in pairs for view in pair.views)
    for pair in pairs:
        if pair.translation is not None and pair.translation.output_bias not in (None, *parameters):
            pair = replace(pair, translation=None)  # nothing that varies can compensate
        reason = _obstacle(pair, parameters, uses, outside)
        if reason is not None:
            notes.append(f"{pair.module} ({pair.kind}): {reason}")
            loose.append(Heads(pair, 0, pair.heads))
            continue
        g, h = pair.factors(parameters)
        key = (pair.kind, g.shape[-2], h.shape[-2], pair.rank)
        bad = _degenerate_heads(pair, g, h) if issubclass(attention, FixedRank) else []
        if bad and degenerate == "raise":
            raise ValueError(
                f"expected heads of full rank {pair.rank}; rank deficient: {pair.module} ({pair.kind}), heads {bad}. "
                "Pass `degenerate='rest'` to leave exactly these heads out of the quotient."
            )
        if bad:
            notes.append(f"{pair.module} ({pair.kind}): rank-deficient heads {bad} are part of the rest")
        for first, count, deficient in _runs(pair.heads, bad):
            run = Heads(pair, first, count)
            if deficient:
                loose.append(run)
            else:
                components.setdefault(key, []).append(run)
    if not components:
        notes.append("no attention head was found: all parameters have the metric of the rest")
    weights = _weights(block_weights, {kind for kind, *_ in components})
    blocks = [
        Block(kind, _manifold(attention, n, m), Component(tuple(runs), n, m, rank), weights.get(kind, 1.0))
        for (kind, n, m, rank), runs in components.items()
    ]
    return ParameterManifold(
        _entries(parameters), blocks, _manifold(rest), _within(loose, parameters), notes, weights.get("rest", 1.0)
    )


def _weights(block_weights: Mapping[str, float] | None, kinds: set[str]) -> dict[str, float]:
    """Weights by kind of block.

    Raises:
        ValueError: A key names no block of the model, or a weight is not positive and finite.
    """
    weights = dict(block_weights or {})
    for kind, weight in weights.items():
        if kind not in kinds | {"rest"}:
            raise ValueError(
                f"expected keys of `block_weights` among {', '.join(sorted(kinds))} and rest, got {kind!r}"
            )
        if not (isinstance(weight, (int, float)) and 0 < weight < math.inf):
            raise ValueError(f"expected a positive finite weight for {kind}, got {weight!r}")
    return weights


def _manifold(manifold: type[geoopt.Manifold], *sizes: int) -> geoopt.Manifold:
    if sizes and issubclass(manifold, FixedRank):
        return manifold(*sizes)
    return manifold(2 if sizes else 1)  # pyright: ignore[reportCallIssue]


def _check_classes(attention: Any, rest: Any) -> None:
    elementwise = (AdaptiveEuclidean, geoopt.Euclidean)
    for name, manifold, known in (("attention", attention, (FixedRank, *elementwise)), ("rest", rest, elementwise)):
        if not (isinstance(manifold, type) and issubclass(manifold, known)):
            raise ValueError(
                f"expected `{name}` to be one of the classes {', '.join(c.__name__ for c in known)} or a subclass, got "
                f"{manifold!r}. Pass the class, not an instance."
            )


def _refuse_shared_modules(model: nn.Module) -> None:
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        first = names.setdefault(module, name)
        if first != name and any(True for _ in module.parameters()):
            raise ValueError(
                f"expected every module under one name; `{first}` and `{name}` are the same module. "
                "torch.func.functional_call leaves swapped tensors behind in such models (pytorch#164759): call the "
                "module twice in `forward` in place of registering it twice, or tie its parameters."
            )


def _pairs(model: nn.Module) -> tuple[list[Pair], list[Pair], set[str], set[str]]:
    """Pairs of all known attention modules, layers tied as a whole once, with the names of ``named_parameters()``.

    Returns:
        The pairs; those whose weights are no plain parameters; the names of all parameters inside attention modules;
        and those of parameters that are tied to something that belongs to no pair.
    """
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    pairs, wrapped, inside, used = [], [], set(), set()
    for prefix, module, declaration in attention_modules(model):
        for pair in declaration(prefix, module):
            if _plain(model, module, pair, names):
                pairs.append(pair.renamed(names))
                used |= {view.parameter for view in pair.views}
            else:
                wrapped.append(pair)
        inside |= {first[id(parameter)] for parameter in module.parameters()}
    outside = {names[name] for name in used if any(names[alias] == names[name] for alias in names.keys() - used)}
    return list({pair.views: pair for pair in reversed(pairs)}.values())[::-1], wrapped, inside, outside


def _plain(model: nn.Module, attention: nn.Module, pair: Pair, names: Mapping[str, str]) -> bool:
    """Whether the pair's weights are parameters by these names, and all there is to their projections."""
    for view in pair.views:
        owner = model.get_submodule(view.parameter.rpartition(".")[0])
        own = {name for name, _ in owner.named_parameters()}
        if view.parameter not in names or (owner is not attention and own - {"weight", "bias"}):
            return False
    return True


def _parameters(model: nn.Module, frozen: bool, only: set[str] | None) -> dict[str, Tensor]:
    parameters = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and (frozen or parameter.requires_grad) and (only is None or name in only)
    }
    if not parameters:
        raise ValueError(
            "expected a model with trainable floating-point parameters, got none. Pass `frozen=True` to include frozen "
            "ones, and check `scope`."
        )
    meta = [name for name, parameter in parameters.items() if parameter.device.type == "meta"]
    if meta:
        raise ValueError(f"expected loaded parameters; {meta[0]} is on the meta device. Load the weights first.")
    return parameters


def _obstacle(pair: Pair, parameters: Mapping[str, Tensor], uses: Mapping[View, int], outside: set[str]) -> str | None:
    """Why a pair cannot be a block."""
    missing = sorted({view.parameter for view in pair.views if view.parameter not in parameters})
    if missing:
        return f"{', '.join(missing)} does not vary"
    if any(uses[view] > 1 or view.parameter in outside for view in pair.views):
        return "weights tied inside the pair, in part to another pair, or to something outside attention"
    rows = [factor.shape[-2] for factor in pair.factors(parameters)]
    if pair.rank > min(rows):
        return f"rank {pair.rank} exceeds the {min(rows)} rows of a factor"
    return None


def _degenerate_heads(pair: Pair, g: Tensor, h: Tensor) -> list[int]:
    manifold = InvariantFixedRank(g.shape[-2], h.shape[-2])
    x = torch.cat([g, h], dim=-2)
    return manifold.deficient(x).nonzero().flatten().tolist()


def _runs(heads: int, bad: list[int]) -> list[tuple[int, int, bool]]:
    """Maximal runs of heads that are all good or all bad: first, count, bad."""
    runs: list[tuple[int, int, bool]] = []
    for head in range(heads):
        deficient = head in bad
        if runs and runs[-1][2] == deficient:
            first, count, _ = runs[-1]
            runs[-1] = (first, count + 1, deficient)
        else:
            runs.append((head, 1, deficient))
    return runs


def _within(loose: list[Heads], parameters: Mapping[str, Tensor]) -> list[Heads]:
    """Loose heads whose parameters vary at least in part."""
    return [run for run in loose if any(view.parameter in parameters for view in run.pair.views)]


def _entries(parameters: Mapping[str, Tensor]) -> list[Entry]:
    entries, offset = [], 0
    for name, parameter in parameters.items():
        entries.append(Entry(name, parameter.shape, parameter.dtype, offset))
        offset += parameter.numel()
    return entries
