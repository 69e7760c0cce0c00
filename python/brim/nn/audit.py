"""What a model keeps for backward: by torch.nn, by brim, and the least."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, SupportsIndex

import torch

from brim import _C
from brim._arguments import whole
from brim._table import text_table
from brim.memory import parse_bytes
from brim.nn._lower_bound import with_torchs_work
from brim.nn._saved import FUNCTIONS, Run, measure, with_sizes
from brim.nn.convert import convert, own_base
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
        least: that backward needs, without computing anything again.
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
        layers: one entry a layer that ran, in their order.
    """

    layers: tuple[LayerAudit, ...]

    @property
    def torch_nn(self) -> int:
        """Bytes that the model keeps with torch.nn's layers."""
        return sum(layer.torch_nn for layer in self.layers)

    @property
    def brim(self) -> int:
        """Bytes that it keeps with brim's."""
        return sum(layer.brim for layer in self.layers)

    @property
    def least(self) -> int:
        """Bytes that backward needs, without computing anything again."""
        return sum(layer.least for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values: `layers`, and `total` with the three sums."""
        total = {"torch_nn": self.torch_nn, "brim": self.brim, "least": self.least}
        return {"layers": [asdict(layer) for layer in self.layers], "total": total}

    def __str__(self) -> str:
        rows = [
            [each.name, each.type, *map(_C.format_bytes, (each.torch_nn, each.brim, each.least))]
            for each in self.layers
        ]
        totals = (self.torch_nn, self.brim, self.least)
        table = text_table(
            ["layer", "type", "torch.nn", "brim", "least"],
            rows,
            left=2,
            last=["total", "", *map(_C.format_bytes, totals)],
        )
        if self.torch_nn == 0:
            return table
        shares = [f"{part / self.torch_nn:.1%}" for part in (self.brim, self.least)]
        line = f"brim keeps {shares[0]} of what torch.nn keeps; the least is {shares[1]}"
        if self.brim < self.least:
            line += " without computing anything again"
        return f"{table}\n{line}"


def audit(model: torch.nn.Module, /, *inputs: Any, **kwargs: Any) -> Audit:
    """Measure what a model keeps for backward, layer by layer: torch.nn, brim, and the least.

    Runs the model forward twice, with torch.nn's layers and with brim's; a model that has layers of
    brim already is measured as it is for the second figure. A class that derives from one of brim's
    has torch.nn's forward in the first run, unless it has a forward of its own. Afterwards the
    model is as it was: classes, buffers such as running statistics, gradients; so is the random
    state. What needs a gradient is what needs one now, so freeze first. A region of `brim.saving()`
    around the call is part of the second run alone. Of a model with lazy layers (`LazyLinear`) that
    have not run yet a copy is measured, after one run that gives them their sizes.

    Counted are storages, each once and where it was kept first. Parameters, buffers and the inputs
    are not counted: they are there anyway.

    Args:
        model: any module.
        inputs: what to call it with; tensors in any nesting.
        kwargs: likewise.

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
    _check_module(model)
    model = with_sizes(model, inputs, kwargs)
    with _classes_put_back(model) as classes:
        for module, kind in classes.items():
            torchs = with_torchs_work(kind)
            if torchs is not None:
                module.__class__ = torchs
        with paused():
            before = measure(model, inputs, kwargs)
        _put_back(classes)
        if not any(own_base(kind) for kind in classes.values()):
            convert(model)
        after = measure(model, inputs, kwargs)
    return Audit(
        tuple(
            LayerAudit(
                name,
                kind,
                before.bytes.get(name, 0),
                after.bytes.get(name, 0),
                after.least.get(name, 0),
            )
            for name, kind in _called(before, after)
        )
    )


def assert_saved(
    model: torch.nn.Module, /, *inputs: Any, at_most: SupportsIndex | str, **kwargs: Any
) -> int:
    """Check in a test that a model keeps no more for backward than it should.

    The model is measured as it is, in one run forward, as `audit` does it.

    Args:
        model: any module.
        inputs: what to call it with.
        at_most: bytes, as a number or as text such as "12MiB".
        kwargs: likewise.

    Returns:
        The bytes that it keeps.

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
    _check_module(model)
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
        table = text_table(["layer", "type", "kept"], rows, left=2)
        raise AssertionError(
            f"the model keeps {kept} bytes for backward, at most {limit} are allowed\n\n{table}"
        )
    return kept


def _limit(at_most: SupportsIndex | str) -> int:
    wrong = f'at_most must be bytes such as 0, 4096 or "12MiB", got {at_most!r}'
    if isinstance(at_most, str):
        try:
            return 0 if at_most.strip() == "0" else parse_bytes(at_most)
        except ValueError:
            raise ValueError(wrong) from None
    return whole("at_most", at_most, 0)


def _check_module(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {model!r}")


def _called(before: Run, after: Run) -> Iterator[tuple[str, str]]:
    """The layers that ran, with their types; then functions, if they kept anything."""
    for name, module in (before.called | after.called).items():
        yield name, type(module).__name__
    if before.bytes.get(FUNCTIONS) or after.bytes.get(FUNCTIONS):
        yield FUNCTIONS, ""


_Classes = dict[torch.nn.Module, type[torch.nn.Module]]


@contextlib.contextmanager
def _classes_put_back(model: torch.nn.Module) -> Iterator[_Classes]:
    """Gives the classes of all modules, and puts them back at the end."""
    classes = {module: type(module) for module in model.modules()}
    try:
        yield classes
    finally:
        _put_back(classes)


def _put_back(classes: _Classes) -> None:
    for module, kind in classes.items():
        if type(module) is not kind:
            module.__class__ = kind
