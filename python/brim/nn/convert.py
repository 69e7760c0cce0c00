"""Changes the layers of a model to brim's, in place, and back."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from brim import _C
from brim.nn import modules

__all__ = ["ConversionReport", "ConvertedLayer", "convert", "restore"]

Module: TypeAlias = torch.nn.Module
Choice: TypeAlias = "type[Module] | str | Callable[[str, Module], bool]"
Choices: TypeAlias = "Choice | Collection[Choice]"
"""A type, a pattern for names, a function of name and module, or several of these."""

COUNTERPARTS: Mapping[type[Module], type[Module]] = {
    getattr(torch.nn, name): getattr(modules, name) for name in modules.__all__
}
"""The layers of torch.nn and brim's for them."""

ORIGINALS: Mapping[type[Module], type[Module]] = {own: of for of, own in COUNTERPARTS.items()}
"""The same, from brim's layers to those of torch.nn."""

STAND_INS: dict[type[Module], type[Module]] = {}
"""Layers of brim without a class in torch.nn, and the layers of other libraries they replace."""


class _NoQuantization:
    """The attribute `qconfig` of brim's layers, which torch.ao.quantization sets on every layer.

    It knows layers by their exact type and would silently skip brim's.
    """

    def __get__(self, layer: Module | None, kind: type[Module]) -> Any:
        raise AttributeError("qconfig")

    def __set__(self, layer: Module, value: object) -> None:
        raise TypeError(
            f"torch.ao.quantization knows layers by their exact type and would skip this "
            f"{type(layer).__name__} of brim: call brim.restore(model) before quantizing"
        )


for _own in ORIGINALS:
    type.__setattr__(_own, "qconfig", _NoQuantization())

_ROOT = "(model)"


@dataclass(frozen=True)
class ConvertedLayer:
    """A layer of the model and what became of it.

    Attributes:
        name: its qualified name; empty for the model itself.
        type: the class it had, without the module.
        reason: why it was kept as it is; empty where it was replaced.
        names: all its names, where the model has it in several places.
    """

    name: str
    type: str
    reason: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class ConversionReport:
    """What `convert` replaced and what it kept as it was. `print` shows what was kept as a table.

    Containers are not listed, only layers: modules without children or with parameters.

    Attributes:
        replaced: one entry per layer.
        kept: one entry per layer, with the reason.
    """

    replaced: tuple[ConvertedLayer, ...]
    kept: tuple[ConvertedLayer, ...]

    def __str__(self) -> str:
        layers = "layer" if len(self.replaced) == 1 else "layers"
        head = f"{len(self.replaced)} {layers} replaced, {len(self.kept)} kept as they are"
        if not self.kept:
            return head
        rows = [
            [", ".join(name or _ROOT for name in each.names), each.type, each.reason]
            for each in self.kept
        ]
        return f"{head}\n\n{_C.text_table(['layer', 'type', 'kept because'], rows, left=3)}"


def convert(
    model: Module,
    only: Choices | None = None,
    skip: Choices | None = None,
    recompute: str | None = None,
) -> ConversionReport:
    """Change the layers of a model to brim's, in place.

    A layer is replaced if its type is exactly one of `torch.nn` that brim has a counterpart for. It
    stays the same object: hooks, names, sharing, parameters, training flag and state_dict stay.

    Args:
        model: any module, also a single layer.
        only: replace these alone. A type or a pattern for qualified names such as "encoder.*" (both
            include what is inside), a function of the qualified name and the module (that module
            alone), or a collection of these.
        skip: leave these out; given as `only`.
        recompute: "cheap": a convolution or linear layer keeps no input that the layers before can
            recompute in backward from what they keep anyway (normalisation, activations, dropout,
            sums): the same values for less memory and more time. Also for layers that are brim's
            already. None changes nothing.

    Returns:
        What was replaced, and what was not and why.

    Raises:
        TypeError: if `model` is no module, or `only` or `skip` holds anything else.
        ValueError: if a pattern matches no name, or `recompute` is unknown.

    Example:
        >>> import torch, brim
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.SELU(), torch.nn.Linear(8, 2)
        ... )
        >>> report = brim.convert(model, skip="3")
        >>> print(report)
        2 layers replaced, 2 kept as they are
        <BLANKLINE>
        layer  type    kept because
        --------------------------------------
        2      SELU    brim has no counterpart
        3      Linear  left out by skip
        >>> [layer.name for layer in report.replaced]
        ['0', '1']
    """
    check_module(model)
    if recompute not in (None, "cheap"):
        raise ValueError(f'recompute must be None or "cheap", got {recompute!r}')
    places = _places(model)
    chosen = places.keys() if only is None else _matching("only", only, places)
    left_out = set() if skip is None else _matching("skip", skip, places)
    replaced, kept = [], []
    for module, names in places.items():
        if module not in chosen:
            reason = "not chosen by only"
        elif module in left_out:
            reason = "left out by skip"
        else:
            reason = _obstacle(module)
        entry = ConvertedLayer(names[0], type(module).__name__, reason, tuple(names))
        if not reason:
            module.__class__ = COUNTERPARTS[type(module)]
            replaced.append(entry)
        elif is_layer(module):
            kept.append(entry)
        if reason in ("", _ALREADY) and recompute is not None and hasattr(module, "recompute"):
            module.__dict__["recompute"] = True
    return ConversionReport(tuple(replaced), tuple(kept))


