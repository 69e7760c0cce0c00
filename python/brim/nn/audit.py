"""What a model keeps for backward: with torch.nn's layers, with brim's, and at the least."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, SupportsIndex

import torch

from brim import _C
from brim._arguments import whole
from brim.memory import parse_bytes
from brim.nn._derived import original_of
from brim.nn._lower_bound import with_torchs_work
from brim.nn._saved import FUNCTIONS, Run, measure, with_sizes
from brim.nn.convert import check_module, convert, own_base
from brim.nn.saving import paused

__all__ = ["Audit", "LayerAudit", "assert_saved", "audit"]


@dataclass(frozen=True)
class LayerAudit:
    """Bytes that one layer keeps for backward.

    Attributes:
        name: its qualified name, or "(functions)" for what was kept outside of any layer.
        type: its class, without the module.
        torch_nn: kept by torch.nn's layer.
        brim: kept by brim's.
        least: that backward needs if nothing is recomputed.
    """

    name: str
    type: str
    torch_nn: int
    brim: int
    least: int


@dataclass(frozen=True)
class Audit:
    """What a model keeps for backward. `print` shows it as a table.

    Attributes:
        layers: one entry per layer that ran, in the order of their first call.
    """

    layers: tuple[LayerAudit, ...]

    @property
    def torch_nn(self) -> int:
        """Bytes that the model keeps with torch.nn's layers."""
        return sum(layer.torch_nn for layer in self.layers)

    @property
    def brim(self) -> int:
        """Bytes that it keeps with brim's layers."""
        return sum(layer.brim for layer in self.layers)

    @property
    def least(self) -> int:
        """Bytes that backward needs if nothing is recomputed."""
        return sum(layer.least for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values: `layers`, and `total` with the three sums."""
        total = {"torch_nn": self.torch_nn, "brim": self.brim, "least": self.least}
        return {"layers": [asdict(layer) for layer in self.layers], "total": total}

    def __str__(self) -> str:
        total = LayerAudit("total", "", self.torch_nn, self.brim, self.least)
        rows = [
            [each.name, each.type, *map(_C.format_bytes, (each.torch_nn, each.brim, each.least))]
            for each in (*self.layers, total)
        ]
        head = ["layer", "type", "torch.nn", "brim", "least"]
        table = _C.text_table(head, rows[:-1], left=2, last=rows[-1])
        if self.torch_nn == 0:
            return table
        shares = [f"{part / self.torch_nn:.1%}" for part in (self.brim, self.least)]
        line = f"brim keeps {shares[0]} of what torch.nn keeps; the least is {shares[1]}"
        if self.brim < self.least:
            line += " if nothing is recomputed"
        return f"{table}\n{line}"


def audit(model: torch.nn.Module, /, *inputs: Any, **kwargs: Any) -> Audit:
    """Measure what a model keeps for backward, layer by layer: torch.nn, brim, and the least.

    Runs the model forward twice: with torch.nn's layers, then converted, or as it is if it has
    layers of brim already. A class derived from one of brim's has torch.nn's forward in the first
    run, unless it has its own. Afterwards classes, buffers (running statistics), gradients and the
    random state are as before. What needs a gradient is what needs one now, so freeze first.
    A surrounding `brim.saving()` affects the second run only. If the model has lazy layers
    (`LazyLinear`) that have not run yet, a copy is measured, after a run that sets their sizes.

    Each storage counts once, for the layer that keeps it first. Parameters, buffers and the inputs
    do not count: they exist anyway.

    Args:
        model: any module.
        inputs: positional arguments of its call; tensors in any nesting.
        kwargs: keyword arguments of its call.

    Returns:
        The figures; `print` shows a table.

    Raises:
        TypeError: if `model` is no module.

    Example:
        >>> import torch, brim
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)
        ... )
        >>> _ = model[2].requires_grad_(False)
        >>> print(brim.audit(model, torch.ones(256, 64)))
        layer  type     torch.nn      brim     least
        --------------------------------------------
        0      Linear        0 B       0 B       0 B
        1      ReLU    64.00 KiB  2.00 KiB  2.00 KiB
        2      Linear        0 B       0 B       0 B
        --------------------------------------------
        total          64.00 KiB  2.00 KiB  2.00 KiB
        brim keeps 3.1% of what torch.nn keeps; the least is 3.1%
    """
    check_module(model)
    model = with_sizes(model, inputs, kwargs)
    classes = {module: type(module) for module in model.modules()}
    try:
        _set_classes({module: with_torchs_work(kind) or kind for module, kind in classes.items()})
        with paused():
            before = measure(model, inputs, kwargs)
        _set_classes(classes)
        if not any(own_base(kind) or original_of(kind) for kind in classes.values()):
            convert(model)
        after = measure(model, inputs, kwargs)
    finally:
        _set_classes(classes)
    figures = (before.bytes, after.bytes, after.least)
    return Audit(
        tuple(
            LayerAudit(name, kind, *(bytes_of.get(name, 0) for bytes_of in figures))
            for name, kind in _called(before, after)
        )
    )


def assert_saved(
    model: torch.nn.Module, /, *inputs: Any, at_most: SupportsIndex | str, **kwargs: Any
) -> int:
    """Check in a test that a model keeps no more for backward than it should.

    Measures the model as it is, in one forward run, as `audit` does.

    Args:
        model: any module.
        inputs: positional arguments of its call.
        at_most: bytes, as a number or as text such as "12MiB".
        kwargs: keyword arguments of its call.

    Returns:
        The bytes it keeps.

    Raises:
        AssertionError: if it keeps more; the message has a table of the layers.
        TypeError: if `model` is no module or `at_most` no number of bytes.
        ValueError: if `at_most` is negative or cannot be read.

    Example:
        >>> import torch, brim
        >>> layer = brim.nn.ReLU()
        >>> brim.assert_saved(layer, torch.ones(1024, requires_grad=True), at_most="128B")
        128
    """
    check_module(model)
    limit = _limit(at_most)
    model = with_sizes(model, inputs, kwargs)
    run = measure(model, inputs, kwargs)
    kept = sum(run.bytes.values())
    if kept > limit:
        rows = [
            [name, kind, _C.format_bytes(run.bytes[name])]
            for name, kind in _called(run, run)
            if run.bytes.get(name)
        ]
        table = _C.text_table(["layer", "type", "kept"], rows, left=2)
        raise AssertionError(
            f"the model keeps {kept} bytes for backward, at most {limit} are allowed\n\n{table}"
        )
    return kept


def _limit(at_most: SupportsIndex | str) -> int:
    if isinstance(at_most, str):
        try:
            return 0 if at_most.strip() == "0" else parse_bytes(at_most)
        except ValueError:
            raise ValueError(
                f'at_most must be bytes such as 0, 4096 or "12MiB", got {at_most!r}'
            ) from None
    return whole("at_most", at_most, 0)


def _called(before: Run, after: Run) -> Iterator[tuple[str, str]]:
    """The layers that ran, with their types; then functions, if they kept anything."""
    for name, module in (before.called | after.called).items():
        yield name, type(module).__name__
    if before.bytes.get(FUNCTIONS) or after.bytes.get(FUNCTIONS):
        yield FUNCTIONS, ""


def _set_classes(classes: Mapping[torch.nn.Module, type[torch.nn.Module]]) -> None:
    for module, kind in classes.items():
        if type(module) is not kind:
            module.__class__ = kind
