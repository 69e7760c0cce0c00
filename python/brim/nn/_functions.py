"""Which modules call functions that brim has: their methods are regions of `brim.saving()`."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional
from torch.compiler import is_compiling

from brim import _C
from brim.nn import functional
from brim.nn._blocks import run_again
from brim.nn._compiled import in_compiled_code
from brim.nn._derived import MAKERS, Kind, Recipe, code_of, derived

__all__ = [
    "as_block",
    "calls_functions",
    "first_inside_regions",
    "leave_out",
    "take_in",
    "with_functions",
]


def with_functions(module: torch.nn.Module, recompute: bool = False) -> Kind | None:
    """A class in which the methods that call functions are regions of `brim.saving()`.

    None if the module itself calls none; its children do not count. With `recompute`, sums around
    normalisation layers count too.

    Example:
        >>> class Gate(torch.nn.Module):
        ...     def forward(self, x): return x * torch.sigmoid(x)
        >>> with_functions(Gate()).__name__
        'Gate'
        >>> with_functions(torch.nn.Sequential(Gate()))
    """
    methods = _methods_with_functions(module, recompute)
    return derived(type(module), Recipe("functions", methods)) if methods else None


def as_block(module: torch.nn.Module, functions: bool) -> tuple[Kind, bool]:
    """The same for a module that can run again as a whole, and whether it calls functions."""
    methods = _methods_with_functions(module, recompute=True) if functions else ()
    recipe = Recipe("functions", (*(name for name in methods if name != "forward"), "forward"))
    return derived(type(module), recipe), bool(methods)


def _methods_with_functions(module: torch.nn.Module, recompute: bool) -> tuple[str, ...]:
    methods = tuple(
        name for name, uses in _uses_of(type(module)).items() if uses.fit(module, recompute)
    )
    if not methods and any(map(_is_function, module.__dict__.values())):
        methods = ("forward",)
    return methods


def _members(kind: Kind, *methods: str) -> tuple[tuple[Kind, ...], Mapping[str, Any]]:
    changed = {name: _region(getattr(kind, name)) for name in methods}
    if "forward" in changed:
        changed["forward"] = _block(kind.forward, changed["forward"])
    return (kind,), {**changed, "_brim_recompute": None, "_brim_block": None}


def _block(work: Any, region: Any) -> Any:
    @functools.wraps(work)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._brim_block is None or is_compiling():
            return region(self, *args, **kwargs)
        level: Any = self._brim_recompute if self._brim_block == "region" else False
        return _C.within_block(level, run_again, work, self, *args, **kwargs)

    return run


def _region(work: Any) -> Any:
    @functools.wraps(work)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if in_compiled_code(self._brim_recompute):
            return work(self, *args, **kwargs)
        return _C.within(self._brim_recompute, work, self, *args, **kwargs)

    return run


MAKERS["functions"] = _members


def calls_functions(kind: Kind) -> bool:
    """Whether a class was made for functions that its code calls."""
    recipe: Recipe | None = getattr(kind, "_brim_recipe", None)
    return recipe is not None and recipe.maker == "functions"


def first_inside_regions(
    model: torch.nn.Module, left_out: Collection[torch.nn.Module]
) -> set[torch.nn.Module]:
    """Of the modules that are left out those that a region around them would reach."""
    found: set[torch.nn.Module] = set()
    seen: set[tuple[torch.nn.Module, bool]] = set()
    waiting = [(model, False)]
    while waiting:
        module, inside = waiting.pop()
        if (module, inside) in seen:
            continue
        seen.add((module, inside))
        if module in left_out:
            if inside:
                found.add(module)
            inside = False
        else:
            inside = inside or calls_functions(type(module))
        waiting += [(child, inside) for child in module.children()]
    return found


def leave_out(module: torch.nn.Module) -> None:
    """Regions around a module no longer reach into it. Its class stays as it is."""
    if _leave not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_leave, prepend=True)
        module.register_forward_hook(_return, always_call=True)


def take_in(module: torch.nn.Module) -> None:
    """Undo `leave_out`."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in (_leave, _return)]:
            del hooks[key]
            module._forward_hooks_always_called.pop(key, None)


def _leave(module: torch.nn.Module, args: Any) -> None:
    if not is_compiling():
        _C.leave_region()


def _return(module: torch.nn.Module, args: Any, result: Any) -> None:
    if not is_compiling():
        _C.come_back()


# -- Which modules call them ----------------------------------------------------------------------


