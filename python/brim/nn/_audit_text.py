"""What the text of an audit says beyond its figures: repeated blocks in one line, and hints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from brim import _C
from brim.nn._saved import MODEL
from brim.nn.convert import ALREADY, ConversionReport

if TYPE_CHECKING:
    from brim.nn.audit import LayerAudit

__all__ = ["figures", "folded", "hint_of"]

_BLOCK = re.compile(r"\d+(?=\.| ·)")  # the number of a block, as in "layers.11.mlp"
_ENOUGH_TO_FOLD = 3
_WORTH_A_HINT = 0.98  # of what is kept now
_WORTH_NAMING = 0.1  # of what is kept at best: what a class could save
_MOST_HINTS = 3


def figures(layer: LayerAudit) -> tuple[int, int, int, int]:
    """The four columns."""
    return layer.torch_nn, layer.brim, layer.cheap, layer.least


def folded(layers: Iterable[LayerAudit]) -> list[LayerAudit]:
    """The rows that keep anything; equal ones of repeated blocks in one, with their sums."""
    groups: dict[tuple[object, ...], list[tuple[int, LayerAudit]]] = {}
    for place, layer in enumerate(layers):
        if any(figures(layer)):
            key = (_BLOCK.sub("*", layer.name), layer.type, figures(layer))
            groups.setdefault(key, []).append((place, layer))
    rows: list[tuple[int, LayerAudit]] = []
    for group in groups.values():
        if len(group) < _ENOUGH_TO_FOLD:
            rows += group
        else:
            rows.append((group[0][0], _sum([layer for _, layer in group])))
    return [layer for _, layer in sorted(rows, key=lambda row: row[0])]


def _sum(group: Sequence[LayerAudit]) -> LayerAudit:
    """One row for equal rows of several blocks."""
    numbers = [[int(number) for number in _BLOCK.findall(each.name)] for each in group]
    columns = iter(list(zip(*numbers, strict=True)))

    def name_range(match: re.Match[str]) -> str:
        column = sorted(set(next(columns)))
        if len(column) == 1:
            return match[0]
        unbroken = len(column) == len(group) == column[-1] - column[0] + 1
        return f"{column[0]}-{column[-1]}" if unbroken else "*"

    name = f"{_BLOCK.sub(name_range, group[0].name)} × {len(group)}"
    torch_nn, brim, cheap, least = (len(group) * figure for figure in figures(group[0]))
    return replace(group[0], name=name, torch_nn=torch_nn, brim=brim, cheap=cheap, least=least)


def hint_of(
    model: torch.nn.Module,
    layers: Sequence[LayerAudit],
    report: ConversionReport,
    *,
    converted: bool,
    eval_mode: int | None,
    least_known: bool,
) -> str:
    """What would keep less, one line for each, the most saving first; "" if nothing saves much.

    Args:
        model: that was measured.
        layers: the rows.
        report: of its conversion with `recompute="cheap"`.
        converted: whether the model has layers of brim.
        eval_mode: what brim keeps if BatchNorm layers with frozen weights were in eval mode.
        least_known: whether the least was computed, and is not merely the smallest of the sums.
    """
    trained = any(parameter.requires_grad for parameter in model.parameters())
    if not any(any(figures(layer)) for layer in layers):
        return (
            "hint: backward needs only parameters and the inputs, which are not counted"
            if trained
            else "hint: no parameter needs a gradient: unfreeze what is to be trained before the "
            "audit"
        )
    torch_nn, brim, cheap, least = (
        sum(column) for column in zip(*map(figures, layers), strict=True)
    )
    now = brim if converted else torch_nn
    best = min(brim, cheap)
    found: list[tuple[int, str]] = []  # bytes saved, and how
    if eval_mode is not None and eval_mode < _WORTH_A_HINT * brim:
        before, after = brim / torch_nn, eval_mode / torch_nn
        text = (
            "BatchNorm layers with frozen weights are in training mode: after .eval() on them "
            f"brim.convert(model) keeps {after:.1%} of torch.nn's instead of {before:.1%}"
        )
        found.append((now - eval_mode, text))
    if best < _WORTH_A_HINT * now:
        found.append((now - best, _conversion(layers, converted, brim, cheap)))
    found += (
        each for each in _unconverted(model, layers, report) if each[0] > _WORTH_NAMING * best
    )
    if not found and least_known and least >= _WORTH_A_HINT * now:
        return f"hint: {_nothing_to_save(layers, trained)}"
    found.sort(key=lambda hint: -hint[0])
    return "\n".join(f"hint: {text}" for _, text in found[:_MOST_HINTS])


def _unconverted(
    model: torch.nn.Module, layers: Iterable[LayerAudit], report: ConversionReport
) -> Iterator[tuple[int, str]]:
    """By class, what modules that `convert` left as they are could save, and why it did."""
    replaced = {name for each in report.replaced for name in each.names}
    reasons = {name: each.reason for each in report.kept for name in each.names}
    alike: dict[tuple[type, str], dict[str, list[LayerAudit]]] = {}
    for layer in layers:
        shown = layer.name.partition(" · ")[0]
        name = "" if shown == MODEL else shown
        reason = reasons.get(name, "brim does not recognise this class")
        if name not in replaced and reason != ALREADY:
            kind = type(model.get_submodule(name))
            alike.setdefault((kind, reason), {}).setdefault(name, []).append(layer)
    for (kind, reason), modules in alike.items():
        rows = [row for each in modules.values() for row in each]
        kept = sum(min(row.brim, row.cheap) for row in rows)
        least = sum(row.least for row in rows)
        yield (
            kept - least,
            f"{len(modules)} × {kind.__name__} ({kind.__module__}) keep {_C.format_bytes(kept)}, "
            f"at the least {_C.format_bytes(least)}: {reason}",
        )


def _nothing_to_save(layers: Sequence[LayerAudit], trained: bool) -> str:
    """Why nothing keeps less, and what else there is."""
    largest = max(folded(layers), key=lambda layer: layer.least)
    frozen = "frozen layers (.requires_grad_(False)) need less; " if trained else ""
    return (
        f"backward needs all that is kept, most of it at {largest.name} ({largest.type}): {frozen}"
        "activation checkpointing keeps less and runs layers again"
    )


def _conversion(layers: Sequence[LayerAudit], converted: bool, brim: int, cheap: int) -> str:
    """The call that saves most, and what it saves most of."""
    recompute = converted or cheap < _WORTH_A_HINT * brim
    call = 'brim.convert(model, recompute="cheap")' if recompute else "brim.convert(model)"

    def kept(layer: LayerAudit) -> tuple[int, int]:
        return (
            layer.brim if converted else layer.torch_nn,
            layer.cheap if recompute else layer.brim,
        )

    largest = max(folded(layers), key=lambda layer: kept(layer)[0] - kept(layer)[1])
    before, after = (sum(column) for column in zip(*map(kept, layers), strict=True))
    of_all = [_C.format_bytes(each) for each in (after, before)]
    of_it = [_C.format_bytes(each) for each in reversed(kept(largest))]
    return (
        f"{call} keeps {of_all[0]} instead of {of_all[1]}; "
        f"most is saved at {largest.name} ({largest.type}): {of_it[0]} instead of {of_it[1]}"
    )
