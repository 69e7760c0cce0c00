"""The least that a model has to keep for backward if only cheap operations run again.

What torch's nodes keep is what backward needs, unless a rule below says that less will do. Each
needed value is kept, or computed again from kept ones. `brim::least_kept`, a minimum cut, chooses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from brim import _C
from brim.nn._values import Place, Values

__all__ = ["Need", "least", "nodes_behind", "refine"]


@dataclass
class Need:
    """A value that backward needs.

    Attributes:
        value: its place in the list of values; None if it is not needed after all.
        place: where it is kept.
        elements: how many the tensor has.
    """

    value: int | None
    place: Place
    elements: int


def least(values: Values, needs: Iterable[Need]) -> dict[Place, int]:
    """Bytes that have to be kept, and where: for the first operation that needs or reruns them."""
    places: dict[int, Place] = {}
    for need in needs:
        if need.value is not None:
            places.setdefault(need.value, need.place)
    _rerun_heads(values)
    graph = [(each.bytes, each.made_from if each.rerun else None) for each in values.list]
    kept = {i for i, keep in enumerate(_C.least_kept(graph, list(places))) if keep}
    first_reader: dict[int, int] = {}
    pending, seen = list(places), set(places)
    while pending:
        value = pending.pop()
        if value in kept:
            continue
        for source in values.list[value].made_from:
            first_reader[source] = min(value, first_reader.get(source, value))
            if source not in seen:
                seen.add(source)
                pending.append(source)
    result: dict[Place, int] = {}
    for value in sorted(kept):
        size = values.list[value].bytes
        if size > 0:
            place = places.get(value) or values.list[first_reader[value]].place
            result[place] = result.get(place, 0) + size
    return result


_HEADS = {"aten::mm", "aten::addmm", "aten::linear"}
_ON_THE_WAY = {"aten::_to_copy", "aten::clone", "aten::copy_", "aten::_log_softmax"}


def _rerun_heads(values: Values) -> None:
    """Let a matrix product run again whose result goes into log_softmax alone.

    The layer before a cross entropy: its result is by far the largest value of a language model,
    and `brim.nn.functional.linear_cross_entropy` computes it again, in parts.
    """

    def only_into_the_loss(value: int) -> bool:
        each = values.list[value]
        readers = [reader for reader in each.readers if values.list[reader].operation]
        return each.operation == "aten::_log_softmax" or (
            bool(readers)
            and all(values.list[reader].operation in _ON_THE_WAY for reader in readers)
            and all(map(only_into_the_loss, readers))
        )

    for place, value in enumerate(values.list):
        if value.operation in _HEADS and only_into_the_loss(place):
            value.rerun = True


# -- What backward needs of what torch keeps ------------------------------------------------------


def nodes_behind(outputs: Iterable[Tensor]) -> Iterator[Any]:
    """The nodes of autograd that these tensors come from."""
    pending: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        yield node
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                pending.append(before)


def refine(node: Any, values: Values, needs: Mapping[str, Need]) -> None:
    """Change what a node needs, by the name of what it keeps, to what its derivative reads."""
    rule = _RULES.get(node.name().rstrip("0123456789"))
    if rule is not None:
        rule(node, values, needs)


def _trains(node: Any, argument: int) -> bool:
    edges = node.next_functions
    return argument < len(edges) and edges[argument][0] is not None


def _drop(needs: Mapping[str, Need], *names: str) -> None:
    for name in names:
        if name in needs:
            needs[name].value = None


def _nothing(node: Any, values: Values, needs: Mapping[str, Need]) -> None:
    _drop(needs, "self")  # its shape is enough


def _convolution(node: Any, values: Values, needs: Mapping[str, Need]) -> None:
    if not _trains(node, 1):
        _drop(needs, "input")
    if not _trains(node, 0):
        _drop(needs, "weight")


def _batch_norm(node: Any, values: Values, needs: Mapping[str, Need]) -> None:
    _drop(needs, "result3")  # cuDNN's workspace
    if not _trains(node, 1) and not (node._saved_training and _trains(node, 0)):
        _drop(needs, "input", "result1", "result2")


def _norm(node: Any, values: Values, needs: Mapping[str, Need]) -> None:
    if not _trains(node, 0) and not _trains(node, 1):
        _drop(needs, "input", "result1", "result2")


def _bits(node: Any, values: Values, needs: Mapping[str, Need]) -> None:
    """One bit per element, or nothing where the output is kept: it tells the bits."""
    for name, need in needs.items():
        if name not in ("self", "result") or need.value is None:
            continue
        value = need.value
        results = [r for r in values.list[value].readers if _makes(values, r, node)]
        if name == "self" and results and getattr(node, "_saved_negative_slope", 0.0) >= 0.0:
            value = results[0]
        need.value = values.derived(value, (need.elements + 7) // 8, need.place, "bits")


def _makes(values: Values, value: int, node: Any) -> bool:
    """Whether an operation may be that of a node; Hardsigmoid's output tells less than its bits."""
    operation = values.list[value].operation.removeprefix("aten::").replace("_", "")
    return operation in ("leakyrelu", "hardtanh") and node.name().lower().startswith(operation)


def _prelu(node: Any, values: Values, needs: Mapping[str, Need]) -> None:
    if not _trains(node, 1):
        _bits(node, values, needs)


def _max_pool(node: Any, values: Values, needs: Mapping[str, Need]) -> None:
    """The position of each maximum in its window."""
    _drop(needs, "self")
    need = needs.get("result1")
    if need is not None and need.value is not None:
        positions = math.prod(getattr(node, "_saved_kernel_size", ()) or (2**16 + 1,))
        width = 1 if positions <= 2**8 else 2 if positions <= 2**16 else 4
        need.value = values.derived(need.value, need.elements * width, need.place, "positions")


_RULES: Mapping[str, Callable[[Any, Values, Mapping[str, Need]], None]] = {
    name + "Backward": rule
    for rule, names in {
        _convolution: "Convolution",
        _batch_norm: "NativeBatchNorm CudnnBatchNorm MiopenBatchNorm",
        _norm: "NativeLayerNorm NativeGroupNorm",
        _bits: "Relu Threshold LeakyRelu Hardtanh Hardsigmoid Clamp ClampMin ClampMax",
        _prelu: "PreluKernel",
        _max_pool: "MaxPool2DWithIndices MaxPool3DWithIndices AdaptiveMaxPool2D AdaptiveMaxPool3D",
        _nothing: "AvgPool2D AvgPool3D AdaptiveAvgPool2D AdaptiveAvgPool3D Gather NllLoss NllLoss2D"
        " ReflectionPad1D ReflectionPad2D ReflectionPad3D"
        " ReplicationPad1D ReplicationPad2D ReplicationPad3D",
    }.items()
    for name in names.split()
}
