"""Which modules call functions that brim has, and the code or the region in which they are."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from brim import _C
from brim._C import gradient_pattern
from brim.nn._derived import MAKERS, Kind, Recipe, code_of, derived, original_of, recipe_of
from brim.nn._elsewhere import is_traced
from brim.nn._rewritten import HOMES, hides_calls, redirecting
from brim.nn.saving import (
    FUNCTIONS,
    SAVING_ALONE,
    SUM_OF_TWO_TYPES,
    Saving,
    hooks_in_force,
    redirected,
)

__all__ = [
    "calls_functions",
    "children_of_regions",
    "first_inside_regions",
    "leave_out",
    "leaving",
    "outside",
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
    methods = tuple(
        name for name, uses in _uses_of(type(module)).items() if uses.fit(module, recompute)
    )
    if methods and all(_is_plain(each, recompute) for each in module.modules()):
        return derived(type(module), Recipe("calls", methods))
    if not methods and any(map(_is_function, module.__dict__.values())):
        methods = ("forward",)
    return derived(type(module), Recipe("functions", methods)) if methods else None


def _is_plain(module: torch.nn.Module, recompute: bool) -> bool:
    """Whether the functions of brim that a module itself calls are all found in its code."""
    if any(map(callable, module.__dict__.values())) or parametrize.is_parametrized(module):
        return False
    kind = original_of(type(module)) or type(module)
    if getattr(torch.nn, kind.__name__, None) is kind or kind.__module__.startswith("brim.nn."):
        return True
    every = _uses_of(kind).values()
    return bool(every) and not any(each.need_region(module, recompute) for each in every)


def _members(
    change: Callable[[Any], Any], kind: Kind, *methods: str
) -> tuple[tuple[Kind, ...], Mapping[str, Any]]:
    changed = {name: change(getattr(kind, name)) for name in methods}
    return (kind,), {**changed, "_brim_recompute": None}


def _calling(work: Any) -> Any:
    """A method with brim's functions in place of torch's, for modules that need no region."""
    by_level = {level: redirecting(work, level) for level in _REGIONS}

    @functools.wraps(work)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return work(self, *args, **kwargs)
        own = by_level[self._brim_recompute]
        return outside(own, self, *args, **kwargs) if _depth() else own(self, *args, **kwargs)

    return run


_Way: TypeAlias = tuple[Any, ...]
_UNKNOWN: dict[_Way, int] = {}

# What was redirected in a first call.
_NOTHING, _LITTLE, _USEFUL = range(3)


def _region(work: Any) -> Any:
    # By module: whether a region is worth it, once for each way to run. A product of a tensor and a
    # number, or a branch that is never taken, makes it useless, and it costs time.
    verdicts: WeakKeyDictionary[Any, dict[_Way, int]] = WeakKeyDictionary()

    @functools.wraps(work)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_traced() or not torch.is_grad_enabled():
            return work(self, *args, **kwargs)
        way = (
            self.training,
            self._brim_recompute is not None,
            _is_any_autocast_enabled(),
            # What is frozen now may be trained later, and functions that kept nothing then keep.
            gradient_pattern(self, args, kwargs),
        )
        hooks = hooks_in_force()
        # A checkpoint runs its modules twice, and the same functions must be redirected in both.
        known = verdicts.get(self, _UNKNOWN).get(way) if hooks is None else _USEFUL
        if known == _LITTLE:
            return work(self, *args, **kwargs)
        if known == _NOTHING:
            return outside(work, self, *args, **kwargs)
        mode = _REGIONS[self._brim_recompute]
        inside = redirected.little
        found: list[Any] | None = [] if known is None else None
        entered = None if _around() is mode else mode
        state: tuple[Any, ...] = (found, hooks, [])
        # In C++, as Python could be interrupted between a mode's end and `finally`.
        result = _C.within(entered, redirected, _STATE, state, work, self, *args, **kwargs)
        if found is not None and _is_telling(result):
            useful = _WITH_RECOMPUTE if self._brim_recompute else SAVING_ALONE
            decided = verdicts.setdefault(self, {})
            decided[way] = _NOTHING
            if not useful.isdisjoint(found):
                decided[way] = _USEFUL
            elif found or redirected.little != inside:
                decided[way] = _LITTLE
                redirected.little += 1
            if SUM_OF_TWO_TYPES in found and redirected.last is not None:
                # It keeps less because the sum before it, of another module, is brim's too.
                last, last_way = redirected.last
                last[last_way] = _USEFUL
            if found:
                redirected.last = decided, way
        return result

    return run


_STATE = ("found", "hooks", "left")  # of `redirected`, which each region has for itself


def leaving(kind: Kind) -> Kind:
    """A class whose forward leaves the region around it where there is nothing to redirect.

    Inside of a region each call of torch takes longer.
    """
    return derived(kind, Recipe("leaving"))


def _leaving_members(kind: Kind) -> tuple[tuple[Kind, ...], Mapping[str, Any]]:
    work = kind.forward
    verdicts: WeakKeyDictionary[Any, dict[_Way, int]] = WeakKeyDictionary()

    @functools.wraps(work)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A checkpoint's second run must not leave the region if its first did not. And regions
        # redirect nothing inside a checkpoint, nor in what is left out.
        if is_traced() or hooks_in_force() is not None or redirected.hooks is not None:
            return work(self, *args, **kwargs)
        mode = _around()
        if mode is None:
            return work(self, *args, **kwargs)
        pattern = gradient_pattern(self, args, kwargs)
        way = (mode, self.training, _is_any_autocast_enabled(), pattern)
        if verdicts.get(self, _UNKNOWN).get(way) == _NOTHING:
            return outside(work, self, *args, **kwargs)
        found = redirected.found  # of the region around it, in its first call
        before = len(found or ()), redirected.little
        result = work(self, *args, **kwargs)
        if found is not None and _is_telling(result):
            same = (len(found), redirected.little) == before
            verdicts.setdefault(self, {})[way] = _NOTHING if same else _LITTLE
        return result

    return (kind,), {"forward": forward}


def _is_telling(result: Any) -> bool:
    """Whether a call shows what later ones will keep: it needed gradients and was no transform."""
    tensors = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
    needs_gradient = not tensors or any(each.requires_grad for each in tensors)
    return needs_gradient and not _transforms()


_WITH_RECOMPUTE = FUNCTIONS | {SUM_OF_TWO_TYPES}
_depth: Any = torch._C._len_torch_function_stack
_is_any_autocast_enabled: Any = torch._C._is_any_autocast_enabled
_transforms: Any = torch._C._functorch.get_interpreter_stack

MAKERS["calls"] = functools.partial(_members, _calling)
MAKERS["functions"] = functools.partial(_members, _region)
MAKERS["leaving"] = _leaving_members


def calls_functions(kind: Kind, *, inside: bool = False) -> bool:
    """Whether a class was made for functions that its code, or also modules `inside`, call."""
    recipe: Recipe | None = getattr(kind, "_brim_recipe", None)
    makers = ("functions", "leaving") if inside else ("calls", "functions", "leaving")
    return recipe is not None and recipe.maker in makers


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
            inside = inside or calls_functions(type(module), inside=True)
        waiting += [(child, inside) for child in module.children()]
    return found


def children_of_regions(modules: Collection[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """The modules among these that a region runs itself, or in a container of torch.nn."""
    regions = [each for each in modules if calls_functions(type(each), inside=True)]
    waiting = [child for each in regions for child in each.children()]
    seen: set[torch.nn.Module] = set()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        if type(module).__module__.startswith("torch.nn."):
            waiting += module.children()
        elif module in modules:
            yield module


def leave_out(module: torch.nn.Module) -> None:
    """Regions around a module no longer reach into it. Its class stays as it is."""
    if _leave not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_leave, prepend=True)
        module.register_forward_hook(_return, always_call=True)


def take_in(module: torch.nn.Module) -> None:
    """Undo `leave_out` and `leaving`."""
    recipe = recipe_of(type(module))
    if recipe is not None and recipe.maker == "leaving":
        module.__class__ = original_of(type(module))  # type: ignore[assignment]
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in (_leave, _return)]:
            del hooks[key]
            module._forward_hooks_always_called.pop(key, None)


def _leave(module: torch.nn.Module, args: Any) -> None:
    # An interrupt skips `_return`; the end of the region puts all of this back.
    if redirected.left is not None and not is_traced():
        redirected.left.append(redirected.hooks)
        redirected.hooks = _leave  # never in force, so that nothing is redirected


def _return(module: torch.nn.Module, args: Any, result: Any) -> None:
    if redirected.left and not is_traced():
        redirected.hooks = redirected.left.pop()


_REGIONS = {level: Saving(level, is_shared=True) for level in (None, "cheap", "products")}


def _around() -> Any:
    """The region of a module that functions called here are in; None if another mode is nearer."""
    depth = _depth()
    mode = torch._C._get_function_stack_at(depth - 1) if depth else None
    return mode if mode in _REGIONS.values() else None


def outside(work: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function that has nothing to redirect, not in the region of a module around it."""
    if _around() is None:
        return work(*args, **kwargs)
    return _C.without_mode(work, *args, **kwargs)


