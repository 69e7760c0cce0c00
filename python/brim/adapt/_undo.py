"""Models, optimizers and random generators as they were before a piece of work was measured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch

from brim.adapt._restore import Restorable, collect, flat

#: True for what the work reaches, False for nothing, or what to put back.
Restore: TypeAlias = "bool | Restorable | Iterable[Restorable]"


class Undo:
    """Puts back what a piece of work changes: values, gradients, modes, and the random state.

    Of a module, its parameters, their gradients, its buffers and whether it is in training mode; of
    an optimizer, its parameters and all of its state; and what schedulers and gradient scalers
    hold. Copies are in the host's memory, which no count of tensors sees.

    Args:
        restore: True for what the work's code, closure and arguments lead to, False for nothing, or
            modules, optimizers and the like as in `brim.Options`. The random state is kept in any
            case but False.
        work: the piece of work.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> undo = Undo(True, lambda: layer.weight.data.zero_())
        >>> before = layer.weight.tolist()
        >>> _ = layer.weight.data.zero_()
        >>> undo.put_back()
        >>> layer.weight.tolist() == before, str(undo)
        (True, 'Linear and the random state')
    """

    def __init__(self, restore: Restore, *work: Callable[..., Any] | None) -> None:
        """Take copies of what is there now."""
        from brim.foresee._kept import Kept  # these import parts of torch that few need
        from brim.foresee._reach import HELPERS

        self._names: list[str] = []
        self._put_back: list[Callable[[], object]] = []
        if restore is False:
            return
        random = Kept()
        things = _reached(work) if restore is True else flat(restore)
        if any(isinstance(thing, str) for thing in things):
            raise TypeError(f"restore must name things, not arguments of the work, got {restore!r}")
        modules = [thing for thing in things if isinstance(thing, torch.nn.Module)]
        self._names = [
            "a pair" if isinstance(thing, tuple) else type(thing).__name__ for thing in things
        ]
        parameters = [parameter for module in modules for parameter in module.parameters()]
        things = [_state_of(thing) if isinstance(thing, HELPERS) else thing for thing in things]
        values, gradients, others = collect([*things, *parameters], [])
        self._put_back += others
        copies: dict[int, Any] = {}  # so that tensors that share memory share the copy
        self._put_back += [_values_of(tensor, copies) for tensor in _once(values)]
        self._put_back += [_gradient_of(tensor, copies) for tensor in _once(gradients)]
        self._put_back += [
            _mode_of(part)
            for part in _once(part for module in modules for part in module.modules())
        ]
        self._put_back.append(random.restore)

    def put_back(self) -> None:
        """Make everything as it was, and drop the copies."""
        for put_back in self._put_back:
            put_back()
        self._put_back.clear()

    def __str__(self) -> str:
        return " and ".join(filter(None, [", ".join(self._names), "the random state"]))


def _reached(work: Iterable[Callable[..., Any] | None]) -> list[Any]:
    from brim.foresee._reach import Reachable

    found = Reachable(lambda: None, tuple(each for each in work if each is not None), {})
    leaves = [tensor for tensor in found.tensors if tensor.requires_grad and tensor.is_leaf]
    inner = {part for module in found.modules for part in module.modules() if part is not module}
    modules = [module for module in found.modules if module not in inner]
    return [*modules, *found.optimizers, *found.helpers, *leaves]


def _state_of(helper: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """How a scheduler or a gradient scaler is put back."""
    return lambda: copy.deepcopy(helper.state_dict()), helper.load_state_dict


def _once(things: Iterable[Any]) -> list[Any]:
    return list({id(thing): thing for thing in things}.values())


def _copy(tensor: torch.Tensor, copies: dict[int, Any]) -> torch.Tensor:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if plain and tensor.device.type != "cpu":
        return tensor.detach().to("cpu", copy=True)
    return copy.deepcopy(tensor.detach(), copies)


def _values_of(tensor: torch.Tensor, copies: dict[int, Any]) -> Callable[[], object]:
    before = _copy(tensor, copies)
    return lambda: tensor.data.copy_(before)  # which leaves its version as it is


def _gradient_of(tensor: torch.Tensor, copies: dict[int, Any]) -> Callable[[], None]:
    # The gradient itself is not held: the work would have less memory if it drops it.
    before = None if tensor.grad is None else _copy(tensor.grad, copies)

    def put_back() -> None:
        if before is None:
            tensor.grad = None
        else:
            if tensor.grad is None:
                tensor.grad = torch.empty_like(before, device=tensor.device)
            tensor.grad.data.copy_(before)

    return put_back


def _mode_of(module: torch.nn.Module) -> Callable[[], None]:
    training = module.training

    def put_back() -> None:
        module.training = training

    return put_back
