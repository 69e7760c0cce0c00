"""What `restore=` names: collected here, copied and put back by the C++ core."""

from __future__ import annotations

import functools
import operator
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from brim import _C
from brim._arguments import shown
from brim._state.kept import Kept
from brim._state.reach import HELPERS, Reachable

PutBack: TypeAlias = Callable[[], object]

#: What can be put back, or the name of an argument that is one of these.
Restorable: TypeAlias = (
    "str | torch.Tensor | torch.nn.Module | Optimizer | LRScheduler | GradScaler"
    " | tuple[Callable[[], Any], Callable[[Any], object]]"
)

_KINDS = (torch.Tensor, torch.nn.Module, Optimizer, *HELPERS)
_THINGS = (
    "a module, an optimizer, a tensor, a learning-rate scheduler, a GradScaler, a pair of "
    "callables (save, put_back)"
)
_ALLOWED = f"{_THINGS}, the name of an argument that is one of these, or a list of them"


def _is_pair(thing: object) -> bool:
    return (
        isinstance(thing, tuple)
        and len(thing) == 2
        and all(callable(each) and not isinstance(each, _KINDS) for each in thing)
    )


def flat(restore: object) -> list[Any]:
    """The things that `restore` names, one by one, checked."""
    if isinstance(restore, (str, *_KINDS)) or _is_pair(restore):
        return [restore]
    if isinstance(restore, Iterable) and not isinstance(restore, (bytes, dict)):
        return [thing for each in restore for thing in flat(each)]
    raise TypeError(f"restore must be {_ALLOWED}, got {shown(restore)}")


class _Collected:
    """Tensors whose values or gradients are kept, and what else is called to put things back."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []
        self.put_back: list[PutBack] = []
        self.known: set[int] = set()  # by address: schedulers and others hold each other
        self._containers = Kept(self.put_back.append)

    def add(self, thing: Any) -> None:
        if isinstance(thing, torch.Tensor):
            self.values.append(writable(thing))
            self.gradients.append(thing)
        elif isinstance(thing, torch.nn.Module):
            self.gradients.extend(thing.parameters())
            self.values.extend(writable(each) for each in thing.buffers() if not is_lazy(each))
            self.put_back.extend(map(members_of, thing.modules()))
        elif isinstance(thing, Optimizer):
            self._add_optimizer(thing)
        elif isinstance(thing, HELPERS):
            self._add_helper(thing)
        else:
            save, put_back = thing
            self.put_back.append(functools.partial(put_back, save()))

    def _is_new(self, thing: object) -> bool:
        new = id(thing) not in self.known
        self.known.add(id(thing))
        return new

    def _add_optimizer(self, optimizer: Optimizer) -> None:
        """Its state may not exist before the first step, and must not after one that was undone."""
        if not self._is_new(optimizer):
            return
        for group in optimizer.param_groups:
            self.gradients.extend(group["params"])
        self._keep(optimizer.state)
        self._keep(optimizer.param_groups)
        attributes = vars(optimizer)  # a scaler adds some for the time of a step
        self._containers.keep(attributes)
        for inner in attributes.values():  # of an optimizer that wraps another
            if isinstance(inner, (Optimizer, *HELPERS)):
                self.add(inner)

    def _add_helper(self, helper: Any) -> None:
        """All attributes: the state_dict of a scaler lacks how far each optimizer's step is."""
        if not self._is_new(helper):
            return
        self._keep(vars(helper))
        for function in getattr(helper, "lr_lambdas", ()):
            if hasattr(function, "__dict__") and not isinstance(function, types.FunctionType):
                self._keep(vars(function))

    def _keep(self, value: Any) -> None:
        """What containers hold, and tensors in them."""
        if isinstance(value, torch.Tensor):
            self.values.append(writable(value))
        elif isinstance(value, (dict, list, deque, tuple)):
            if not isinstance(value, tuple):
                self._containers.keep(value)
            for each in value.values() if isinstance(value, dict) else value:
                self._keep(each)
        elif isinstance(value, HELPERS):
            self._add_helper(value)
        elif isinstance(value, Optimizer) and id(value) not in self.known:
            for group in value.param_groups:  # a scheduler's: without the parameters
                options = {name: each for name, each in group.items() if name != "params"}
                self.put_back.append(functools.partial(_set_options, group, options))
                self._keep(tuple(options.values()))


def _set_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    for name in group.keys() - options.keys() - {"params"}:
        del group[name]
    group.update(options)


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or one element of each expanded dimension: a whole one cannot be written."""
    is_plain = tensor.layout == torch.strided and not tensor.is_nested and not is_lazy(tensor)
    if is_plain and 0 in tensor.stride():
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dim] > 1:
                tensor = tensor.data.narrow(dim, 0, 1)
    return tensor


def members_of(module: torch.nn.Module) -> PutBack:
    """Which are its parameters, buffers and parts: the work may assign others, or add some."""
    kept: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module._modules)
    before = [dict(each) for each in kept]
    temporary = set(module._non_persistent_buffers_set)

    def put_back() -> None:
        for now, then in zip(kept, before, strict=True):
            same = [*now] == [*then] and all(map(operator.is_, now.values(), then.values()))
            # Sharding exchanges parameters too, and keeps track of them itself.
            if not same and not any(hasattr(tensor, "to_local") for tensor in then.values()):
                now.clear()
                now.update(then)
        module._non_persistent_buffers_set = set(temporary)

    return put_back


def collect(
    things: list[Any], named: list[tuple[str, Any]]
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[PutBack]]:
    """Tensors whose values are to be kept, tensors whose gradients are, and what else to call.

    Of things as `flat` returns them, and of arguments of the call, which are checked here.
    """
    collected = _Collected()
    for name, value in named:
        try:
            found = flat(value)
        except TypeError:
            found = [""]
        if any(isinstance(thing, str) for thing in found):
            raise TypeError(
                f"restore names {name}, which must be {_THINGS} or a list of them, "
                f"got {shown(value)}"
            )
        things = [*things, *found]
    for thing in things:
        collected.add(thing)
    return collected.values, collected.gradients, collected.put_back


def unnamed(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    things: list[Any] | None,
    named: list[Any],
) -> list[str]:
    """Kinds of scalers and schedulers that a call reaches and `restore=` does not name.

    Without `restore=` only scalers: one that is left between its steps makes gradients wrong.

    Args:
        function: what is called,
        args: with these
        kwargs: and these.
        things: as `flat` returns them; None without `restore=`.
        named: values of arguments that `restore=` names.
    """
    found = Reachable(function, args, kwargs).helpers
    if not found:
        return []
    known = _Collected()
    pairs: list[Any] = []
    for thing in flat([things or [], named]):
        if isinstance(thing, (*HELPERS, Optimizer)):
            known.add(thing)
        elif isinstance(thing, tuple) and not _is_incomplete(thing[0]):
            pairs.extend(thing)
    by_pairs = {id(helper) for helper in Reachable(lambda: None, tuple(pairs), {}).helpers}
    kinds = {
        type(helper).__name__: None
        for helper in found
        if id(helper) not in known.known | by_pairs
        and (helper.is_enabled() if isinstance(helper, GradScaler) else things is not None)
    }
    return list(kinds)


def _is_incomplete(save: Any) -> bool:
    """A scaler's `state_dict`, which lacks how far the step of each optimizer is."""
    return isinstance(save, types.MethodType) and isinstance(save.__self__, GradScaler)


_C.provide(collect=collect, unnamed=unnamed)
