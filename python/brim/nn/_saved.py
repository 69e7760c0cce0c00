"""Measures what a model keeps for backward, layer by layer."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from brim.nn._lower_bound import Need, needs_of
from brim.nn.convert import is_layer

__all__ = ["FUNCTIONS", "Run", "measure", "with_sizes"]

FUNCTIONS = "(functions)"
"""Stands for everything outside of any layer."""


class _Kept:
    """A tensor that autograd keeps, for as long as it does."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an output would hold its own graph


class Run:
    """What one forward kept.

    Attributes:
        called: the layers that ran, in the order of their first call.
        bytes: kept by each layer; a storage counts for the layer that keeps it first.
        least: what backward needs of each layer if nothing is recomputed.
    """

    def __init__(self) -> None:
        self.called: dict[str, torch.nn.Module] = {}
        self.bytes: dict[str, int] = {}
        self.least: dict[str, int] = {}
        self._events: list[tuple[str, weakref.ref[_Kept] | Need]] = []  # with their layers
        self._stack: list[str] = []

    def pack(self, tensor: Tensor) -> _Kept:
        """For autograd's hooks: hold the tensor as long as autograd does."""
        kept = _Kept(tensor)
        self._events.append((self._stack[-1] if self._stack else FUNCTIONS, weakref.ref(kept)))
        return kept

    def unpack(self, kept: _Kept) -> Tensor:
        """For autograd's hooks."""
        return kept.tensor

    def watch(self, undo: contextlib.ExitStack, name: str, module: torch.nn.Module) -> None:
        """Notice each call of a layer, until `undo` is closed."""

        def begin(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            self.called.setdefault(name, module)
            self._stack.append(name)

        def end(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._stack.pop()
            given = args[0] if args else next(iter(kwargs.values()), None)
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
            # Other hooks (checkpoint, save_on_cpu) keep it elsewhere.
            if hooks is not None and hooks[0] == self.pack:
                self._events += [(name, need) for need in needs_of(module, given, output) or ()]

        before = module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
        after = module.register_forward_hook(end, with_kwargs=True, always_call=True)
        undo.callback(before.remove)
        undo.callback(after.remove)

    def count(self, left_out: list[Tensor]) -> None:
        """Count what is kept now; storages of `left_out` do not count."""
        known = {name for name, module in self.called.items() if needs_of(module) is not None}
        kept: list[tuple[str, Tensor]] = []
        needs: list[tuple[str, Need]] = []
        for layer, event in self._events:
            if isinstance(event, Need):
                needs.append((layer, event))
            elif (alive := event()) is not None:
                kept.append((layer, alive.tensor))
                if layer not in known:
                    needs.append((layer, Need(alive.tensor, _address(alive.tensor)[1])))
        self._count_bytes(kept, left_out)
        self._count_least(needs, left_out)

    def _count_bytes(self, kept: list[tuple[str, Tensor]], left_out: list[Tensor]) -> None:
        counted = {_address(tensor)[0] for tensor in left_out}
        for layer, tensor in kept:
            key, size = _address(tensor)
            if key not in counted:
                counted.add(key)
                self.bytes[layer] = self.bytes.get(layer, 0) + size

    def _count_least(self, needs: list[tuple[str, Need]], left_out: list[Tensor]) -> None:
        counted = {(Need(tensor, 0).identity, None) for tensor in left_out}
        parts: dict[Any, dict[Any, int]] = {}
        for _, need in needs:
            if need.key is not None:
                parts.setdefault(need.key, {})[need.part] = need.size
        whole = parts.keys() | counted
        for layer, need in needs:
            if need.instead is not None and (need.instead, None) in whole:
                continue
            size = need.size
            if need.key is not None:
                if need.key in counted:
                    continue
                counted.add(need.key)
                size = min(need.most, sum(parts[need.key].values()))
            self.least[layer] = self.least.get(layer, 0) + size


def _address(tensor: Tensor) -> tuple[Any, int]:
    """What identifies the storage of a tensor, and its bytes."""
    try:
        storage = tensor.untyped_storage()
        # Tensors without memory (meta) all have the address 0.
        return (tensor.device, storage.data_ptr() or storage._cdata), storage.nbytes()
    except (NotImplementedError, RuntimeError):  # sparse tensors and the like have no storage
        return (tensor.device, id(tensor)), tensor.numel() * tensor.element_size()


def measure(model: torch.nn.Module, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run:
    """Run the model forward once and count what it keeps.

    Afterwards buffers, random state and gradients are as before. Parameters, buffers and the inputs
    do not count.
    """
    run = Run()
    with contextlib.ExitStack() as undo:
        # First, so that the copies are tensors for autograd.
        undo.enter_context(torch.inference_mode(False))
        undo.enter_context(torch.enable_grad())
        inputs, kwargs, tensors = _copied(inputs, dict(kwargs))
        undo.enter_context(_random_state([*tensors, *model.parameters(), *model.buffers()]))
        undo.enter_context(_own_buffers(model))
        for name, module in model.named_modules():
            if is_layer(module) and not isinstance(module, torch.jit.ScriptModule):
                run.watch(undo, name or type(module).__name__, module)
        with torch.autograd.graph.saved_tensors_hooks(run.pack, run.unpack):
            output = model(*inputs, **kwargs)
        run.count([*tensors, *model.parameters(), *model.buffers()])
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
    inputs, kwargs, copies = _copied(inputs, dict(kwargs))
    with torch.no_grad(), _random_state([*copies, *tensors]):
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


@contextlib.contextmanager
def _own_buffers(model: torch.nn.Module) -> Iterator[None]:
    """Within, the model has copies of its buffers, so that running statistics do not change."""
    copies: dict[int, Tensor] = {}
    with contextlib.ExitStack() as undo:
        for module in model.modules():
            own: Any = module._buffers  # of a ScriptModule, a view that can only be read
            before = dict(own.items())
            undo.callback(_set_buffers, module, before)
            for buffer in before.values():
                if buffer is not None and id(buffer) not in copies:
                    copies[id(buffer)] = buffer.detach().clone()
            _set_buffers(module, {name: copies.get(id(each)) for name, each in before.items()})
        yield


def _set_buffers(module: torch.nn.Module, buffers: Mapping[str, Tensor | None]) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        for name, buffer in buffers.items():
            setattr(module, name, buffer)
    else:
        module._buffers.clear()
        module._buffers.update(buffers)


@contextlib.contextmanager
def _random_state(tensors: list[Tensor]) -> Iterator[None]:
    """Restores the random state of Python, NumPy, the CPU and the tensors' devices."""
    devices = {tensor.device for tensor in tensors} - {torch.device("cpu"), torch.device("meta")}
    numpy: Any = sys.modules.get("numpy.random")
    with contextlib.ExitStack() as undo:
        undo.callback(random.setstate, random.getstate())
        undo.callback(torch.set_rng_state, torch.get_rng_state())
        if numpy is not None:
            undo.callback(numpy.set_state, numpy.get_state())
        for device in devices:
            own = torch.get_device_module(device)
            undo.callback(own.set_rng_state, own.get_rng_state(device), device)
        yield