# -- Which modules call them ----------------------------------------------------------------------


_MANY = 40


@dataclass
class _Uses:
    """What a method does.

    Attributes:
        calls: functions of torch.
        multiplies: by what may be a tensor.
        adds: the same.
        factors: attributes that it multiplies by.
        attends: calls one of transformers' functions for attention.
        sums: adds, also in place.
        hides: calls what this does not look into, or functions as methods of tensors.
    """

    calls: bool = False
    multiplies: bool = False
    adds: bool = False
    attends: bool = False
    sums: bool = False
    hides: bool = False
    factors: set[str] = field(default_factory=set)

    def need_region(self, module: torch.nn.Module, recompute: bool) -> bool:
        """Whether not all that is redirected is a function that the code names."""
        sums = recompute and self.sums
        return self.hides or self.attends or sums or self._multiply(module)

    def _multiply(self, module: torch.nn.Module) -> bool:
        return self.multiplies or any(
            not isinstance(getattr(module, name, None), (int, float)) for name in self.factors
        )

    def fit(self, module: torch.nn.Module, recompute: bool) -> bool:
        """Whether a region around the method is worth it.

        Not for products and sums in a large container: everything inside would run in the region.
        """
        calls = self.calls or (self.attends and _drops(module))
        adds = self.adds and recompute and any(map(_normalises_rows, module.children()))
        is_small = sum(1 for _ in module.modules()) <= _MANY
        return calls or (is_small and (adds or self._multiply(module)))


