"""Measures what a model keeps for backward, operation by operation."""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from brim._state.random_state import RandomState
from brim._state.undoing import Undoing, set_buffers, undo_modes, undo_modules
from brim.nn._lower_bound import Need, least, nodes_behind, refine
from brim.nn._values import Place, Values, bytes_of, identity
from brim.nn.saving import watch

__all__ = ["MODEL", "Run", "measure", "with_sizes"]

MODEL = "(model)"
"""The name of the model itself, which has none."""


class _Kept:
    """A tensor that autograd keeps, for as long as it does."""

    def __init__(self, tensor: Tensor, place: Place, need: Need | None) -> None:
        self.tensor = tensor.detach()  # an output would hold its own graph
        self.place = place
        self.need = need


class Run:
    """What one forward kept.

    Attributes:
        called: the modules that ran, with their classes at that time, in the order of their first
            call.
        places: where something may have been kept, in order: modules without others inside, and
            operations.
        bytes: kept at each place; a storage counts for the place that keeps it first.
        least: what has to be kept if only cheap operations run again; None if that was not asked.
    """

    def __init__(self) -> None:
        self.called: dict[str, type[torch.nn.Module]] = {}
        self.places: dict[Place, None] = {}
        self.bytes: dict[Place, int] = {}
        self.least: dict[Place, int] | None = None
        self.values: Values | None = None
        self._kept: list[weakref.ref[_Kept]] = []
        self._stack: list[Place] = [(MODEL, "")]

    def place(self) -> Place:
        """Where the run is now."""
        return self._stack[-1]

    def pack(self, tensor: Tensor) -> _Kept:
        """For autograd's hooks: hold the tensor as long as autograd does."""
        place = self.place()
        need = None
        if self.values is not None:
            need = Need(self.values.part(tensor, place), place, tensor.numel())
        kept = _Kept(tensor, place, need)
        self._kept.append(weakref.ref(kept))
        self.places.setdefault(place)
        return kept

    def watch(self, name: str, module: torch.nn.Module) -> None:
        """Notice each call of a module.

        By its forward, not by hooks: brim's layers leave modules with hooks alone.
        """
        work = module.forward

        @functools.wraps(work)  # some look at its signature
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.called.setdefault(name, type(module))
            if next(module.children(), None) is None:
                self.places.setdefault((name, ""))
            self._stack.append((name, ""))
            try:
                return work(*args, **kwargs)
            finally:
                self._stack.pop()

        vars(module)["forward"] = forward

    def operation(self, name: str, work: Callable[[], Any]) -> Any:
        """Run an operation of the module at hand."""
        self._stack.append((self.place()[0], name))
        try:
            return work()
        finally:
            self._stack.pop()

    def count(self, left_out: list[Tensor], output: Any) -> None:
        """Count what is kept now; storages of `left_out` do not count."""
        kept = [each for reference in self._kept if (each := reference()) is not None]
        counted = {identity(tensor)[0] for tensor in left_out}
        for each in kept:
            key, _ = identity(each.tensor)
            if key not in counted:
                counted.add(key)
                self.bytes[each.place] = self.bytes.get(each.place, 0) + bytes_of(each.tensor)
        if self.values is not None:
            for node in nodes_behind(_tensors_in(output)):
                refine(node, self.values, _needs_of(node))
            needs = [each.need for each in kept if each.need is not None]
            self.least = least(self.values, needs)


class _Operations(TorchFunctionMode):
    """Tells a run which function of torch is called. Functions inside of it do not count."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # "mul" for Tensor.__mul__ and "relu" for relu_ and brim::relu.default
        name = getattr(func, "__name__", "").split(".")[0].strip("_")
        return self._run.operation(name, functools.partial(func, *args, **(kwargs or {})))


def _needs_of(node: Any) -> dict[str, Need]:
    """What a node keeps, by name."""
    needs = {}
    prefix = "_raw_saved_"
    for name in dir(node):
        if name.startswith(prefix):
            kept = getattr(getattr(node, name), "data", None)
            if isinstance(kept, _Kept) and kept.need is not None:
                needs[name.removeprefix(prefix)] = kept.need
    return needs


def _tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors in what a model returned; also in objects that are no containers."""
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (type, torch.nn.Module)):
            yield from (each for each in vars(leaf).values() if isinstance(each, Tensor))


def measure(
    model: torch.nn.Module,
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    find_least: bool = False,
) -> Run:
    """Run the model forward once and count what it keeps.

    Afterwards buffers, random state and gradients are as before. Parameters, buffers and the inputs
    do not count.

    Args:
        model: any module.
        inputs: of its call.
        kwargs: of its call.
        find_least: whether to find the least that has to be kept too.
    """
    run = Run()
    # First, so that the copies are tensors for autograd.
    with Undoing() as undo, torch.inference_mode(False), torch.enable_grad():
        undo_modes(undo)
        inputs, kwargs, tensors = _copied(inputs, dict(kwargs))
        undo.callback(RandomState().put_back)
        undo_modules(undo, model)
        _lend_buffers(model)
        for name, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                run.watch(name or MODEL, module)
        run.values = Values(run.place) if find_least else None
        with Undoing() as hooks, _Operations(run), run.values or contextlib.nullcontext():
            watch(hooks, run.pack, attrgetter("tensor"))
            output = model(*inputs, **kwargs)
        run.count([*tensors, *model.parameters(), *model.buffers()], output)
        del output
    return run


def with_sizes(
    model: torch.nn.Module, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.nn.Module:
    """The model, or a copy that has run once if it has lazy layers without their sizes.

    Example:
        >>> model = torch.nn.LazyLinear(3)
        >>> with_sizes(model, (torch.ones(2, 5),), {})
        Linear(in_features=5, out_features=3, bias=True)
        >>> model
        LazyLinear(in_features=0, out_features=3, bias=True)
    """
    tensors = [*model.parameters(), *model.buffers()]
    lazy: list[Any] = [tensor for tensor in tensors if is_lazy(tensor)]
    if not lazy:
        return model
    # torch cannot copy buffers that have no size yet.
    fresh: Any = {
        id(each): type(each)(each.requires_grad, each.data.device, each.data.dtype) for each in lazy
    }
    model = copy.deepcopy(model, fresh)
    inputs, kwargs, _ = _copied(inputs, dict(kwargs))
    with Undoing() as undo, torch.no_grad():
        undo.callback(RandomState().put_back)
        model(*inputs, **kwargs)
    return model


def _copied(
    inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
    """The inputs with copies of their tensors, which the model may change, and these copies."""
    copies: dict[int, Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in copies:  # a tensor that is given twice stays one tensor
            leaf = value.detach().clone().requires_grad_(value.requires_grad)
            copies[id(value)] = leaf if value.is_leaf else leaf.clone()
        return copies[id(value)]

    inputs, kwargs = pytree.tree_map(copied, (inputs, kwargs))
    return inputs, kwargs, list(copies.values())


def _lend_buffers(model: torch.nn.Module) -> None:
    """Give the model copies of its buffers, so that running statistics do not change."""
    copies: dict[int, Tensor] = {}
    for module in model.modules():
        own = {name: each for name, each in module._buffers.items() if each is not None}
        for buffer in own.values():
            if id(buffer) not in copies:
                copies[id(buffer)] = buffer.detach().clone()
        set_buffers(module, {name: copies[id(each)] for name, each in own.items()})
