"""Which results of backward take no memory of their own, since torch writes them over an operand.

Real gradients are added in place where nothing else refers to them, and formulas write into zeros
that they have just made. For subclasses of tensors, which fake tensors are, torch takes another
tensor instead, so a trace has to undo that.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from brim._state.undoing import Undoing, set_attribute

aten = torch.ops.aten


def backward_now() -> int:
    """The number of the backward pass that this thread runs a node of; -1 outside of any."""
    return torch._C._current_graph_task_id()


_INTO_ZEROS = {
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.scatter.src: aten.scatter_.src,
}
_ZEROS = {aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default}


class InPlace:
    """Finds the operators of backward that write over an operand."""

    def __init__(self) -> None:
        self._references = _references()
        self._shared: set[tuple[Any, int]] = set()  # inputs of nodes that get several gradients
        self._zeros = 0  # address of the storage of the zeros that were made last

    def follow(self, undo: Undoing, is_here: Callable[[], bool]) -> None:
        """Look at the graph before each backward of the traced thread."""
        run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def look_and_run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_here():
                return run(outputs, *args, **kwargs)
            before, self._shared = self._shared, _shared_inputs(outputs)
            try:
                return run(outputs, *args, **kwargs)
            finally:
                self._shared = before

        set_attribute(undo, torch.autograd, "_engine_run_backward", look_and_run)

    def allocated(self, func: Any, storage: torch.UntypedStorage) -> None:
        """Note what was allocated last."""
        self._zeros = storage._cdata if func in _ZEROS else 0

    def variant(self, func: Any, args: Any, is_temporary: bool) -> Any:
        """The operator that torch runs on real tensors instead of this one.

        Args:
            func: an operator of backward.
            args: its arguments.
            is_temporary: whether the first one is neither an input nor kept for later.
        """
        if func in _INTO_ZEROS and args[0].untyped_storage()._cdata == self._zeros:
            return _INTO_ZEROS[func]
        if func is aten.add.Tensor and is_temporary and self._accumulates(*args[:2]):
            return aten.add_.Tensor
        return func

    def _accumulates(self, tensor: torch.Tensor, other: Any) -> bool:
        """Whether the engine adds a gradient to one that nothing else refers to."""
        node = torch._C._current_autograd_node()
        if node is None or not any(edge in self._shared for edge in node.next_functions):
            return False
        if (
            not isinstance(other, torch.Tensor)
            or other.is_floating_point() != tensor.is_floating_point()
        ):
            return False
        storage = tensor.untyped_storage()
        return (
            not torch.is_grad_enabled()
            and (other.shape, other.dtype) == (tensor.shape, tensor.dtype)
            and tensor.numel() * tensor.element_size() == storage.nbytes()  # not expanded
            and tensor._use_count() <= self._references[0]  # type: ignore[attr-defined]
            and torch._C._storage_Use_Count(storage._cdata) <= self._references[1]
        )


def _shared_inputs(outputs: Any) -> set[tuple[Any, int]]:
    """Inputs of a graph's nodes to which several edges lead."""
    roots = [
        (output.grad_fn if isinstance(output, torch.Tensor) else output.node, output.output_nr)
        for output in outputs
    ]
    edges: Counter[tuple[Any, int]] = Counter()
    nodes: dict[Any, None] = {}
    queue = roots
    while queue:
        node, number = queue.pop()
        if node is not None:
            edges[node, number] += 1
            if node not in nodes:
                nodes[node] = None
                queue.extend(node.next_functions)
    return {edge for edge, count in edges.items() if count > 1}


@functools.cache
def _references() -> tuple[int, int]:
    """How often a gradient and its storage count as used where only the engine has it.

    Versions of torch differ in what refers to a tensor while Python sees it, so it is looked up.
    """
    found = []

    class Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is aten.add.Tensor and backward_now() != -1:
                storage = args[0].untyped_storage()
                uses = torch._C._storage_Use_Count(storage._cdata)
                found.append((args[0]._use_count(), uses))
            return func(*args, **(kwargs or {}))

    modes = _disable_current_modes(), torch.inference_mode(False), torch.enable_grad()
    with modes[0], modes[1], modes[2], FakeTensorMode():
        x = torch.empty(2, requires_grad=True).sin()
        with Look():  # type: ignore[no-untyped-call]
            torch.autograd.backward((x.sin() * x.cos()).sum())
    return found[0] if found else (0, 0)