def _drops(module: torch.nn.Module) -> bool:
    """Whether a module for attention has dropout; without, torch's kernels keep little."""
    rates = [value for name, value in vars(module).items() if "dropout" in name]
    rates += [each.p for each in module.children() if isinstance(each, torch.nn.Dropout)]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _normalises_rows(module: torch.nn.Module) -> bool:
    """Whether a module looks like a LayerNorm or an RMSNorm, as residual blocks have."""
    has_eps = hasattr(module, "eps") or hasattr(module, "variance_epsilon")
    return has_eps and not hasattr(module, "running_mean")


def _is_function(value: Any) -> bool:
    """Whether an attribute of a module is one of the functions, such as `self.act = F.relu`."""
    if isinstance(value, functools.partial):
        value = value.func
    return callable(value) and getattr(value, "__name__", "") in _NAMES


_NAMES = frozenset(name for each in FUNCTIONS if (name := getattr(each, "__name__", "")))
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
            if base is torch.nn.Module or function is None:
                continue
            uses = found.setdefault(name, _Uses())
            if code is None:
                uses.hides |= callable(function) or isinstance(function, property)
                continue
            # Behind a decorator, or with variables of a function around it (also `super()`).
            uses.hides |= function.__code__ is not code or bool(code.co_freevars)
            _add_uses(uses, code, function.__globals__)
            waiting += code.co_names
            if not {"super", name} & {*code.co_names}:  # else it may call that of its base
                break
    _uses[kind] = found
    return found


def _add_uses(uses: _Uses, code: CodeType, names: Mapping[str, Any]) -> None:
    for steps in _steps(code):
        for place, step in enumerate(steps):
            last, one_before = steps[place - 1], steps[place - 2]
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                is_called = step.argval in _NAMES and not _is_self(last)
                uses.calls |= is_called
                uses.hides |= is_called and not _is_of_torch(steps[:place], names)
            elif step.opname == "LOAD_GLOBAL":
                uses.calls |= step.argval in _NAMES
                uses.attends |= step.argval == "ALL_ATTENTION_FUNCTIONS"
                uses.hides |= hides_calls(step.argval, names)
            elif step.opname == "BINARY_MULTIPLY" or step.argrepr in ("*", "*="):
                if last.opname == "LOAD_ATTR" and _is_self(one_before):
                    uses.factors.add(last.argval)
                elif not _is_by_number(last, one_before):
                    uses.multiplies = True
            elif step.opname in ("BINARY_ADD", "INPLACE_ADD") or step.argrepr in ("+", "+="):
                uses.sums = True
                if step.opname != "INPLACE_ADD" and step.argrepr != "+=":
                    uses.adds |= not _is_by_number(last, one_before)
            elif step.opname == "IS_OP":
                uses.hides |= not _NAMES.isdisjoint((last.argval, one_before.argval))
            elif step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME"):
                uses.hides = True


def _is_of_torch(steps: list[dis.Instruction], names: Mapping[str, Any]) -> bool:
    """Whether an attribute is one of `torch`, `F`, `nn.functional` and the like."""
    at = len(steps) - 1
    while at > 0 and steps[at].opname == "LOAD_ATTR" and steps[at].argval in ("nn", "functional"):
        at -= 1
    root = names.get(steps[at].argval) if steps[at].opname == "LOAD_GLOBAL" else None
    return any(root is home for home in HOMES)


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
