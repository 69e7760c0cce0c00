"""Predicting memory: how it grows with the size, and the largest size that fits.

Everything here is a thin face of the C++ core (`include/brim/predict`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch

from brim import _C
from brim._arguments import check_callable, real, shown
from brim._C import MemorySample, ModelError, PeakSample
from brim._plots import draw
from brim._progress import progress as bar
from brim._state.undo import Restore, Undo
from brim.memory import DeviceLike, is_out_of_memory

__all__ = [
    "MemoryModel",
    "MemorySample",
    "ModelError",
    "PeakSample",
    "Peaks",
    "PolynomialRegression",
    "collect_peaks",
]

_Input = TypeVar("_Input")
_Self = TypeVar("_Self", bound="MemoryModel")
Numbers: TypeAlias = Any
"""Numbers as a list, a tuple, a NumPy array or a tensor; nested for several features."""

_LARGEST_SIZE = 2**53


def _tensor(name: str, values: Numbers) -> torch.Tensor:
    """The numbers in double precision on the CPU."""
    if isinstance(values, (str, bytes, dict, set)):
        raise TypeError(f"{name} must be numbers, got {shown(values)}")
    is_array = hasattr(values, "__array__")  # torch's tensors too
    if not is_array and isinstance(values, Iterable):
        values = list(values)
    try:
        # Without a dtype, Python's floats would become single precision.
        tensor = torch.as_tensor(values, dtype=None if is_array else torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise TypeError(f"{name} must be numbers, got {shown(values)}: {error}") from None
    if tensor.is_complex():
        raise TypeError(f"{name} must be real numbers, got {tensor.dtype}")
    return tensor.detach().to("cpu", torch.float64)


def _bytes(name: str, value: float | str, device: DeviceLike = None) -> float:
    """Bytes as a number, or text such as "8GiB"; a percentage is of the device's limit."""
    if isinstance(value, str):
        whole = _C.memory_stats(device).limit if value.strip().endswith("%") else None
        return _C.parse_bytes(value, whole, name)
    return real(name, value)


class PolynomialRegression(_C.PolynomialRegression):
    """A polynomial fitted to points by least squares in double precision, and its inverse.

    Features are scaled and the system is solved by QR, so sizes may span 1 to 1e9. With several
    features it has all monomials up to the total degree.

    Args:
        degree: 0 to 16, else a ValueError.

    Example:
        >>> model = PolynomialRegression(2).fit([1, 2, 3, 4], [3, 9, 19, 33])
        >>> round(model.predict(10), 6)
        201.0
        >>> model.inverse(200)
        9
    """

    def fit(self, x: Numbers, y: Numbers) -> PolynomialRegression:
        """Fit to points, forgetting earlier ones, and return the model.

        Args:
            x: one number per point, or one row of features per point.
            y: one number per point.

        Raises:
            ValueError: if the lengths differ, a number is not finite, or the points do not
                determine every coefficient (too few, duplicates, a constant feature).
            TypeError: if these are not numbers.
        """
        points, values = _tensor("x", x), _tensor("y", y)
        if points.dim() not in (1, 2):
            raise ValueError(
                f"x must be one number or one row per point, got the shape {tuple(points.shape)}"
            )
        if values.dim() != 1:
            raise ValueError(f"y must be one number per point, got the shape {tuple(values.shape)}")
        if points.shape[0] != values.shape[0]:
            raise ValueError(
                f"x and y must have the same length, got {points.shape[0]} and {values.shape[0]}"
            )
        features = 1 if points.dim() == 1 else points.shape[1]
        given = (points.flatten().tolist(), values.tolist(), features)
        self._fit(*given)
        self._points = given
        return self

    def predict(self, x: Numbers) -> Any:
        """The value at one point, as a float, or at many, as a tensor of float64.

        Args:
            x: one point (a number, or its features) or many (a list of numbers, or of rows).
        """
        points = _tensor("x", x)
        features = max(self.features, 1)
        one = points.dim() == (0 if features == 1 else 1)
        rows = points.reshape(-1, 1) if features == 1 and points.dim() < 2 else points
        if rows.dim() > 2 or rows.shape[-1:] != (features,):
            raise ValueError(
                f"x must have {features} feature(s) as in fit, got the shape {tuple(points.shape)}"
            )
        values = self._predict(rows.flatten().tolist(), features)
        return values[0] if one else torch.tensor(values, dtype=torch.float64)

    def inverse(
        self,
        budget: float | str,
        *,
        at: Sequence[float | None] | None = None,
        lower: int = 1,
        upper: int = _LARGEST_SIZE,
    ) -> int:
        """The largest whole size such that no size from `lower` to it is predicted over the budget.

        Args:
            budget: the most that a prediction may be; text such as `"8GiB"` means bytes.
            at: with several features, the values of the others, and None for the one to solve.
            lower: the least size.
            upper: the result if nothing up to it is over the budget.

        Returns:
            The size; `lower - 1`, so 0 by default, if even `lower` is over the budget.

        Example:
            >>> x = [(n, size) for n in (1, 2, 3) for size in (10, 20, 30)]
            >>> model = PolynomialRegression(2).fit(x, [n * size + 5.5 for n, size in x])
            >>> model.inverse(1000, at=(None, 100))
            9
        """
        limit = _bytes("budget", budget)
        if at is None:
            return self._inverse(limit, [0.0], 0, lower, upper)
        if sum(value is None for value in at) != 1:
            raise ValueError(f"at must hold None once, for the feature to solve, got {at!r}")
        point = [0.0 if value is None else real("at", value) for value in at]
        return self._inverse(limit, point, list(at).index(None), lower, upper)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and copied as the points, from which a copy is fitted again."""
        return (type(self), (self.degree,), self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The other half of `__reduce__`."""
        self.__dict__.update(state)
        if "_points" in state:
            self._fit(*state["_points"])

    def __repr__(self) -> str:
        """The degree, and the number of features once it is fitted."""
        fitted = f", {self.features} feature(s)" if self.fitted else ", not fitted"
        return f"PolynomialRegression(degree={self.degree}{fitted})"