def restore(model: Module) -> Module:
    """Change brim's layers in a model back to those of torch.nn, in place.

    Args:
        model: any module. Layers whose type is exactly one of `brim.nn` change back; those of
            derived classes stay and only lose their `recompute`.

    Returns:
        The model itself.

    Raises:
        TypeError: if `model` is no module.

    Example:
        >>> import torch, brim
        >>> model = torch.nn.Sequential(torch.nn.ReLU())
        >>> report = brim.convert(model)
        >>> type(brim.restore(model)[0]) is torch.nn.ReLU
        True
    """
    check_module(model)
    for module in model.modules():
        if own_base(type(module)) is not None:
            module.__dict__.pop("recompute", None)
            module.__class__ = ORIGINALS.get(type(module), type(module))
    return model


_ALREADY = "brim's already"


def check_module(model: object) -> None:
    """Refuse anything but a module."""
    if not isinstance(model, Module):
        raise TypeError(f"model must be a torch.nn.Module, got {model!r}")


def own_base(kind: type[Module]) -> type[Module] | None:
    """The layer of brim that a class is or derives from.

    Example:
        >>> import brim
        >>> class Mine(brim.nn.ReLU): ...
        >>> own_base(Mine) is brim.nn.ReLU, own_base(torch.nn.ReLU)
        (True, None)
    """
    return next((base for base in kind.__mro__ if base in ORIGINALS or base in STAND_INS), None)


def _places(model: Module) -> dict[Module, list[str]]:
    """Every module with all its names. A module that contains itself is not entered again."""
    places: dict[Module, list[str]] = {}

    def visit(module: Module, name: str, around: frozenset[Module]) -> None:
        places.setdefault(module, []).append(name)
        around |= {module}
        for own_name, child in module._modules.items():
            if child is not None and child not in around:
                visit(child, f"{name}.{own_name}" if name else own_name, around)

    visit(model, "", frozenset())
    return places


def is_layer(module: Module) -> bool:
    """Whether a module has no children, or parameters of its own: it is more than a container."""
    return next(module.children(), None) is None or any(True for _ in module.parameters(False))


def _obstacle(module: Module) -> str:
    """Why a module cannot be replaced; empty if it can."""
    kind = type(module)
    if kind in ORIGINALS:
        return _ALREADY
    if parametrize.is_parametrized(module):
        return "it is parametrized"
    if isinstance(module, LazyModuleMixin):
        return "it is lazy: run the model once before"
    if own_base(kind) is not None:
        return _ALREADY
    if kind not in COUNTERPARTS:
        for base in kind.__mro__[1:]:
            if base in COUNTERPARTS:
                return f"it is a subclass of {base.__name__}"
        return "brim has no counterpart"
    if getattr(module, "qconfig", None) is not None:
        return "it is prepared for quantization"
    if any(p is not None and p.is_complex() for p in module._parameters.values()):
        return "its parameters are complex"
    return ""


def _matching(argument: str, choices: Choices, places: Mapping[Module, list[str]]) -> set[Module]:
    """The modules that any of the choices means."""
    wrong = TypeError(
        f"{argument} must be a type of module, a pattern for names, a function of name and module, "
        f"or a collection of these, got {choices!r}"
    )
    one = isinstance(choices, (str, type)) or callable(choices)
    several: Any = [choices] if one else choices
    if not isinstance(several, Collection):
        raise wrong
    found: set[Module] = set()
    for choice in several:
        if isinstance(choice, type) and issubclass(choice, Module):
            roots = [module for module in places if isinstance(module, choice)]
        elif isinstance(choice, str):
            roots = [m for m, names in places.items() if fnmatch.filter(names, choice)]
            if not roots:
                raise ValueError(f"{argument}: the pattern {choice!r} matches no name in the model")
        elif callable(choice) and not isinstance(choice, (type, Module)):
            found.update(m for m, names in places.items() if any(choice(n, m) for n in names))
            continue
        else:
            raise wrong
        found.update(module for root in roots for module in root.modules())
    return found
