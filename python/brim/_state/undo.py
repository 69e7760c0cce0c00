"""Models, optimizers and random generators as they were before a piece of work was measured."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

import torch
from torch.nn.parameter import is_lazy

from brim._state.random_state import RandomState
from brim._state.reach import Reachable
from brim._state.restorable import Restorable, collect, flat, writable
from brim._state.undoing import Undoing
from brim._state.watched import Watched
from brim._warn import warn

_T = TypeVar("_T")

#: True for what the work reaches, False for nothing, or what to put back.
Restore: TypeAlias = "bool | Restorable | Iterable[Restorable]"


class Undo(Undoing):
    """Puts back what a piece of work changes: values, gradients, modes, and the random state.

    Of a module, its parameters, their gradients and whether they require them, its buffers and
    whether it is in training mode; of an optimizer, its parameters and all of its state; and what
    schedulers and gradient scalers hold. Copies are in the host's memory and do not count as memory
    in use. Parameters that do not require gradients are copied only if `restore` names them or
    their module: a frozen model may be large.

    Args:
        restore: True for what the work's code, closure and arguments lead to, False for nothing, or
            modules, optimizers and the like as in `brim.Options`. The random state is kept in any
            case but False.
        work: the piece of work.

    Warns:
        UserWarning: with `restore=True`, if the work changed parameters that were not copied.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> before = layer.weight.tolist()
        >>> with Undo(True, lambda: layer.weight.data.zero_()) as undo:
        ...     _ = layer.weight.data.zero_()
        >>> layer.weight.tolist() == before, str(undo)
        (True, 'Linear and the random state')
    """

    def __init__(self, restore: Restore, *work: Callable[..., Any] | None) -> None:
        """Take copies of what is there now."""
        super().__init__()
        self._names: list[str] = []
        self._left: list[str] = []
        if restore is False:
            return
        random_state = RandomState()
        things = _reached(work) if restore is True else flat(restore)
        if any(isinstance(thing, str) for thing in things):
            raise TypeError(f"restore must name things, not arguments of the work, got {restore!r}")
        modules = [thing for thing in things if isinstance(thing, torch.nn.Module)]
        self._names = [
            "a pair" if isinstance(thing, tuple) else type(thing).__name__ for thing in things
        ]
        self._left = [
            f"{type(module).__name__}.{name}"
            for module in modules
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
            if is_lazy(tensor)
        ]
        parameters = [parameter for module in modules for parameter in module.parameters()]
        values, gradients, others = collect([*things, *parameters], [])
        frozen: dict[str, torch.Tensor] = {}
        if restore is True:
            frozen = _frozen(modules)
            self.afterwards(functools.partial(_tell_of_changes, Watched(frozen, known=gradients)))
        left = {id(tensor) for tensor in frozen.values()}
        copied = [
            tensor
            for tensor in _once(values)
            if id(tensor) not in left and not is_lazy(tensor) and not tensor.is_meta
        ]
        parts = _once(part for module in modules for part in module.modules())
        copies: dict[int, Any] = {}  # so that tensors that share memory share the copy
        calls = [
            *others,
            *(_values_of(tensor, copies) for tensor in copied),
            *(_gradient_of(tensor, copies) for tensor in _once(gradients)),
            *map(_mode_of, parts),
            random_state.put_back,
        ]
        for call in reversed(calls):  # the first is called first
            self.callback(call)

    def __str__(self) -> str:
        text = " and ".join(filter(None, [", ".join(self._names), "the random state"]))
        return text + (f", not {', '.join(self._left)} (not initialised)" if self._left else "")


def _tell_of_changes(watched: Watched) -> None:
    changed = watched.changed()
    if changed:
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        warn(
            f"the work changed parameters that are not put back: {', '.join(changed[:5])}"
            f"{more}; pass what to put back, such as restore=[model, optimizer]"
        )


def undisturbed(
    body: Callable[[], _T],
    model: torch.nn.Module | None,
    work: Callable[..., Any] | None = None,
    *,
    training: bool = False,
) -> _T:
    """`body()` in eval mode; modes, buffers and random state are put back, whatever happens.

    Args:
        body: what is run.
        model: its modules are.
        work: modules that it leads to are too.
        training: leave the modes as they are.
    """
    with Undoing() as undo:
        undo.callback(RandomState().put_back)
        modules = [*_reachable([work]).modules, *([] if model is None else [model])]
        parts = _once(part for module in modules for part in module.modules())
        buffers, _, others = collect(modules, [])
        copies: dict[int, Any] = {}
        for step in (
            *others,
            *(_values_of(each, copies) for each in _once(buffers) if not each.is_meta),
            *map(_mode_of, parts),
        ):
            undo.callback(step)
        for part in parts if not training else ():
            part.training = False
        return body()


def reached_modules(work: Callable[..., Any]) -> list[torch.nn.Module]:
    """The modules that a function leads to."""
    return list(_reachable([work]).modules)


def _reachable(work: Iterable[Callable[..., Any] | None]) -> Reachable:
    return Reachable(lambda: None, tuple(each for each in work if each is not None), {})


def _reached(work: Iterable[Callable[..., Any] | None]) -> list[Any]:
    found = _reachable(work)
    leaves = [tensor for tensor in found.tensors if tensor.requires_grad and tensor.is_leaf]
    inner = {part for module in found.modules for part in module.modules() if part is not module}
    modules = [module for module in found.modules if module not in inner]
    return [*modules, *found.optimizers, *found.helpers, *leaves]


def _once(things: Iterable[Any]) -> list[Any]:
    return list({id(thing): thing for thing in things}.values())


def _frozen(modules: Iterable[torch.nn.Module]) -> dict[str, torch.Tensor]:
    return {
        f"{type(module).__name__}.{name}": parameter
        for module in modules
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad and not is_lazy(parameter)
    }


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """What can be written; of a DTensor this rank's part."""
    return writable((tensor.to_local() if hasattr(tensor, "to_local") else tensor).data)


def _copy(tensor: torch.Tensor, copies: dict[int, Any]) -> torch.Tensor:
    memory = _memory_of(tensor)
    if memory.device.type != "cpu":
        return memory.to("cpu", copy=True)
    return copy.deepcopy(memory, copies)


def _values_of(tensor: torch.Tensor, copies: dict[int, Any]) -> Callable[[], None]:
    before = _copy(tensor, copies)

    def put_back() -> None:
        if before.layout == torch.strided:
            _memory_of(tensor).copy_(before)  # which leaves its version as it is
        else:
            tensor.data = before.to(tensor.device)

    return put_back


def _gradient_of(tensor: torch.Tensor, copies: dict[int, Any]) -> Callable[[], None]:
    # The gradient itself is not held: the work would have less memory if it drops it.
    before = None if tensor.grad is None else _copy(tensor.grad, copies)
    required = tensor.requires_grad

    def put_back() -> None:
        if tensor.requires_grad != required:
            if tensor.is_leaf:
                tensor.requires_grad_(required)
            elif not tensor._is_view():
                tensor.detach_()  # what the work added in place
        if before is None:
            tensor.grad = None
        elif before.layout != torch.strided:
            tensor.grad = before.to(tensor.device)
        else:
            if tensor.grad is None or tensor.grad.layout != torch.strided:
                tensor.grad = torch.empty_like(tensor, dtype=before.dtype, requires_grad=False)
            _memory_of(tensor.grad).copy_(before)

    return put_back


def _mode_of(module: torch.nn.Module) -> Callable[[], None]:
    training = module.training

    def put_back() -> None:
        module.training = training

    return put_back
