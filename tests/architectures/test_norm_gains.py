"""Gains of pre-norm layers: an exact symmetry that is found, and not claimed where the residual reads the norm."""

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.func import functional_call

from quotient_nets.architectures.norm_gains import norm_gains, rescale_norm_gains
from quotient_nets.demo import load_digits_vit

SIZES = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def vit(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    config = getattr(transformers, f"{name}Config")(**SIZES, intermediate_size=24)
    model = getattr(transformers, f"{name}Model")(config)
    return model, {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64)}


def encoder(norm_first: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, norm_first=norm_first, batch_first=True)
    return layer, {"src": torch.randn(2, 5, 16, dtype=torch.float64)}


MODELS = {
    "encoder-layer": lambda: encoder(True),
    "digits-vit": lambda: (load_digits_vit(), {"images": torch.randn(2, 8, 8, dtype=torch.float64)}),
    **{name: lambda name=name: vit(name) for name in ("ViT", "DeiT", "ViTMSN")},
}


def outputs(model: nn.Module, parameters: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
    output = functional_call(model, parameters, kwargs=inputs)
    return output if isinstance(output, Tensor) else output.last_hidden_state


@pytest.mark.parametrize("name", MODELS)
def test_rescaled_gains_leave_the_function_unchanged(name: str) -> None:
    model, inputs = MODELS[name]()
    model = model.double().eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias") or "norm" in parameter_name:
            nn.init.normal_(parameter, 1.0, 0.3)  # gains and biases as training leaves them
    gains = norm_gains(model)
    layers = sum(1 for module in model.modules() if type(module).__name__.endswith("Layer"))
    assert len(gains) == 2 * layers
    parameters = dict(model.named_parameters())
    before = {key: tensor.clone() for key, tensor in parameters.items()}
    with torch.no_grad():
        base = outputs(model, parameters, inputs)
        moved = outputs(model, rescale_norm_gains(parameters, gains, condition=100.0), inputs)
        torch.testing.assert_close(moved, base, rtol=1e-11, atol=1e-11)
        for gain in gains:  # each alone, and a broken one is seen
            broken = dict(rescale_norm_gains(parameters, (gain,), condition=100.0))
            torch.testing.assert_close(outputs(model, broken, inputs), base, rtol=1e-11, atol=1e-11)
            broken[gain.readers[0]] = parameters[gain.readers[0]]
            assert (outputs(model, broken, inputs) - base).abs().max() > 1e-6
    assert all(torch.equal(before[key], tensor) for key, tensor in parameters.items())


@pytest.mark.parametrize(
    "model",
    [
        encoder(False)[0],
        transformers.BertModel(
            transformers.BertConfig(
                **{
                    "hidden_size": 16,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "intermediate_size": 16,
                    "vocab_size": 9,
                }
            )
        ),
    ],
    ids=["post-norm-layer", "bert"],
)
def test_post_norm_layers_have_none(model: nn.Module) -> None:
    assert norm_gains(model) == ()
