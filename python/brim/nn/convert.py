"""Changes the layers of a model to brim's, in place, and back."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from brim._arguments import check_recompute, flag, shown
from brim._state.undoing import Undoing, undo_modules
from brim.memory import is_out_of_memory
from brim.nn import _causal_lm_loss, modules
from brim.nn._blocks import repeated_blocks
from brim.nn._compiled import asking
from brim.nn._conversion_report import ConversionReport, ConvertedLayer
from brim.nn._derived import (
    MAKERS,
    Recipe,
    derived,
    is_made,
    original_of,
    recipe_of,
    refuse_script,
)
from brim.nn._functions import (
    as_block,
    calls_functions,
    first_inside_regions,
    leave_out,
    take_in,
    with_functions,
)
from brim.nn._hints import conversion_hint
from brim.nn.recognisers import recognise

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


def _repr(layer: Module) -> str:
    """As torch's, with the name that tells the class from torch's."""
    text = Module.__repr__(layer)
    return f"brim.nn.{text}" if type(layer) in ORIGINALS else text


for _own in ORIGINALS:
    type.__setattr__(_own, "qconfig", _NoQuantization())
    type.__setattr__(_own, "__repr__", _repr)
    type.__setattr__(_own, "__prepare_scriptable__", refuse_script)


def convert(
    model: Module,
    only: Choices | None = None,
    skip: Choices | None = None,
    recompute: str | None = None,
    functions: bool = True,
    blocks: Choices | None = None,
) -> ConversionReport:
    """Change the layers of a model to brim's, in place.

    A layer is replaced if its type is one of `torch.nn` that brim has a counterpart for, a class
    derived from one that computes the same, or if brim recognises what it computes: RMSNorms,
    activations and others that models write themselves. It stays the same object: hooks, names,
    sharing, parameters, training flag and state_dict stay, and its class derives from the one it
    had.

    Args:
        model: any module, also a single layer.
        only: replace these alone. A type or a pattern for qualified names such as "encoder.*" (both
            include what is inside), a function of the qualified name and the module (that module
            alone), or a collection of these.
        skip: leave these out, also of functions that are redirected around them; given as `only`.
        recompute: "cheap": a convolution or linear layer keeps no input that the layers before can
            recompute in backward from what they keep anyway (normalisation, activations, dropout,
            sums): the same values for less memory and more time. "products": the same, and a
            convolution or linear layer whose output is larger than its input (the first of an MLP,
            the last of a bottleneck) runs again in backward, so that the activation or
            normalisation after it does not keep that output: the least memory, and about a tenth
            more work per step. "auto": nothing before memory is short; then values that "products"
            would not keep are dropped, just enough, and backward computes them again; where that
            is not enough, whole `blocks` run again (docs/explanation/nn.md, "Only when memory is
            short"). None: neither. Also for what an earlier `convert` made brim's, so the last call
            counts; layers of `brim.nn` that you gave a `recompute` yourself keep it
            where this is None. Under torch.compile it tells the compiler's partitioner to do the
            same (docs/explanation/nn.md, "Works with").
        functions: also redirect the functions that modules call in their own forward (`F.gelu`,
            products of two tensors), as `brim.saving()` does. Language models of transformers also
            get brim's loss.
        blocks: with "auto", the modules that may run again as a whole, given as `only`, without
            what is inside of them; `()` for none. None: those that the model repeats, as the layers
            of a transformer.

    Returns:
        A report, not the model, which you have: what was replaced, what was changed, and what was
        neither and why. (`restore` leaves nothing to report and returns the model.)

    Raises:
        TypeError: if `model` is no module, `only`, `skip` or `blocks` holds anything else, or
            `functions` is no bool.
        ValueError: if a pattern matches no name, `recompute` is unknown, or `blocks` is given
            without "auto".

    Example:
        >>> import torch, brim
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Softmin(), torch.nn.Linear(8, 2)
        ... )
        >>> report = brim.convert(model, skip="3")
        >>> print(report)
        2 layers replaced, 2 kept as they are
        <BLANKLINE>
        layer  type     kept because
        ---------------------------------------
        2      Softmin  brim has no counterpart
        3      Linear   left out by skip
        hint: all weights are trained, where recompute="cheap" saves most. brim.audit(model, *inputs) measures it
        >>> [layer.name for layer in report.replaced]
        ['0', '1']
    """  # noqa: E501
    check_module(model)
    check_recompute(recompute)
    flag("functions", functions)
    if blocks is not None and recompute != "auto":
        raise ValueError(f'blocks is for recompute="auto", got recompute={recompute!r}')
    with Undoing() as undo:  # all or nothing: an interrupt leaves no model that is half converted
        undo_modules(undo, model)
        report = _convert(model, only, skip, recompute, functions, blocks)
        undo.keep()
    return report


def _convert(
    model: Module,
    only: Choices | None,
    skip: Choices | None,
    recompute: str | None,
    functions: bool,
    blocks: Choices | None,
) -> ConversionReport:
    places = _places(model)
    chosen = places.keys() if only is None else _matching("only", only, places)
    left_out = set() if skip is None else _matching("skip", skip, places)
    to_run_again: set[Module] = set()
    if recompute == "auto":
        named = None if blocks is None else _matching("blocks", blocks, places, inside=False)
        to_run_again = repeated_blocks(model) if named is None else named
    blocks_found: list[ConvertedLayer] = []
    replaced: list[ConvertedLayer] = []
    kept: list[ConvertedLayer] = []
    around: list[ConvertedLayer] = []
    changed: list[ConvertedLayer] = []
    for module, names in places.items():
        take_in(module)
        before = _mode_of(module)
        has_loss = _causal_lm_loss.is_rerouted(module)
        reroutes = False  # gets brim's loss
        if module not in chosen:
            change = _Change("not chosen by only")
        elif module in left_out:
            change = _Change("left out by skip")
        else:
            change = _change_of(module, functions, recompute is not None, module in to_run_again)
            if functions:
                asks = asking(recompute)["recompute"]
                reroutes = _causal_lm_loss.reroute(module, asks) and not has_loss
        kind = type(module).__name__
        entry = ConvertedLayer(names[0], kind, change.reason, tuple(names), change.recognised)
        if change.to is not None:
            module.__class__ = change.to
        if change.reason in ("", ALREADY):
            _set_mode(module, recompute)
        module.__dict__.pop("_brim_block", None)
        if module in to_run_again and change.to is not None and calls_functions(change.to):
            module.__dict__["_brim_block"] = "region" if change.calls else "alone"
            blocks_found.append(entry)
        was_ours = change.again or change.reason == ALREADY
        if (was_ours or has_loss) and (after := _mode_of(module)) != before:
            reason = f"recompute is {_quoted(after)} now, it was {_quoted(before)}"
            changed.append(replace(entry, reason=reason))
        elif reroutes or (change.calls and not was_ours):
            around.append(entry)
        elif change.to is not None and not was_ours and not calls_functions(change.to):
            replaced.append(entry)
        elif is_layer(module):
            kept.append(replace(entry, reason=ALREADY) if was_ours else entry)
    unchosen = (places.keys() - chosen) | left_out
    for module in first_inside_regions(model, unchosen):
        leave_out(module)
    hint = conversion_hint(model, recompute)
    return ConversionReport(
        tuple(replaced), tuple(kept), tuple(around), hint, tuple(changed), tuple(blocks_found)
    )


def restore(model: Module) -> Module:
    """Change brim's layers in a model back to what they were, in place.

    Args:
        model: any module. Everything that `convert` changes is changed back, and layers whose type
            is exactly one of `brim.nn`; those of classes that you derived stay and only lose their
            `recompute` and `runs_again`.

    Returns:
        The model itself, for use in an expression: `torch.jit.script(brim.restore(model))`. Unlike
        `convert` it has nothing to report.

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
    with Undoing() as undo:
        undo_modules(undo, model)
        for module in model.modules():
            kind = type(module)
            take_in(module)
            _causal_lm_loss.restore(module)
            own = ("recompute", "runs_again") if own_base(kind) is not None else ()
            for mark in ("_brim_recompute", "_brim_block", *own):
                module.__dict__.pop(mark, None)
            module.__class__ = original_of(kind) or ORIGINALS.get(kind, kind)
        undo.keep()
    return model


