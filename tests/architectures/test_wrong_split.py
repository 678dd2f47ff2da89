"""A wrong declaration has the right shapes and no other symptom: the check on the model's output finds it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from quotient_nets import model_sharpness, parameter_manifold
from quotient_nets.architectures import registry
from quotient_nets.architectures.hugging_face import bert_attention
from quotient_nets.architectures.torch_attention import multihead_attention
from quotient_nets.parameters import Pair, Translation, View
from tests.models import Attention, Stack, bert, generic, ids, tokens

Wrong = Callable[[Pair], Pair]


def of_views(change: Callable[[View], View]) -> Wrong:
    """A change of every view of a pair, its translation included."""

    def wrong(pair: Pair) -> Pair:
        views = {view: change(view) for view in pair.views}
        shift = pair.translation
        assert shift is not None
        shift = replace(shift, bias=views[shift.bias], output=views.get(shift.output))
        g, h = (tuple(views[view] for view in side) for side in (pair.g, pair.h))
        return replace(pair, g=g, h=h, translation=shift)

    return wrong


def reordered(stored: str) -> Wrong:
    """Another order of parts, heads and ranks along the rows of the packed weight and bias."""
    return of_views(lambda view: replace(view, stored=view.stored.replace("part head rank", stored)))


def parts(*order: int) -> Wrong:
    """Queries, keys and values taken from other thirds of the packed weight and bias."""
    return of_views(lambda view: replace(view, part=order[view.part]) if view.parts == 3 else view)


def shifted_query(pair: Pair) -> Pair:
    return replace(pair, translation=Translation(pair.g[1])) if pair.kind == "query_key" else pair


def uncompensated(pair: Pair) -> Pair:
    return replace(pair, translation=Translation(pair.g[1])) if pair.kind == "value_output" else pair


def without_bias(pair: Pair) -> Pair:
    """Query biases that do not move with the query weights."""
    return replace(pair, g=pair.g[:1]) if pair.kind == "query_key" else pair


WRONG = {
    "values for queries": parts(2, 1, 0),
    "values for keys": parts(0, 2, 1),
    "thirds turned around": parts(1, 2, 0),
    "heads interleaved": reordered("part rank head"),
    "parts inside heads": reordered("head part rank"),
    "shift of the query bias": shifted_query,
    "shift of the value bias alone": uncompensated,
}


def declare(monkeypatch: pytest.MonkeyPatch, name: str, declaration: Callable, wrong: Wrong) -> None:
    monkeypatch.setitem(
        registry._DECLARATIONS, name, lambda prefix, module: tuple(wrong(p) for p in declaration(prefix, module))
    )


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_split_of_a_packed_weight_is_caught(monkeypatch: pytest.MonkeyPatch, wrong: Wrong) -> None:
    declare(monkeypatch, "MultiheadAttention", multihead_attention, wrong)
    model = generic(Stack(layers=1))
    space = parameter_manifold(model)
    with pytest.raises(ValueError, match=r"leave the output unchanged.*layers\.0\.self_attn.*layout does not fit"):
        space.check(model, tokens())


def test_query_and_key_may_change_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control to the tests above: this split is unusual, and right up to the shift."""

    def swapped(pair: Pair) -> Pair:
        return replace(pair, g=pair.h, h=pair.g) if pair.kind == "query_key" else pair

    declare(monkeypatch, "MultiheadAttention", multihead_attention, swapped)
    model = generic(Stack())
    assert parameter_manifold(model).check(model, tokens()).change < 1e-12


def test_biases_left_behind_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch, "BertAttention", bert_attention, without_bias)
    model = bert()
    space = parameter_manifold(model)
    with pytest.raises(ValueError, match=r"query_key.*encoder\.layer\.0\.attention"):
        space.check(model, **ids())


def test_guilty_kind_alone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch, "MultiheadAttention", multihead_attention, shifted_query)
    model = generic(Stack())
    with pytest.raises(ValueError, match="query_key") as caught:
        parameter_manifold(model).check(model, tokens())
    assert "value_output" not in str(caught.value)


@pytest.mark.parametrize("option", ["add_zero_attn", "add_bias_kv"])
def test_shift_that_an_extra_key_breaks_is_caught(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    def shifted(pair: Pair) -> Pair:
        return replace(pair, translation=Translation(pair.h[1])) if pair.kind == "query_key" else pair

    model = generic(Attention(**{option: True}))
    inputs = (tokens(), tokens(), tokens())
    assert parameter_manifold(model).check(model, *inputs).change < 1e-12
    declare(monkeypatch, "MultiheadAttention", multihead_attention, shifted)
    with pytest.raises(ValueError, match="query_key of attention"):
        parameter_manifold(model).check(model, *inputs)


def test_missed_part_of_a_packed_weight_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._DECLARATIONS, "MultiheadAttention", lambda *a: multihead_attention(*a)[:1])
    with pytest.raises(ValueError, match=r"views of attention\.in_proj_\w+ to cover its (192|24) entries once"):
        parameter_manifold(generic(Attention()))


def test_sharpness_checks_by_itself_before_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch, "MultiheadAttention", multihead_attention, reordered("head part rank"))
    model, batch = generic(Stack()), tokens()
    passes = []
    with pytest.raises(ValueError, match="layout does not fit"):
        model_sharpness(
            model, lambda m, b: m(b).square().mean(), [batch], rho=0.1, progress=lambda *a: passes.append(a)
        )
    assert passes == []
    model_sharpness(model, lambda m, b: m(b).square().mean(), [batch], rho=0.1, steps=1, check=False)


def test_attention_that_does_not_matter_is_reported_as_unverified() -> None:
    class Blind(nn.Module):
        """A network that multiplies its attention by zero."""

        def __init__(self):
            super().__init__()
            self.attention = Attention(batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 0.0 * self.attention(x, x, x)

    model = generic(Blind())
    report = parameter_manifold(model).check(model, tokens())
    assert set(report.unverified) == {"query_key", "value_output"}