@dataclass
class _Uses:
    """What a method does.

    Attributes:
        calls: functions of torch.
        multiplies: by what may be a tensor.
        adds: the same.
        factors: attributes that it multiplies by.
        attends: calls one of transformers' functions for attention.
    """

    calls: bool = False
    multiplies: bool = False
    adds: bool = False
    attends: bool = False
    factors: set[str] = field(default_factory=set)

    def fit(self, module: torch.nn.Module, recompute: bool) -> bool:
        """Whether the method does something that a region changes."""
        attends = self.attends and recompute
        adds = self.adds and recompute and any(map(_normalises_rows, module.children()))
        return self.calls or attends or adds or self._multiply(module)

    def _multiply(self, module: torch.nn.Module) -> bool:
        return self.multiplies or any(
            not isinstance(getattr(module, name, None), (int, float)) for name in self.factors
        )


def _normalises_rows(module: torch.nn.Module) -> bool:
    """Whether a module looks like a LayerNorm or an RMSNorm, as residual blocks have."""
    has_eps = hasattr(module, "eps") or hasattr(module, "variance_epsilon")
    return has_eps and not hasattr(module, "running_mean")


def _is_function(value: Any) -> bool:
    """Whether an attribute of a module is one of the functions, such as `self.act = F.relu`."""
    if isinstance(value, functools.partial):
        value = value.func
    return callable(value) and getattr(value, "__name__", "") in _NAMES


_COMPOSED = ("softsign",)  # of other operators, in torch's Python: a region does not see it
_OWN = [
    name
    for name in functional.__all__
    if hasattr(torch.nn.functional, name) and name not in _COMPOSED
]
_OTHERS = ("mul", "multiply", "scaled_dot_product_attention", "multi_head_attention_forward")
_NAMES = frozenset([*_OWN, *(name + "_" for name in _OWN), *_OTHERS])
_uses: WeakKeyDictionary[Kind, dict[str, _Uses]] = WeakKeyDictionary()


def _uses_of(kind: Kind) -> dict[str, _Uses]:
    """What the forward of a class does, and the methods that it calls."""
    if kind in _uses:
        return _uses[kind]
    found: dict[str, _Uses] = {}
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        for base in kind.__mro__ if name not in found else ():
            function = base.__dict__.get(name)
            # No static methods and the like: a region needs the module.
            code = code_of(function) if inspect.isfunction(function) else None
            if base is torch.nn.Module or code is None:
                continue
            _add_uses(found.setdefault(name, _Uses()), code)
            waiting += code.co_names
            if not {"super", name} & {*code.co_names}:  # else it may call that of its base
                break
    _uses[kind] = found
    return found


def _add_uses(uses: _Uses, code: CodeType) -> None:
    for steps in _steps(code):
        for place, step in enumerate(steps):
            last, one_before = steps[place - 1], steps[place - 2]
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                uses.calls |= step.argval in _NAMES and not _is_self(last)
            elif step.opname == "LOAD_GLOBAL":
                uses.calls |= step.argval in _NAMES
                uses.attends |= step.argval == "ALL_ATTENTION_FUNCTIONS"
            elif step.opname == "BINARY_MULTIPLY" or step.argrepr in ("*", "*="):
                if last.opname == "LOAD_ATTR" and _is_self(one_before):
                    uses.factors.add(last.argval)
                elif not _is_by_number(last, one_before):
                    uses.multiplies = True
            elif step.opname == "BINARY_ADD" or step.argrepr == "+":
                uses.adds |= not _is_by_number(last, one_before)


def _is_by_number(last: dis.Instruction, one_before: dis.Instruction) -> bool:
    """Whether one of the two that are multiplied or added is a number in the code."""
    return last.opname == "LOAD_CONST" or (_is_variable(last) and one_before.opname == "LOAD_CONST")


def _steps(code: CodeType) -> Iterator[list[dis.Instruction]]:
    """The instructions of some code, and of the code inside of it."""
    yield [step for step in dis.get_instructions(code) if step.opname not in _NO_WORK]
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _steps(inner)


_NO_WORK = frozenset(["CACHE", "PRECALL", "RESUME", "EXTENDED_ARG"])


def _is_variable(step: dis.Instruction) -> bool:
    return step.opname.startswith("LOAD_FAST")


def _is_self(step: dis.Instruction) -> bool:
    # From Python 3.13 on, one instruction may load two variables.
    return _is_variable(step) and "self" in (step.argval, step.argval[-1])
