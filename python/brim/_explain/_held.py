"""Who holds a device's memory now, as far as Python can tell."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from brim import _C
from brim._users_code import is_installed

Kind = _C.MemoryKind
_LASTING = (Kind.parameter, Kind.gradient, Kind.optimizer_state)
# A weight that is used so often in graphs that are alive: by as many calls, whose graphs something
# keeps, unless one call uses it in a loop.
_MANY_USES = 3


class Owner(NamedTuple):
    """What a storage is for, and whose it is."""

    kind: Kind
    where: str


class Held(NamedTuple):
    """Who holds what, largest first, and how much of it earlier calls have left in graphs."""

    holders: list[_C.Holder]
    grown: int


def held_on(device: torch.device, watch: _C.BlockWatch | None, began: int | None = None) -> Held:
    """All that is known: tensors that Python knows, and blocks noted by an open watch.

    `began` is when the call that failed began, by the watch's clock: what was made since has not
    been left by an earlier one.
    """
    live = _Live()
    owners = _owners(live, device)
    tensors = _storages(live.tensors, device)
    known = _C.held_by_python(live.tensors)
    in_python = _storages(known, device)
    in_graph = _storages((each for each in known if each.grad_fn is not None), device)
    uses = _C.uses_of_weights(live.tensors)
    noted = {} if watch is None else {block[0]: block for block in watch.blocks()}
    clock = 0 if watch is None else watch.clock
    blocks, in_graphs = list[_C.HeldBlock](), 0
    for address in (*noted, *(each for each in tensors if each not in noted)):
        _, size, made_at, place = noted.get(address, (0, tensors.get(address, 0), -1, ""))
        kind, where = owners.get(address, Owner(Kind.other, place))
        if kind is Kind.other and address not in in_python:  # held by C++ alone
            kind = Kind.temporary if place.startswith("backward of") else Kind.activation
        for_backward = kind is Kind.activation or address in in_graph
        # What one call keeps until it ends does not grow. If nobody says when a call began: of
        # graphs, how often they use a weight; of the rest, that the program's own line keeps it.
        if began is not None:
            one_call = made_at < 0 or made_at >= began
        else:
            one_call = uses < _MANY_USES if for_backward else is_installed(where)
        in_graphs += size if for_backward and not one_call else 0
        blocks.append(_C.HeldBlock(size, made_at, kind, where, kind in _LASTING or one_call))
    left = in_graphs if began is not None else int(in_graphs * (1 - 1 / max(uses, 1)))
    return Held(_C.holders_of(blocks, clock), left)


def _is_being_made(each: Any) -> bool:
    """Whether it has no attributes yet, such as a copy of a module that ran out of memory."""
    return not isinstance(each, torch.Tensor) and not each.__dict__


class _Live:
    """What Python's garbage collector knows that matters here."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.modules: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        of_type: dict[type, list[Any] | None] = {}
        for each in _C.live_objects(torch.Tensor, torch.nn.Module, torch.optim.Optimizer):
            kind = type(each)  # not isinstance(), which would ask proxies what they stand for
            if kind not in of_type:
                of_type[kind] = self._list_for(kind)
            found = of_type[kind]
            if found is not None and not _is_being_made(each):
                found.append(each)

    def _list_for(self, kind: type) -> list[Any] | None:
        if issubclass(kind, torch.Tensor):
            return self.tensors
        if issubclass(kind, torch.nn.Module):
            return self.modules
        return self.optimizers if issubclass(kind, torch.optim.Optimizer) else None


def _owners(live: _Live, device: torch.device) -> dict[int, Owner]:
    """Storages of modules and optimizers by address; of a module inside another, the outer one."""
    inner = {id(child) for each in live.modules for child in each._modules.values()}
    owners: dict[int, Owner] = {}

    def add(tensors: Any, kind: Kind, where: str) -> None:
        for address in _storages(tensors, device):
            owners.setdefault(address, Owner(kind, where))

    for module in live.modules:
        if id(module) in inner:
            continue
        name, weights = type(module).__name__, list(module.parameters())
        add((*weights, *module.buffers()), Kind.parameter, name)
        add(_C.gradients_of(weights), Kind.gradient, name)
    for each in live.optimizers:
        states = [value for state in each.state.values() for value in state.values()]
        add(states, Kind.optimizer_state, type(each).__name__)
        weights = [one for group in each.param_groups for one in group["params"]]
        add(weights, Kind.parameter, type(each).__name__)
        add(_C.gradients_of(weights), Kind.gradient, type(each).__name__)
    return owners


def _storages(tensors: Any, device: torch.device) -> dict[int, int]:
    """The bytes of the storages that these have on a device, by address."""
    found: dict[int, int] = {}
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            continue
        try:  # not all have a storage
            if tensor.device == device and _C.is_counted(tensor):
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        except (RuntimeError, NotImplementedError, AttributeError, ReferenceError):
            continue
    found.pop(0, None)
    return found
