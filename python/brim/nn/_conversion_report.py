"""What `convert` did to a model, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from brim import _C
from brim.nn._pressure import Pressure, pressure

__all__ = ["ConversionReport", "ConvertedLayer"]

_IN_PLACE = (
    "brim.convert changes the model in place and returns a report. Write `brim.convert(model)`, "
    "not `model = brim.convert(model)`, and go on with the model"
)
_ROOT = "(model)"
_FEW = 4


@dataclass(frozen=True)
class ConvertedLayer:
    """A layer of the model and what became of it; a part of a `ConversionReport`.

    Attributes:
        name: its qualified name; empty for the model itself.
        type: the class it had, without the module.
        reason: why it was kept as it is, or what was changed; empty where it was replaced.
        names: all its names, where the model has it in several places.
        recognised: what it computes, where its class is none of torch.nn's own.

    Example:
        >>> import torch, brim
        >>> brim.convert(torch.nn.Sequential(torch.nn.ReLU())).replaced[0].name
        '0'
    """

    name: str
    type: str
    reason: str
    names: tuple[str, ...]
    recognised: str = ""


@dataclass(frozen=True)
class ConversionReport:
    """What `convert` replaced and what it kept as it was.

    `print` shows the classes that it recognised and what was kept, as tables. Containers are not
    listed, only layers: modules without children or with parameters.

    Attributes:
        replaced: one entry per layer.
        kept: one entry per layer, with the reason.
        functions: one entry per module whose forward calls functions that brim has: they are
            redirected there, as by `brim.saving()`.
        hint: what would save more; "" if there is nothing.
        changed: one entry per module that was brim's already and has another `recompute` now.
        blocks: one entry per module that may run again as a whole, with `recompute="auto"`.

    Example:
        >>> import torch, brim
        >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Softmin())
        >>> report = brim.convert(model)
        >>> [layer.type for layer in report.replaced], [layer.reason for layer in report.kept]
        (['ReLU'], ['brim has no counterpart'])
        >>> [layer.reason for layer in brim.convert(model, recompute="cheap").changed]
        ['recompute is "cheap" now, it was None']
    """

    replaced: tuple[ConvertedLayer, ...]
    kept: tuple[ConvertedLayer, ...]
    functions: tuple[ConvertedLayer, ...] = ()
    hint: str = ""
    changed: tuple[ConvertedLayer, ...] = ()
    blocks: tuple[ConvertedLayer, ...] = ()

    @property
    def pressure(self) -> Pressure:
        """What was given up for want of memory until now, with `recompute="auto"`.

        Of all models of the process.
        """
        return pressure()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: this is a report, not a model."""
        raise TypeError(_IN_PLACE)

    def __getattr__(self, name: str) -> Any:
        """Only for what a report does not have; models have much of it."""
        missing = f"a ConversionReport has no attribute {name!r}"
        raise AttributeError(missing if name.startswith("__") else f"{missing}: {_IN_PLACE}")

    def __repr__(self) -> str:
        return f"<ConversionReport: {self._head()}>"

    def _head(self) -> str:
        layers = "layer" if len(self.replaced) == 1 else "layers"
        head = f"{len(self.replaced)} {layers} replaced, {len(self.kept)} kept as they are"
        if self.functions:
            modules = "module" if len(self.functions) == 1 else "modules"
            head += f", functions redirected in {len(self.functions)} {modules}"
        if self.blocks:
            blocks = "block" if len(self.blocks) == 1 else "blocks"
            head += f", {len(self.blocks)} {blocks} may run again"
        for reason, count in Counter(each.reason for each in self.changed).items():
            modules = "module" if count == 1 else "modules"
            head += f", {count} {modules} changed: {reason}"
        return head

    def __str__(self) -> str:
        tables = []
        known = Counter((each.type, each.recognised) for each in self.replaced if each.recognised)
        if known:
            rows = [[kind, what, str(count)] for (kind, what), count in known.items()]
            tables.append(_C.text_table(["type", "recognised as", "layers"], rows, left=2))
        if self.kept:
            rows = list(self._rows_of_kept())
            tables.append(_C.text_table(["layer", "type", "kept because"], rows, left=3))
        text = "\n\n".join([self._head(), *tables])
        return f"{text}\n{self.hint}" if self.hint else text

    def _rows_of_kept(self) -> Iterator[list[str]]:
        """Many of one type for one reason are one row."""
        alike: dict[tuple[str, str], list[ConvertedLayer]] = {}
        for each in self.kept:
            alike.setdefault((each.type, each.reason), []).append(each)
        for (kind, reason), layers in alike.items():
            shown = layers if len(layers) <= _FEW else layers[:1]
            for each in shown:
                name = ", ".join(name or _ROOT for name in each.names)
                if len(layers) > _FEW:
                    name += f" and {len(layers) - 1} others"
                yield [name, kind, reason]
