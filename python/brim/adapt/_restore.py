"""What `restore=` names: collected here, copied and put back by the C++ core."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from brim._arguments import shown

PutBack: TypeAlias = Callable[[], object]

#: What can be put back, or the name of an argument that is one of these.
Restorable: TypeAlias = (
    "str | torch.Tensor | torch.nn.Module | Optimizer"
    " | tuple[Callable[[], Any], Callable[[Any], object]]"
)

_KINDS = (torch.Tensor, torch.nn.Module, Optimizer)
_ALLOWED = (
    "a module, an optimizer, a tensor, a pair of callables (save, put_back), the name of an "
    "argument that is one of these, or a list of them"
)


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
        else:
            save, put_back = thing
            self.put_back.append(functools.partial(put_back, save()))

    def _add_optimizer(self, optimizer: Optimizer) -> None:
        """Its state may not exist before the first step, and must not after one that was undone."""
        groups = [(group, _copied(group)) for group in optimizer.param_groups]
        state = {owner: _copied(own) for owner, own in optimizer.state.items()}
        for group in optimizer.param_groups:
            self.gradients.extend(group["params"])
        # Of the copies: pytree does not look into containers of classes of their own.
        leaves = tree_leaves([state, [group for _, group in groups]])
        self.values.extend(writable(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))

        def put_back() -> None:
            for owner in [owner for owner in optimizer.state if owner not in state]:
                del optimizer.state[owner]
            for owner, before in state.items():
                _refill(optimizer.state[owner], before)
            optimizer.param_groups[:] = [group for group, _ in groups]
            for group, before in groups:
                _refill(group, before)

        self.put_back.append(put_back)


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


def _copied(value: Any) -> Any:
    """Copies of the containers in `value`, which hold the same tensors."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return value


def _refill(container: dict[Any, Any], before: dict[Any, Any]) -> None:
    """A copy each time: the next attempt may change what was put back."""
    container.clear()
    container.update(_copied(before))


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
                f"restore names {name}, which must be a module, an optimizer, a tensor, a pair of "
                f"callables (save, put_back) or a list of them, got {shown(value)}"
            )
        things = [*things, *found]
    for thing in things:
        collected.add(thing)
    return collected.values, collected.gradients, collected.put_back
