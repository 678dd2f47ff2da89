"""A function of a model at other parameters, whatever part of the model it calls."""

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.testing import assert_close

from quotient_nets import parameter_manifold
from quotient_nets.parameters import at_parameters
from tests.models import TEXT, WIDTH, Stack, TiedLM, encoder_layer, generic, tokens


class Everything(nn.Module):
    """A network with submodules, methods, properties, plain parameters, buffers and attributes."""

    labels = ("no", "yes")

    def __init__(self):
        super().__init__()
        self.encoder = encoder_layer()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)])
        self.named = nn.ModuleDict({"head": nn.Linear(WIDTH, 2)})
        self.temperature = nn.Parameter(torch.tensor([0.7]))
        self.scales = nn.ParameterList([torch.ones(2), torch.full((2,), 3.0)])
        self.register_buffer("seen", torch.zeros(()))
        self.size = WIDTH

    @property
    def backbone(self) -> nn.Module:
        return self.encoder

    @property
    def precision(self) -> Tensor:
        return 1 / self.temperature

    def get_head(self) -> nn.Module:
        return self.layers[1]

    def embed(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.seen += 1
        return scale * self.temperature * self.encoder(x)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return h


@pytest.fixture
def models() -> tuple[Everything, Everything, dict[str, Tensor]]:
    """A model, another one, and the parameters of the other."""
    model, other = generic(Everything()), generic(Everything())
    space = parameter_manifold(model)
    return model, other, space.unpack(space.pack(other))


X = torch.linspace(-1, 1, 2 * 3 * WIDTH, dtype=torch.float64).view(2, 3, WIDTH)

CALLS = {
    "forward": lambda m: m(X),
    "keyword": lambda m: m(x=X),
    "submodule": lambda m: m.encoder(X),
    "submodule of a submodule": lambda m: m.encoder.linear2(m.encoder.linear1(X)),
    "method": lambda m: m.embed(X, scale=2.0),
    "method of a submodule": lambda m: m.encoder._ff_block(X),
    "forward by name": lambda m: m.forward(X),
    "parameter": lambda m: m.temperature * X,
    "parameter of a submodule": lambda m: X @ m.encoder.linear1.weight.T,
    "parameter that is no leaf": lambda m: m.encoder.self_attn.out_proj.bias,
    "list of modules": lambda m: m.layers[1](m.layers[0](X)),
    "last of a list of modules": lambda m: m.layers[-1](X),
    "loop over modules": lambda m: [layer(X) for layer in m.layers][1],
    "number of modules": lambda m: torch.tensor(len(m.layers)),
    "dictionary of modules": lambda m: m.named["head"](X),
    "list of parameters": lambda m: m.scales[0] + m.scales[1],
    "property that is a module": lambda m: m.backbone(X),
    "property that is computed": lambda m: m.precision,
    "method that returns a module": lambda m: m.get_head()(X),
    "all parameters": lambda m: sum(p.square().sum() for p in m.parameters()),
    "parameters with names": lambda m: sum(p.square().sum() for n, p in m.named_parameters() if n.endswith("bias")),
    "parameters of a submodule": lambda m: sum(p.square().sum() for p in m.encoder.parameters()),
    "state": lambda m: sum(t.square().sum() for t in m.state_dict().values()),
    "submodule by name": lambda m: m.get_submodule("layers.0")(X),
    "submodules": lambda m: next(s for s in m.children())(X),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_everything_is_at_the_other_parameters(models, call) -> None:
    model, other, values = models
    assert_close(at_parameters(model, values, call), call(other), rtol=1e-12, atol=1e-12)


def test_a_loss_that_names_the_model_itself_is_at_the_other_parameters_too(models) -> None:
    model, other, values = models
    assert_close(at_parameters(model, values, lambda _: model(X)), other(X), rtol=1e-12, atol=1e-12)


def test_arguments_and_results_pass_through(models) -> None:
    model, _, values = models
    found = at_parameters(model, values, lambda m, *args, **kwargs: (m is model, args, kwargs), 1, "two", three=3)
    assert found == (True, (1, "two"), {"three": 3})


def test_a_function_that_is_a_module_works(models) -> None:
    class Loss(nn.Module):
        def forward(self, m: Everything) -> Tensor:
            return m(X).square().mean()

    model, other, values = models
    assert_close(at_parameters(model, values, Loss()), Loss()(other), rtol=1e-12, atol=1e-12)


def test_buffers_are_copies(models) -> None:
    model, _, values = models
    assert float(at_parameters(model, values, lambda m: (m(X), m.embed(X), m.seen)[2])) == 2.0
    assert float(model.seen) == 0.0


def test_parameters_without_a_value_are_those_of_the_model(models) -> None:
    model, other, _ = models
    some = {"temperature": other.temperature}
    encoded, embedded = at_parameters(model, some, lambda m: (m.encoder(X), m.embed(X)))
    assert_close(encoded, model.encoder(X), rtol=1e-12, atol=1e-12)
    assert_close(embedded / other.temperature, model.embed(X) / model.temperature, rtol=1e-12, atol=1e-12)


def test_derivatives_flow_to_the_point_through_every_part() -> None:
    model = generic(Everything())
    space = parameter_manifold(model)
    x = space.pack(model).requires_grad_()
    value = at_parameters(model, space.unpack(x), lambda m: m.embed(X).sum() + m.temperature.sum())
    (slope,) = torch.autograd.grad(value, x)
    named = space.unpack(slope)
    assert float(named["temperature"].abs()) > 1
    assert bool((named["encoder.linear1.weight"] != 0).any())
    assert not bool(named["layers.1.weight"].any())
    assert all(p.grad is None for p in model.parameters())


# -- tied weights: one parameter, two names --------------------------------------------------------------------------

TIED = {
    "forward": lambda m, ids: m(ids),
    "readout": lambda m, ids: m.readout(m.encoder(m.embedding(ids))),
    "weight of the readout": lambda m, ids: m.embedding(ids) @ m.readout.weight.T,
}


@pytest.mark.parametrize("call", TIED.values(), ids=TIED)
def test_tied_weights_are_at_the_other_parameters_under_both_names(call) -> None:
    model, other, ids = generic(TiedLM()), generic(TiedLM()), torch.randint(7, (2, 4))
    space = parameter_manifold(model)
    values = space.unpack(space.pack(other))
    assert_close(at_parameters(model, values, call, ids), call(other, ids), rtol=1e-12, atol=1e-12)


HUGGING_FACE = {
    "forward": lambda m, ids: m(ids).logits,
    "backbone and readout": lambda m, ids: m.cls(m.bert(ids).last_hidden_state),
    "base_model": lambda m, ids: m.base_model(ids).last_hidden_state,
    "input embeddings": lambda m, ids: m.get_input_embeddings()(ids),
    "tied decoder": lambda m, ids: m.cls.predictions.decoder(m.bert(ids)[0]),
}


@pytest.mark.parametrize("call", HUGGING_FACE.values(), ids=HUGGING_FACE)
def test_ways_to_call_a_hugging_face_model(call) -> None:
    model, other = (generic(transformers.BertForMaskedLM(transformers.BertConfig(**TEXT))) for _ in range(2))
    ids = torch.randint(3, 19, (2, 6))
    space = parameter_manifold(model)
    values = space.unpack(space.pack(other))
    assert_close(at_parameters(model, values, call, ids), call(other, ids), rtol=1e-12, atol=1e-12)


def test_model_is_as_before_after_each_kind_of_call() -> None:
    model, other = generic(Stack()), generic(Stack())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    space = parameter_manifold(model)
    values = space.unpack(space.pack(other))
    at_parameters(model, values, lambda m: (m(tokens()), m.head(tokens())))
    for part in (lambda m, x: m(x), lambda m, x: m.head(x)):
        with pytest.raises(RuntimeError):
            at_parameters(model, values, part, torch.ones(2, 3, WIDTH + 1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
