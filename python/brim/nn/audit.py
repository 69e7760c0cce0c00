"""What a model keeps for backward: with torch.nn's layers, with brim's, and at the least."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, SupportsIndex

import torch

from brim import _C
from brim._arguments import refused, shown, whole
from brim._estimate._faked import make_fake
from brim._plots import draw
from brim._progress import progress as bar
from brim._state.undoing import Undoing, undo_modules
from brim._table import Part, Table, text_of
from brim.memory import DeviceLike, is_out_of_memory, parse_bytes
from brim.nn import _causal_lm_loss
from brim.nn._audit_text import figures, folded, hint_of
from brim.nn._derived import is_made, original_of
from brim.nn._functions import calls_functions
from brim.nn._hints import frozen_batch_norms
from brim.nn._saved import Run, measure, with_sizes
from brim.nn._values import Place
from brim.nn.convert import (
    ORIGINALS,
    STAND_INS,
    WORK,
    check_module,
    convert,
    own_base,
    same_work,
)
from brim.nn.saving import pause

__all__ = ["Audit", "LayerAudit", "assert_saved", "audit"]


@dataclass(frozen=True)
class LayerAudit:
    """Bytes that a layer keeps for backward, or an operation outside of the layers brim knows.

    Attributes:
        name: the layer's qualified name; for an operation that of the module that calls it, and
            the function: "layers.0.mlp · mul", "(model) · cross_entropy".
        type: the class of that layer or module, without the Python module.
        torch_nn: kept by torch.nn's layers.
        brim: kept by brim's.
        cheap: kept by brim's with `recompute="cheap"`.
        least: that have to be kept here for the whole model to keep the least possible. Where it is
            more than `brim`, the others keep the same value at another layer.

    Example:
        >>> import torch, brim
        >>> brim.audit(torch.nn.ReLU(), torch.ones(1024, requires_grad=True)).layers[0].brim
        128
    """

    name: str
    type: str
    torch_nn: int
    brim: int
    cheap: int
    least: int


@dataclass(frozen=True)
class Audit:
    """What a model keeps for backward. `print` shows it as a table.

    Attributes:
        layers: one entry per layer that ran and per operation that keeps something, in order.
        hint: what would keep less, one line each, with figures that were measured, the most saving
            first; "" if there is nothing.
        note: why the least is only the smallest of the measured sums; "" if it was worked out.

    Example:
        >>> import torch, brim
        >>> audit = brim.audit(torch.nn.ReLU(), torch.ones(1024, requires_grad=True))
        >>> audit.torch_nn, audit.brim
        (4096, 128)
    """

    layers: tuple[LayerAudit, ...]
    hint: str = ""
    note: str = ""

    @property
    def torch_nn(self) -> int:
        """Bytes that the model keeps with torch.nn's layers."""
        return sum(layer.torch_nn for layer in self.layers)

    @property
    def brim(self) -> int:
        """Bytes that it keeps with brim's layers."""
        return sum(layer.brim for layer in self.layers)

    @property
    def cheap(self) -> int:
        """Bytes that it keeps with brim's layers and `recompute="cheap"`."""
        return sum(layer.cheap for layer in self.layers)

    @property
    def least(self) -> int:
        """Bytes that have to be kept if only cheap operations run again in backward."""
        return sum(layer.least for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values: `layers`, `total` with the four sums, `hint`, `note`."""
        total = {name: getattr(self, name) for name in _COLUMNS}
        layers = list(map(asdict, self.layers))
        return {"layers": layers, "total": total, "hint": self.hint, "note": self.note}

    def plot(self, where: Any = None) -> Any:
        """Draw what each layer keeps; see `brim.plot.audit`.

        Args:
            where: an Axes of matplotlib, a file to write, or None for a new Figure.
        """
        return draw("audit", self, where)

    def to_html(self, places: Mapping[str, str] | None = None) -> str:
        """A page for the browser: what is kept as the forward runs, and by which layer.

        Args:
            places: where in the code modules are, by their names.

        Example:
            >>> import torch, brim
            >>> page = brim.audit(torch.nn.Linear(8, 8), torch.ones(4, 8)).to_html()
            >>> page.startswith("<!doctype html>")
            True
        """
        page: str = draw("audit_page", self, places or {})
        return page

    def __repr__(self) -> str:
        torch_nn, brim, cheap = map(_C.format_bytes, (self.torch_nn, self.brim, self.cheap))
        return f"<Audit: torch.nn keeps {torch_nn}, brim {brim}, with recompute {cheap}>"

    def __str__(self) -> str:
        return text_of(self._parts())

    def _parts(self) -> list[Part]:
        total = LayerAudit("total", "", self.torch_nn, self.brim, self.cheap, self.least)
        rows = [
            [each.name, each.type, *map(_C.format_bytes, figures(each))]
            for each in (*folded(self.layers), total)
        ]
        silent = sum(not any(figures(each)) for each in self.layers)
        if silent:
            what = "1 layer keeps" if silent == 1 else f"{silent} layers keep"
            rows.insert(-1, [f"… {what} nothing", *[""] * (len(_COLUMNS) + 1)])
        head = ["layer", "type", "torch.nn", "brim", "cheap", "least"]
        lines: list[Part] = [Table(head, rows[:-1], left=2, last=rows[-1])]
        if self.torch_nn != 0:
            brim, cheap, least = (
                f"{part / self.torch_nn:.1%}" for part in (self.brim, self.cheap, self.least)
            )
            lines.append(
                f'brim keeps {brim} of what torch.nn keeps, {cheap} with recompute="cheap"; '
                f"the least is {least}"
            )
        if any(each.least > each.brim for each in self.layers):
            lines.append(_ELSEWHERE)
        return [*lines, *filter(None, (self.note, *self.hint.splitlines()))]


_COLUMNS = ("torch_nn", "brim", "cheap", "least")
_ELSEWHERE = (
    "note: where a row's least is above the others, a value counts at another layer in the other "
    "columns; compare the totals"
)


def audit(
    model: torch.nn.Module,
    /,
    *inputs: Any,
    device: DeviceLike = None,
    progress: bool = True,
    **kwargs: Any,
) -> Audit:
    """Measure what a model keeps for backward, layer by layer: torch.nn, brim, and the least.

    Runs the model forward three times: with torch.nn's layers, then converted, or as it is if it
    has layers of brim already, and then converted with `recompute="cheap"`. A class derived from
    one of brim's has torch.nn's forward in the first run, unless it has its own. Afterwards
    classes, buffers (running statistics), gradients and the random state are as before. What needs
    a gradient is what needs one now, so freeze first. A surrounding `brim.saving()` does not affect
    the first run. If the model has lazy layers (`LazyLinear`) that have not run yet, a copy is
    measured, after a run that sets their sizes.

    Each storage counts once, for the layer that keeps it first. Parameters, buffers and the inputs
    do not count: they exist anyway.

    The least is what has to be kept if backward may run cheap operations again: elementwise ones,
    copies, casts, normalisations, reductions, pooling and the linear layer in front of a cross
    entropy, but no other matrix product, convolution or attention. It is a minimum cut through the
    values that the first run computed, or the smallest of the three measured sums if that is less.

    Args:
        model: any module. One on the meta device, whose weights need no memory, is not run but
            traced on fake tensors, as if it were on `device`.
        inputs: positional arguments of its call; tensors in any nesting.
        device: "cpu" or "cuda", where the model is to be; it need not exist. If the model is
            elsewhere, it is traced as if it were there. By default where it is. A forward that has
            an argument of this name gets it.
        progress: whether to show a bar on a terminal if it takes long.
        kwargs: keyword arguments of its call.

    Returns:
        The figures; `print` shows a table.

    Raises:
        TypeError: if `model` is no module.
        torch.OutOfMemoryError: if there is no memory for one of the runs.

    Example:
        >>> import torch, brim
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)
        ... )
        >>> _ = model[2].requires_grad_(False)
        >>> print(brim.audit(model, torch.ones(256, 64)))
        layer                    type   torch.nn      brim     cheap     least
        ----------------------------------------------------------------------
        1                        ReLU  64.00 KiB  2.00 KiB  2.00 KiB  2.00 KiB
        … 2 layers keep nothing
        ----------------------------------------------------------------------
        total                          64.00 KiB  2.00 KiB  2.00 KiB  2.00 KiB
        brim keeps 3.1% of what torch.nn keeps, 3.1% with recompute="cheap"; the least is 3.1%
        hint: brim.convert(model) keeps 2.00 KiB instead of 64.00 KiB; most is saved at 1 (ReLU): 2.00 KiB instead of 64.00 KiB
    """  # noqa: E501
    check_module(model)
    if not inputs and not kwargs and (signature := refused(model.forward, 0)):
        raise TypeError(
            f"audit runs the model, so pass its inputs, as brim.audit(model, x): the forward of "
            f"{type(model).__name__} takes {signature}"
        )
    if device is not None and "device" in inspect.signature(model.forward).parameters:
        device, kwargs = None, {**kwargs, "device": device}
    with (
        _told_of_shapes(inputs),
        bar("audit", "run", total=3, enabled=progress) as step,
        Undoing() as undo,
    ):
        make_fake(undo, model, (inputs, kwargs), device)
        return _audit(model, inputs, kwargs, step)


def _audit(
    model: torch.nn.Module,
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    step: Callable[[str], None],
) -> Audit:
    model = with_sizes(model, inputs, kwargs)
    kinds = {type(module) for module in model.modules()}
    converted = any(own_base(kind) or is_made(kind) for kind in kinds)
    with Undoing() as undo:
        undo_modules(undo, model)
        pause(undo)
        for module in model.modules():
            _set_class(module, _with_torchs_work(type(module)))
            _causal_lm_loss.restore(module)
        torchs, note = _measure_with_least(model, inputs, kwargs)
    step("torch.nn")
    with Undoing() as undo:
        undo_modules(undo, model)
        if not converted:
            convert(model)
        ours = measure(model, inputs, kwargs)
        eval_mode = None
        if batch_norms := frozen_batch_norms(model):
            for module in batch_norms:
                module.eval()
            eval_mode = sum(measure(model, inputs, kwargs).bytes.values())
    step("brim")
    with Undoing() as undo:
        undo_modules(undo, model)
        report = convert(model, recompute="cheap")
        cheap = measure(model, inputs, kwargs)
    step("cheap")
    layers = _rows(torchs, ours, cheap)
    hint = hint_of(
        model, layers, report, converted=converted, eval_mode=eval_mode, least_known=not note
    )
    return Audit(layers, hint, note)


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
    with _told_of_shapes(inputs):
        run = measure(with_sizes(model, inputs, kwargs), inputs, kwargs)
    kept = sum(run.bytes.values())
    if kept > limit:
        names = _row_names([run])
        types = dict(names.values())
        rows = [
            [name, types[name], _C.format_bytes(size)]
            for name, size in _by_row(names, run.bytes).items()
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


# -- Runs ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _told_of_shapes(inputs: tuple[Any, ...]) -> Iterator[None]:
    """Say so where a model fails because shapes were given for its inputs: torch does not."""
    try:
        yield
    except (TypeError, AttributeError) as error:
        if not inputs or not all(map(_is_shape, inputs)):
            raise
        raise TypeError(
            f"pass a tensor, not a shape: torch.rand({shown(inputs[0])}), got {shown(inputs[0])}"
        ) from error


def _is_shape(value: object) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(size, int) for size in value)


def _measure_with_least(
    model: torch.nn.Module, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Run, str]:
    """The run, and a note if the least could not be worked out."""
    try:
        return measure(model, inputs, kwargs, find_least=True), ""
    except Exception as error:  # watched operation by operation, some models fail (compiled parts)
        if is_out_of_memory(error):
            raise  # what the model keeps is not known, and neither is the least
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return measure(model, inputs, kwargs), (
        "note: the least is the smallest of the measured sums, because the model cannot be "
        f"watched operation by operation ({reason})"
    )


def _set_class(module: torch.nn.Module, kind: type[torch.nn.Module] | None) -> None:
    if kind is not None and type(module) is not kind:
        module.__class__ = kind


def _with_torchs_work(kind: type[torch.nn.Module]) -> type[torch.nn.Module] | None:
    """The class with the forward of torch.nn or of its library; None if it stays as it is."""
    made_of = original_of(kind)
    if made_of is not None:
        return made_of
    own = own_base(kind)
    if own is None or not same_work(kind, own):
        return None
    if kind in ORIGINALS:
        return ORIGINALS[kind]
    original = ORIGINALS.get(own) or STAND_INS[own]
    work = {name: getattr(original, name) for name in WORK if hasattr(original, name)}
    return type(kind.__name__, (kind,), work)


# -- Rows ------------------------------------------------------------------------------------------


def _rows(*runs: Run) -> tuple[LayerAudit, ...]:
    """The rows of an audit, from runs with torch's layers, with brim's, and with "cheap"."""
    measured = [run.bytes for run in runs]
    # A minimum cut may miss what a layer of brim can do: then that is the least that is known.
    known = [run.least for run in runs if run.least is not None] + measured
    least = min(known, key=lambda kept: sum(kept.values()))
    names = _row_names(runs)
    columns = [_by_row(names, kept) for kept in (*measured, least)]
    rows: dict[str, LayerAudit] = {}
    keeping: set[str] = set()  # modules
    for (module, _), (name, kind) in names.items():
        rows[name] = LayerAudit(name, kind, *(column.get(name, 0) for column in columns))
        if any(figures(rows[name])):
            keeping.add(module)
    modules = {module for module, _ in names} - keeping
    # Operations that keep nothing have no row; a module has one if it keeps nothing at all.
    return tuple(row for name, row in rows.items() if any(figures(row)) or name in modules)


def _by_row(names: Mapping[Place, tuple[str, str]], kept: Mapping[Place, int]) -> dict[str, int]:
    result: dict[str, int] = {}
    for place, size in kept.items():
        name, _ = names[place]
        result[name] = result.get(name, 0) + size
    return result


def _row_names(runs: Iterable[Run]) -> dict[Place, tuple[str, str]]:
    """The name of each place's row and its type, in the order of the runs.

    A layer that brim knows is one row. Of other modules, each operation is one.
    """
    kinds: dict[str, list[type[torch.nn.Module]]] = {}
    places: list[Place] = []
    for run in runs:
        for module, kind in run.called.items():
            kinds.setdefault(module, []).append(_without_region(kind))
        at = 0
        for place in (*run.places, *(run.least or ())):
            if place not in places:
                places.insert(at, place)
            at = places.index(place) + 1
    names = {}
    for module, operation in places:
        classes = kinds.get(module, [torch.nn.Module])
        is_leaf = (module, "") in places
        one_row = (is_leaf and _is_layer(classes[0])) or len(set(classes)) > 1
        name = f"{module} · {operation}" if operation and not one_row else module
        names[module, operation] = (name, classes[0].__name__)
    return names


def _without_region(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The class itself where `convert` only redirected the functions that it calls."""
    return original_of(kind) or kind if calls_functions(kind) else kind


def _is_layer(kind: type[torch.nn.Module]) -> bool:
    """Whether a class is a layer of torch.nn or brim, or derives from one."""
    return any(
        base is not torch.nn.Module and base.__module__.startswith("torch.nn.modules.")
        for base in kind.__mro__
    )