ALREADY = "brim's already"


def _mode_of(module: Module) -> str | None:
    """The `recompute` of a module as `convert` takes it; also that of its loss."""
    if own_base(type(module)) is None:
        level: str | None = getattr(module, "_brim_recompute", None)
        return level or ("cheap" if _causal_lm_loss.recomputes(module) else None)
    if not getattr(module, "recompute", False):
        return None
    if getattr(module, "_brim_recompute", None) == "auto":
        return "auto"
    return "products" if getattr(module, "runs_again", False) else "cheap"


def _set_mode(module: Module, recompute: str | None) -> None:
    """Give a module this `recompute`, or take back what this function gave it."""
    marks: dict[str, Any] = {"_brim_recompute": recompute}
    needed = "_brim_recompute"
    if own_base(type(module)) is not None:
        marks |= asking(recompute)
        needed = "recompute"
    if recompute is not None and hasattr(type(module), needed):
        own = {m: v for m, v in marks.items() if m.startswith("_") or hasattr(type(module), m)}
        module.__dict__.update(own)
    elif recompute is None and "_brim_recompute" in module.__dict__:
        for mark in marks:
            module.__dict__.pop(mark, None)


def _quoted(recompute: str | None) -> str:
    return "None" if recompute is None else f'"{recompute}"'