class Peaks(list[PeakSample]):
    """What `collect_peaks` returns: a list of `PeakSample`, aligned with the inputs.

    Example:
        >>> found = collect_peaks(lambda size: torch.zeros(size).numel(), [256], device="cpu")
        >>> found.features, found.out_of_memory
        ([256], [False])
    """

    @property
    def features(self) -> list[Any]:
        """What the work returned; None where it ran out of memory."""
        return [sample.feature for sample in self]

    @property
    def peaks(self) -> list[int]:
        """Bytes held at most; of work that ran out of memory, a lower bound of its need."""
        return [sample.peak for sample in self]

    @property
    def out_of_memory(self) -> list[bool]:
        """Which of them ran out of memory."""
        return [sample.out_of_memory for sample in self]


def collect_peaks(
    work: Callable[[_Input], Any],
    inputs: Iterable[_Input],
    device: DeviceLike = None,
    cleanup: Callable[[], object] | None = None,
) -> Peaks:
    """Run a piece of work on each input and measure the most memory that it holds.

    Work that runs out of memory stays in the result, with what it held and asked for as a lower
    bound of its need. Its exception and tensors are released first, then the device's cache.

    Args:
        work: called with each input; what it returns is the sample's `feature`.
        inputs: any iterable, used one at a time.
        device: where to measure, the CPU included.
        cleanup: called after each input, also after a failure.

    Returns:
        One `PeakSample` for each input, in order: `feature`, `peak` (bytes held on the device at
        most, older tensors included, so that it compares with a budget), `start` (bytes held
        before), `out_of_memory` and `requested`.

    Raises:
        Exception: whatever `work` raises that is not about memory, untouched, after `cleanup`.

    Example:
        >>> def work(size):
        ...     torch.zeros(size, dtype=torch.uint8)
        ...     return size
        >>> samples = collect_peaks(work, [1000, 2000], device="cpu")
        >>> [sample.peak - sample.start for sample in samples], samples.features
        ([1000, 2000], [1000, 2000])
    """
    return Peaks(_C.collect_peaks(work, inputs, device, cleanup))


