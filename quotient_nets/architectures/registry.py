"""Which attention classes we know, and what each of them declares.

A declaration is a function from an attention module and its name to the :class:`Pair` s of its heads. It is found by
the name of the module's class or of any base, so no model library is imported. Adding an architecture is one small
declaration and one row in the tests' table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from quotient_nets.parameters import Pair

Declaration = Callable[[str, nn.Module], tuple[Pair, ...]]

_DECLARATIONS: dict[str, Declaration] = {}


def declares(*class_names: str) -> Callable[[Declaration], Declaration]:
    """Register a declaration for attention classes of these names and their subclasses."""

    def register(declaration: Declaration) -> Declaration:
        _DECLARATIONS.update(dict.fromkeys(class_names, declaration))
        return declaration

    return register


def known_classes() -> tuple[str, ...]:
    """Names of the attention classes that have a declaration."""
    return tuple(sorted(_DECLARATIONS))


def declaration_of(module: nn.Module) -> Declaration | None:
    """Declaration for the class of ``module`` or the nearest base that has one."""
    return next((_DECLARATIONS[c.__name__] for c in type(module).__mro__ if c.__name__ in _DECLARATIONS), None)


def attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, Declaration]]:
    """Known attention modules with their names and declarations, outermost first, none inside another."""
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(prefix) for prefix in inside):
            continue
        declaration = declaration_of(module)
        if declaration is not None:
            inside.append(f"{name}." if name else "")
            yield name, module, declaration


def unknown_attention(model: nn.Module) -> dict[str, list[str]]:
    """Classes that look like attention, hold parameters and have no declaration -> names of their modules."""
    known = [name for name, _, _ in attention_modules(model)]
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        inside = any(name == k or name.startswith(f"{k}.") or k == "" for k in known)
        around = any(k.startswith(f"{name}." if name else "") for k in known)
        named_so = "attention" in type(module).__name__.lower()
        if named_so and not inside and not around and any(True for _ in module.parameters()):
            found.setdefault(type(module).__name__, []).append(name)
    return found
