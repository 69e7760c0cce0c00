"""What a `training_step` of Lightning logs and returns for the parts of a batch, put together."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from brim._state.undoing import Undoing, set_attribute
from brim.integrations._weights import nothing


@dataclass
class _Part:
    """One part: its share of the samples, what it logged (arguments of `log`), what came out."""

    share: float
    weight: float
    logged: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    result: Any = None


class Records:
    """Keeps what the parts of a `LightningModule` log and return until all of them fitted."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._parts: list[_Part] = []
        self._discarding = False
        #: torchmetrics among the layers; an attempt that fails has updated some of them.
        self.metrics = [each for each in module.modules() if hasattr(each, "metric_state")]

    def clear(self) -> None:
        """Forget an attempt."""
        self._parts.clear()

    def begin(self, share: float, weight: float) -> None:
        """A part with this share of the batch's samples and this factor of its loss."""
        self._parts.append(_Part(share, weight))

    def end(self, result: Any) -> None:
        """What Lightning made of the part's output. The loss is kept without its graph."""
        result.closure_loss = None
        self._parts[-1].result = result

    # ---- logs --------------------------------------------------------------------------------

    def keep_logs(self, undo: Undoing) -> None:
        """Until the block ends, keep what is passed to `self.log` instead of logging it."""
        set_attribute(undo, self._module, "log", self._keep)

    def discard_logs(self, undo: Undoing) -> None:
        """Until the block ends, keep nothing."""
        set_attribute(undo, self, "_discarding", True)

    def _keep(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if self._discarding:
            return
        if isinstance(value, torch.Tensor) and not kwargs.get("enable_graph"):
            value = value.detach()
        self._parts[-1].logged.append(((name, value, *args), kwargs))

    def log(self) -> None:
        """Log for the batch: as it was where there is one part, else once for each name."""
        kept = self._parts[0].logged if len(self._parts) == 1 else self._logged_together()
        with Undoing() as undo:
            set_attribute(undo, self._module, "_current_fx_name", "training_step")
            for args, kwargs in kept:
                self._module.log(*args, **kwargs)

    def _logged_together(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        signature = inspect.signature(type(self._module).log)
        calls: dict[str, list[tuple[float, dict[str, Any]]]] = {}
        for part in self._parts:
            for args, kwargs in part.logged:
                bound = signature.bind(self._module, *args, **kwargs).arguments
                calls.setdefault(bound["name"], []).append((part.share, bound))
        for several in calls.values():
            _, together = several[-1]
            del together["self"]
            if isinstance(together["value"], (numbers.Number, torch.Tensor)):
                together["value"] = _reduced(
                    together.get("reduce_fx", "mean"),
                    torch.tensor([share for share, _ in several]),
                    [call["value"] for _, call in several],
                )
            if together.get("batch_size") is not None:
                together["batch_size"] = sum(call["batch_size"] for _, call in several)
            yield (), together

    # ---- outputs -----------------------------------------------------------------------------

    def result(self, kind: Callable[..., Any]) -> Any:
        """What Lightning keeps of the step: the loss, and what else `training_step` returned."""
        parts = [part for part in self._parts if part.result is not None]
        if len(parts) == 1 and parts[0].weight == 1:
            made = kind(None, extra=parts[0].result.extra)
            made.loss = parts[0].result.loss
            return made
        if not parts:  # nothing in the batch counts
            return kind(nothing(self._module).detach())
        made = kind(None, extra={name: self._extra(name, parts) for name in parts[0].result.extra})
        made.loss = sum(part.weight * part.result.loss for part in parts)
        return made

    def _extra(self, name: str, parts: list[_Part]) -> Any:
        values = [part.result.extra[name] for part in parts]
        if all(isinstance(value, torch.Tensor) and value.ndim > 0 for value in values):
            return torch.cat(values)
        if all(isinstance(value, (torch.Tensor, numbers.Number)) for value in values):
            return sum(part.share * value for part, value in zip(parts, values, strict=True))
        if all(isinstance(value, list) for value in values):
            return [each for value in values for each in value]
        raise TypeError(
            f"training_step returned {name!r} as a {type(values[0]).__name__} for parts of a batch:"
            " only tensors, numbers and lists can be put together"
        )

    # ---- metrics -----------------------------------------------------------------------------

    def save_metrics(self) -> list[dict[str, Any]]:
        """Copies of the metrics' states; lists only grow, so that their tensors need no copy."""
        return [
            {
                "_update_count": metric._update_count,
                "_computed": metric._computed,
                **{name: _copied(state) for name, state in metric.metric_state.items()},
            }
            for metric in self.metrics
        ]

    def put_metrics_back(self, saved: list[dict[str, Any]]) -> None:
        """Undo updates since `save_metrics`."""
        for metric, states in zip(self.metrics, saved, strict=True):
            for name, state in states.items():
                setattr(metric, name, _copied(state))


def _copied(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.clone()
    return list(state) if isinstance(state, list) else state


def _reduced(reduce: Any, shares: torch.Tensor, values: list[Any]) -> torch.Tensor:
    """The value of a batch from those of its parts, as Lightning reduces batches of an epoch."""
    numbers_ = torch.stack([torch.as_tensor(value).float().squeeze() for value in values])
    name = reduce if isinstance(reduce, str) else getattr(reduce, "__name__", "")
    if name in ("mean", "avg"):
        shares = shares.to(numbers_)
        return (numbers_ * shares).sum() / shares.sum()
    if name in ("sum", "max", "min"):
        return getattr(numbers_, name)()  # type: ignore[no-any-return]
    return reduce(numbers_)  # type: ignore[no-any-return]