def _shapes(sizes: Numbers) -> tuple[list[tuple[float, float]], bool]:
    """Pairs of numbers, and whether they are batches (n, length) or sizes (size, 0)."""
    try:
        values = [_tensor("sizes", value) for value in sizes]
    except TypeError:
        raise TypeError(f"sizes must be numbers or pairs (n, length), got {sizes!r:.100}") from None
    if not values:
        raise ValueError("sizes is empty")
    if len({value.shape for value in values}) > 1:
        raise ValueError(f"sizes must be all numbers or all pairs (n, length), got {shown(sizes)}")
    tensor = torch.stack(values)
    if tensor.dim() == 1:
        return [(size, 0.0) for size in tensor.tolist()], False
    if tensor.dim() != 2 or tensor.shape[1] != 2:
        raise ValueError(
            f"sizes must be numbers or pairs (n, length), got the shape {tuple(tensor.shape)}"
        )
    return [(n, length) for n, length in tensor.tolist()], True


class MemoryModel(_C.MemoryModel):
    """How many bytes a piece of work needs at its peak, learned from a few measurements.

    Sizes are numbers, or pairs `(n, length)`: n samples padded to the longest, of that length. The
    peak is `max(floor, phases…)` with coefficients that are never negative, so it never falls as a
    size grows. See docs/explanation/predict.md for the formulas.

    Example:
        >>> sizes = [(1, 16), (2, 32), (32, 16), (1, 512), (8, 128), (32, 512)]
        >>> peaks = [10_000 + 64 * n * length + n * length**2 for n, length in sizes]
        >>> model = MemoryModel().fit(sizes, peaks)
        >>> round(model.peak(4, 64))
        42768
        >>> model.largest_batch(256, "1MiB")
        12
    """

    def fit(
        self: _Self, sizes: Numbers, peaks: Numbers, out_of_memory: Numbers | None = None
    ) -> _Self:
        """Fit to measured peaks, forgetting earlier ones, and return the model.

        Args:
            sizes: numbers, or pairs (n, length).
            peaks: bytes, one per size.
            out_of_memory: one bool per size. The peak of one that ran out of memory is a lower
                bound: the model predicts at least that.

        Raises:
            ValueError: if lengths differ, a figure is not finite and positive, or fewer than 2
                sizes (3 pairs) are different.
        """
        shapes, batch = _shapes(sizes)
        values = _tensor("peaks", peaks)
        failed = [False] * len(shapes) if out_of_memory is None else list(out_of_memory)
        if values.dim() != 1 or not len(shapes) == len(values) == len(failed):
            raise ValueError(
                "sizes, peaks and out_of_memory must have the same length, got "
                f"{len(shapes)}, {tuple(values.shape)} and {len(failed)}"
            )
        samples = [
            MemorySample(n, length, peak, bool(over))
            for (n, length), peak, over in zip(shapes, values.tolist(), failed, strict=True)
        ]
        self._fit(samples, batch)
        return self

    @classmethod
    def probe(
        cls: type[_Self],
        fn: Callable[..., object],
        sizes: Iterable[Any],
        device: DeviceLike = None,
        *,
        budget: int | str | None = None,
        probes: int = 7,
        near_budget: int = 0,
        cleanup: Callable[[], object] | None = None,
        restore: Restore = True,
        progress: bool = True,
    ) -> _Self:
        """Measure a few of the sizes and fit a model to them.

        The function really runs, so a training step trains the model. Afterwards the model, the
        optimizer and the random state are as before, unless `restore=False`.

        The smallest comes first (once unmeasured, to warm up), then larger ones spread over the
        range, each only if it is expected to stay within the budget. One that runs out of memory
        anyway becomes a lower bound. `model.samples` shows what was measured.

        Args:
            fn: called as `fn(size)`, or `fn(n, length)` where the sizes are pairs.
            sizes: candidates, ints or pairs of ints, which span the sizes the model is for.
            device: where to measure.
            budget: bytes that the device may hold, or text such as `"8GiB"`; 90 % of what is free
                if None.
            probes: how many sizes to measure at most; up to twice as many where memory hardly grows
                and careful steps would not reach the largest size.
            near_budget: how many further sizes to measure at most, for single numbers alone: each
                is the largest, up to the last candidate, that those before show to fit. With 0 only
                candidates are measured.
            cleanup: called after each call of `fn`.
            restore: what the function changes and is put back after measuring: True for the modules
                and optimizers that it leads to, or these things themselves; False for nothing. See
                `brim.data.PackedBatchSampler.fit`.
            progress: whether to show a bar on a terminal if it takes long.

        Raises:
            ValueError: if the sizes are empty, not positive, of mixed kinds, or too few.
            torch.OutOfMemoryError: if even the smallest size does not fit.

        Example:
            >>> model = MemoryModel.probe(
            ...     lambda size: torch.zeros(size, 1024), [1, 10, 100, 1000], device="cpu"
            ... )
            >>> round(model.phases[0]["s"])
            4096
        """
        shapes, batch = _shapes(sizes)
        for n, length in shapes:
            if not (n.is_integer() and length.is_integer()):
                raise TypeError(f"sizes must be ints, got {(n, length) if batch else n!r}")
        whole = [(int(n), int(length)) for n, length in shapes]
        check_callable("fn", fn)
        limit = None if budget is None else int(_bytes("budget", budget, device))
        model = cls()
        with Undo(restore, fn), bar("probe", "call", enabled=progress) as step:

            def work(*size: int) -> None:
                fn(*size)
                step(f"size {' x '.join(map(str, size))}")

            model._assign(
                _C.probe_memory(work, whole, batch, device, limit, probes, near_budget, cleanup)
            )
        return model

    def peak(self, n: float, length: float | None = None) -> float:
        """Bytes expected at the peak of a size, or of n samples of a length."""
        return self._peak(real("n", n), None if length is None else real("length", length))

    def safe_peak(self, n: float, length: float | None = None) -> float:
        """The most that a size can need, with a margin: what to compare with a budget."""
        return self._safe_peak(real("n", n), None if length is None else real("length", length))

    def peak_of(self, lengths: Numbers) -> float:
        """Bytes expected for one batch of samples of these lengths: n and the longest count."""
        return self._peak_of(_tensor("lengths", lengths).flatten().tolist())

    def largest_batch(self, length: float, budget: float | str) -> int:
        """The most samples of a length with `safe_peak` within the budget; 0 for none."""
        return self._largest_batch(real("length", length), _bytes("budget", budget))

    def largest_size(self, budget: float | str) -> int:
        """The largest size with `safe_peak` within the budget; 0 for none."""
        return self._largest_size(_bytes("budget", budget))

    def plot(
        self,
        where: Any = None,
        *,
        budget: float | str | None = None,
        seconds: Mapping[tuple[float, ...], float] | None = None,
    ) -> Any:
        """Draw the measured peaks, the model, and what fits; see `brim.plot.memory_model`.

        Args:
            where: an Axes of matplotlib, a file to write, or None for a new Figure.
            budget: bytes, drawn as a line together with the largest size within it.
            seconds: how long each size took, if that was measured.
        """
        limit = None if budget is None else _bytes("budget", budget)
        return draw("memory_model", self, where, budget=limit, seconds=seconds)

    def state_dict(self) -> dict[str, Any]:
        """The whole model, as plain numbers, lists and strings."""
        return self._state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the model that `state_dict` was taken from.

        Raises:
            ValueError: if an entry is missing or out of range.
            TypeError: if one is of the wrong type.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"state_dict must be what state_dict() returned, got {state_dict!r:.100}"
            )
        for key in ("phases", "samples"):
            rows = state_dict.get(key, [])
            if not isinstance(rows, (list, tuple)) or not all(
                isinstance(row, (list, tuple)) for row in rows
            ):
                raise TypeError(f"{key} must be a list of lists of numbers, got {shown(rows)}")
        self._load(dict(state_dict))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and copied through `state_dict`."""
        return (type(self), (), self.state_dict())

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The other half of `__reduce__`."""
        self.load_state_dict(state)

    def __repr__(self) -> str:
        """One line; `str` gives the whole model."""
        if not self.fitted:
            return "MemoryModel(not fitted)"
        return (
            f"MemoryModel({self.kind}, {len(self.samples)} samples, "
            f"worst error {self.error.worst:.1%}, margin {self.margin:.1%})"
        )