def check_module(model: object) -> None:
    """Refuse anything but a module."""
    if not isinstance(model, Module):
        raise TypeError(f"model must be a torch.nn.Module, got {shown(model)}")


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


class _Change(NamedTuple):
    """What becomes of a module.

    Attributes:
        reason: why its class stays.
        to: its new class.
        recognised: as what, for the report.
        again: it had a region around its functions before.
        calls: it calls functions, which are redirected.
    """

    reason: str = ""
    to: type[Module] | None = None
    recognised: str = ""
    again: bool = False
    calls: bool = False


def _change_of(module: Module, functions: bool, recompute: bool, is_block: bool) -> _Change:
    kind = type(module)
    recipe = recipe_of(kind)
    if functions and recipe is not None and recipe.maker == "functions":
        # Which methods are regions depends on `recompute` and `blocks`.
        original: Any = original_of(kind)
        module.__class__ = original
        is_stuck = bool(_obstacle(module))
        change = _first_change_of(module, True, recompute, is_block)
        module.__class__ = kind
        to = kind if is_stuck else change.to or original
        return change._replace(reason="", to=to, again=True)
    return _first_change_of(module, functions, recompute, is_block)


def _first_change_of(module: Module, functions: bool, recompute: bool, is_block: bool) -> _Change:
    kind = type(module)
    reason = _obstacle(module)
    if reason:
        return _Change(reason)
    if kind in COUNTERPARTS:
        return _Change(to=COUNTERPARTS[kind])
    try:
        for base in kind.__mro__[1:]:
            if base in COUNTERPARTS and same_work(kind, base):
                return _Change(to=derived(kind, Recipe("layer", (base,))), recognised=base.__name__)
        known = recognise(module)
        if known is not None and known.kind is not None:
            return _Change(to=known.kind, recognised=known.what)
        if is_block:
            region, calls = as_block(module, functions)
            return _Change(to=region, calls=calls)
        if functions and (found := with_functions(module, recompute)) is not None:
            return _Change(to=found, calls=True)
    except Exception as error:  # of the class's own, such as __init_subclass__
        if is_out_of_memory(error):  # a layer that was not compared is not one that differs
            raise
        return _Change(f"no class can be derived from its own: {error}")
    if known is not None:
        return _Change(f"it looks like {known.what}, but its results differ from what brim knows")
    return _Change("brim has no counterpart")


def _obstacle(module: Module) -> str:
    """Why a module cannot be replaced, whatever it is; empty if it can."""
    kind = type(module)
    if kind in ORIGINALS or is_made(kind):
        return ALREADY
    if parametrize.is_parametrized(module):
        return "it is parametrized"
    if isinstance(module, LazyModuleMixin):
        return "it is lazy: run the model once before"
    if own_base(kind) is not None:
        return ALREADY
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a program of TorchScript"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    if getattr(module, "qconfig", None) is not None:
        return "it is prepared for quantization"
    if any(p is not None and p.is_complex() for p in module._parameters.values()):
        return "its parameters are complex"
    return ""


def _members(kind: type[Module], base: type[Module]) -> tuple[tuple[type[Module], ...], Any]:
    """For a class that does the same work as a layer of torch.nn."""
    return (COUNTERPARTS[base], kind), {}


MAKERS["layer"] = _members

WORK = ("forward", "_conv_forward")
"""The methods that brim's layers override."""


def same_work(kind: type[Module], base: type[Module]) -> bool:
    """Whether a class computes by the same functions as another.

    Example:
        >>> class Mine(torch.nn.ReLU): ...
        >>> class Other(torch.nn.ReLU):
        ...     def forward(self, x): return x
        >>> same_work(Mine, torch.nn.ReLU), same_work(Other, torch.nn.ReLU)
        (True, False)
    """
    return all(getattr(kind, name, None) is getattr(base, name, None) for name in WORK)


def _matching(
    argument: str, choices: Choices, places: Mapping[Module, list[str]], inside: bool = True
) -> set[Module]:
    """The modules that any of the choices means; also those `inside` of what a type or name is."""
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
        found.update(module for root in roots for module in (root.modules() if inside else [root]))
    return found
