"""Training steps in parts for Lightning, of either package."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal

import torch

import brim
from brim._state.undoing import Undoing
from brim.adapt._parts import splitting
from brim.integrations._lightning_records import Records
from brim.integrations._weights import Count, Weights, check_options, labels_kept, nothing


class AdaptiveStepsLogic:
    """Runs a training batch that does not fit in parts, with the gradients of the whole batch.

    For automatic optimization. `training_step` is called with parts of the batch; what it logs is
    logged once for the batch, and `on_after_backward` is called once. A batch that fits is one
    part, with the same bits as without this callback. Under DDP the ranks agree on the size.

    Args:
        reduction: `"mean"` or `"sum"`: what the loss of `training_step` is over a batch: over its
            samples, or, if a mean shows that, over labels that are not -100.
        count: how many items a loss is a mean over, as a function of the batch, where these are
            something else (tokens without padding).
        check: compare pairs of samples with both together in batches that are split, and refuse
            losses that do not follow from their parts. False trusts `reduction` and `count`, for
            losses that draw random numbers.
        **options: for `brim.Microbatches`: `size`, `foresee`, `split`, `length`, `allow`, ….

    Attributes:
        step: the `brim.Microbatches` that runs the batches, once training has begun.

    Example:
        >>> from brim.integrations.lightning import AdaptiveSteps
        >>> steps = AdaptiveSteps(size=16)
        >>> # trainer = Trainer(callbacks=[steps]); trainer.fit(module)
    """

    _package: Any  # lightning.pytorch or pytorch_lightning

    def __init__(
        self,
        reduction: Literal["mean", "sum"] = "mean",
        count: Count | None = None,
        check: bool = True,
        **options: Any,
    ) -> None:
        if reduction == "sum" and count is not None:
            raise ValueError("count is for a mean, but reduction is 'sum'")
        check_options("AdaptiveSteps", {"reduction": reduction, **options}, "model", "scaler")
        self._reduction, self._count, self._check = reduction, count, check
        self._options = options
        self.step: brim.Microbatches | None = None
        self._arguments: Any = None  # of the present training_step
        self._batch: Any = None

    # ---- where Lightning calls ---------------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Take over forward and backward of the training steps."""
        _refuse(self._package, trainer, pl_module)
        self._trainer, self._module = trainer, pl_module
        self._optimization = trainer.fit_loop.epoch_loop.automatic_optimization
        self._records = Records(pl_module)
        self.step = self._made()
        self._weights = self._weights_of(self.step)
        self._optimization._make_closure = self._make_closure

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give them back."""
        if stage == "fit":
            vars(trainer.fit_loop.epoch_loop.automatic_optimization).pop("_make_closure", None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The same after an error or Ctrl-C, where Lightning calls no `teardown`."""
        self.teardown(trainer, pl_module, "fit")

    # ---- a step ------------------------------------------------------------------------------

    def _make_closure(self, arguments: Mapping[str, Any], optimizer: Any, batch_idx: int) -> Any:
        """What Lightning passes to the optimizer: zero_grad, forward and backward of a batch."""
        optimization = self._optimization
        made = type(optimization)._make_closure(optimization, arguments, optimizer, batch_idx)
        if made._backward_fn is None:  # backward is skipped
            return made
        if "batch" not in arguments:
            raise ValueError(
                "AdaptiveSteps needs a training_step of batches, not a dataloader_iter"
            )
        zero_grad = made._zero_grad_fn  # with `made` itself, a cycle would keep the batch alive

        @torch.enable_grad()
        def closure(*_: Any, **__: Any) -> Any:
            if zero_grad is not None:
                zero_grad()
            return self._run(arguments)

        made.closure = closure
        return made

    def _run(self, arguments: Mapping[str, Any]) -> Any:
        """Forward and backward of a batch; returns what Lightning keeps of the step."""
        assert self.step is not None
        self._arguments, self._batch = arguments, arguments["batch"]
        self._weights.next_batch()
        try:
            with Undoing() as undo:
                self._records.keep_logs(undo)
                loss = self.step(self._batch)
            self._trainer.precision_plugin.post_backward(loss, self._module)
            self._records.log()
            return self._records.result(self._optimization.output_result_cls)
        except _SkippedError:
            self._records.log()
            return self._optimization.output_result_cls(None)
        finally:
            self._arguments = self._batch = None
            self._records.clear()

    def _made(self) -> brim.Microbatches:
        trainer, options = self._trainer, dict(self._options)
        if trainer.world_size > 1:
            options.setdefault("ranks", True)
        split, length = splitting(
            options.pop("split", None), options.pop("length", None), options.get("dim", 0)
        )

        def cut(batch: Any, start: int, stop: int) -> Any:
            if start == 0:  # of an attempt
                self._records.clear()
            return split(batch, start, stop)

        if self._records.metrics:
            mine = options.get("restore")
            states = (self._records.save_metrics, self._records.put_metrics_back)
            options["restore"] = [states] if mine is None else [mine, states]

        def training_step(part: Any) -> torch.Tensor:
            return self._loss(part)

        training_step.__qualname__ = f"{type(self._module).__name__}.training_step"  # for messages
        model = trainer.strategy.model
        given = {"model": model, "reduction": "sum", "check": False}  # Weights compares
        return brim.Microbatches(training_step, split=cut, length=length, **given, **options)

    def _loss(self, part: Any) -> torch.Tensor:
        """What Lightning would call backward of, with its share in the batch."""
        weight = self._weights.of(part, self._batch)
        if weight == 0:
            return nothing(self._module)
        if part is self._batch:
            self._records.clear()
        count = self.step._length  # type: ignore[union-attr]
        self._records.begin(count(part) / count(self._batch), weight)
        result = self._optimization._training_step({**self._arguments, "batch": part})
        if result.closure_loss is None:
            if part is self._batch:
                raise _SkippedError
            raise ValueError("training_step returned None for a part of a batch: it must be a loss")
        loss: torch.Tensor = result.closure_loss
        self._records.end(result)
        share = weight / self._trainer.world_size  # DDP would take the mean over ranks
        loss = loss if share == 1 else loss * share
        return self._trainer.precision_plugin.pre_backward(loss, self._module)  # type: ignore[no-any-return]

    def _weights_of(self, step: brim.Microbatches) -> Weights:
        rules: dict[str, Count | None] = {
            "a mean over samples": step._length,
            "a mean over labels that are not -100": labels_kept(0, step),
            "a mean over labels but -100 and each sample's first": labels_kept(1, step),
        }
        if self._count is not None:
            rules = {"a mean over count(batch)": self._count}
        elif self._reduction == "sum":
            rules = {"a sum over samples": None}
        half = "16" in str(self._trainer.precision)
        return Weights(rules, self._value, step, self._module, half, self._check)

    def _value(self, samples: Any) -> torch.Tensor:
        """The loss of some samples. Nothing is logged, and metrics are put back."""
        states = self._records.save_metrics()
        with Undoing() as undo, self._trainer.precision_plugin.train_step_context():
            undo.callback(functools.partial(self._records.put_metrics_back, states))
            self._records.discard_logs(undo)
            arguments = {**self._arguments, "batch": samples}
            out = self._module.training_step(*arguments.values())
        loss: torch.Tensor = out["loss"] if isinstance(out, Mapping) else out
        return loss


class _SkippedError(Exception):
    """`training_step` returned None: this batch is skipped."""


def _refuse(package: Any, trainer: Any, module: Any) -> None:
    kind = type(trainer.strategy).__name__
    if not module.automatic_optimization:
        raise ValueError(
            "AdaptiveSteps needs automatic optimization; use brim.Microbatches in a training_step "
            "that calls backward itself"
        )
    if kind not in ("SingleDeviceStrategy", "DDPStrategy"):
        raise ValueError(f"AdaptiveSteps runs on one device or under DDP, not in a {kind}")
    if type(module).backward is not package.LightningModule.backward:
        raise ValueError(
            f"{type(module).__name__} has a backward of its own, which AdaptiveSteps would not call"
        )
