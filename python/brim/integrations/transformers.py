"""A callback for the `Trainer` of Hugging Face transformers: converted layers, steps in parts."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import walk_stack
from typing import Any

import torch
from torch._subclasses import FakeTensor

import brim
from brim.nn.convert import Choices, ConversionReport

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(
        "brim.integrations.transformers needs transformers: pip install 'brim[transformers]'"
    ) from error

__all__ = ["BrimCallback"]

_log = logging.getLogger("brim")

Count = Callable[[Any], Any]


class BrimCallback(TrainerCallback):
    """Converts the model's layers, and runs batches that do not fit in parts.

    The parts leave the gradients and the loss of the whole batch, with gradient accumulation (also
    over tokens: `num_items_in_batch`), autocast, gradient scalers, label smoothing, peft and DDP.
    A batch that fits is one part, with the same bits as without this callback. Checkpoints have the
    same keys.

    Args:
        convert: change the model's layers to brim's, which keep less for backward (`brim.convert`).
        recompute: `"cheap"` for still less; see `brim.convert`.
        only: convert these layers alone; see `brim.convert`.
        skip: leave these layers out; see `brim.convert`.
        microbatches: run a batch that does not fit in parts.
        count: how many items the loss of some inputs is a mean over, as a function of the inputs.
            By default it is worked out: the loss is divided by `num_items_in_batch`, or it is a
            mean over labels that are not -100, or over samples. Before the first batch is split,
            two samples of it show whether this is so.
        **options: for `brim.Microbatches`: `size`, `foresee`, `split`, `length`, `allow`, ….

    Attributes:
        report: what was converted.
        step: the `brim.Microbatches` that runs the batches, once training has begun.

    Example:
        >>> callback = BrimCallback(recompute="cheap", size=4)
        >>> # trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=[callback])
    """

    def __init__(
        self,
        *,
        convert: bool = True,
        recompute: str | None = None,
        only: Choices | None = None,
        skip: Choices | None = None,
        microbatches: bool = True,
        count: Count | None = None,
        **options: Any,
    ) -> None:
        if not microbatches and (count is not None or options):
            given = ", ".join([*options, *(["count"] if count is not None else [])])
            raise ValueError(f"{given} is for microbatches, which are switched off")
        brim.Microbatches(lambda part: part, **options)  # wrong options are errors at once
        self._convert: dict[str, Any] | None = None
        if convert:
            self._convert = {"recompute": recompute, "only": only, "skip": skip}
        self._microbatches, self._count, self._options = microbatches, count, options
        self.report: ConversionReport | None = None
        self.step: brim.Microbatches | None = None

    def on_init_end(self, *_: Any, model: Any = None, **__: Any) -> None:
        """Convert before accelerate wraps the model."""
        self._change(model)

    def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        """Convert what `model_init` made, and take over the steps."""
        self._change(model)
        trainer = self._trainer()
        if self._microbatches and not isinstance(vars(trainer).get("training_step"), _Step):
            _refuse(trainer)
            trainer.training_step = _Step(self, trainer, self._count, self._options)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Give the steps back."""
        trainer = self._trainer()
        if isinstance(vars(trainer).get("training_step"), _Step):
            del trainer.training_step

    def _change(self, model: torch.nn.Module | None) -> None:
        if self._convert is not None and model is not None and self.report is None:
            self.report = brim.convert(model, **self._convert)
            _log.info("%s", str(self.report).partition("\n")[0])

    def _trainer(self) -> Any:
        """The trainer, which callbacks are not given: it is what calls them."""
        for frame, _ in walk_stack(sys._getframe(1)):
            owner = frame.f_locals.get("self")
            if isinstance(owner, Trainer) and self in owner.callback_handler.callbacks:
                return owner
        raise RuntimeError("BrimCallback must be called by a transformers.Trainer")


def _refuse(trainer: Any) -> None:
    kind = trainer.accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise ValueError(
            f"BrimCallback cannot run batches in parts under {kind}, whose passes wait for other "
            "ranks: pass microbatches=False"
        )
    if trainer.args.n_gpu > 1:
        raise ValueError(
            "BrimCallback cannot run batches in parts under DataParallel: start the program with "
            "torchrun, or pass microbatches=False"
        )
    if trainer.args.optim in ("lomo", "adalomo"):
        raise ValueError(
            f"BrimCallback cannot run batches in parts with the optimizer {trainer.args.optim}, "
            "which changes parameters during backward: pass microbatches=False"
        )


class _Step:
    """Stands for `trainer.training_step`: runs it on parts of the inputs."""

    def __init__(
        self, owner: BrimCallback, trainer: Any, count: Count | None, options: dict[str, Any]
    ) -> None:
        self._owner, self._trainer = owner, trainer
        self._run = trainer.training_step
        self._count, self._options = count, options
        self._model: Any = None
        self._inputs = self._num_items = None

    def __call__(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if self._model is not model or self._owner.step is None:
            self._model, self._owner.step = model, self._made_for(model)
            self._weights = _Weights(self._trainer, self._owner.step, self._count)
        self._inputs, self._num_items = inputs, num_items_in_batch
        try:
            loss = self._owner.step(inputs)
            return loss * int(self._trainer.accelerator.gradient_accumulation_steps)
        finally:
            self._inputs = self._num_items = None

    def _made_for(self, model: torch.nn.Module) -> brim.Microbatches:
        accelerator = self._trainer.accelerator
        given = {
            "model": model,
            "scaler": accelerator.scaler,
            "reduction": "sum",
        }  # of weighted losses
        if accelerator.num_processes > 1:
            given["ranks"] = True
        return brim.Microbatches(self._loss, **{**given, **self._options})

    def _loss(self, part: Any) -> torch.Tensor:
        """What the trainer would call backward of."""
        trainer = self._trainer
        weight = 1.0
        if part is not self._inputs:
            weight = self._weights.of(part, self._inputs, self._model, self._num_items)
        if weight == 0:  # a mean over nothing
            leaf: torch.Tensor = next(p for p in self._model.parameters() if p.requires_grad)
            return leaf.flatten()[:1].sum() * 0.0
        with _caught_backward(trainer.accelerator) as caught:
            self._run(self._model, part, self._num_items)
        loss: torch.Tensor = caught[0] / trainer.accelerator.gradient_accumulation_steps
        weight /= trainer.accelerator.num_processes  # DDP would take the mean over ranks
        return loss if weight == 1 else loss * weight


@contextmanager
def _caught_backward(accelerator: Any) -> Iterator[list[torch.Tensor]]:
    """The losses that `accelerator.backward` gets, instead of backward."""
    caught: list[torch.Tensor] = []
    accelerator.backward = lambda loss, **_: caught.append(loss)
    try:
        yield caught
    finally:
        del accelerator.backward


class _Weights:
    """How the losses of parts add up to that of the batch; checked before the first is split."""

    def __init__(self, trainer: Any, step: brim.Microbatches, count: Count | None) -> None:
        self._trainer, self._split, self._length = trainer, step._split, step._length
        self._kinds: dict[str, Count | None] = {
            "divided by num_items_in_batch": None,
            "a mean over labels that are not -100": self._labels,
            "a mean over samples": self._length,
        }
        if count is not None:
            self._kinds = {"a mean over count(inputs)": count}
        self._chosen: Count | None = None
        self._checked = False

    def of(self, part: Any, whole: Any, model: Any, num_items: Any) -> float:
        """The factor of a part's loss in the sum."""
        if any(isinstance(value, FakeTensor) for value in dict(part).values()):
            return 1.0  # foresight: only memory counts
        if not self._checked:
            self._choose(whole, model, num_items)
        return self._weight(self._chosen, part, whole)

    def _weight(self, count: Count | None, part: Any, whole: Any) -> float:
        if count is None:
            return 1.0
        return float(count(part)) / max(float(count(whole)), 1.0)

    def _labels(self, inputs: Any) -> float:
        shift = int(getattr(self._trainer, "_loss_shifts_labels", False))
        found = [inputs[name] for name in self._trainer.label_names if name in inputs]
        if not found or any(labels.is_floating_point() for labels in found):
            return float(self._length(inputs))
        kept = [labels[..., shift:] if labels.ndim > 1 else labels for labels in found]
        return float(sum(int((labels != -100).sum()) for labels in kept))

    def _choose(self, whole: Any, model: Any, num_items: Any) -> None:
        samples = [self._split(whole, i, i + 1) for i in range(self._length(whole))]
        counts = [self._labels(sample) for sample in samples]
        # Two neighbours that tell the rules apart, if there are any.
        at = max(range(len(counts) - 1), key=lambda i: abs(counts[i] - counts[i + 1]))
        pair, both = self._split(whole, at, at + 2), samples[at : at + 2]
        model = self._trainer.accelerator.unwrap_model(model)
        with _undisturbed(model):
            losses = [self._loss(inputs, model, num_items) for inputs in (pair, *both)]
        arguments = self._trainer.args
        half = arguments.bf16 or arguments.fp16 or next(model.parameters()).dtype.itemsize < 4
        for count in self._kinds.values():
            weights = [self._weight(count, sample, pair) for sample in both]
            total = weights[0] * losses[1] + weights[1] * losses[2]
            if abs(total - losses[0]) <= (2e-2 if half else 1e-4) * max(map(abs, losses)):
                self._chosen, self._checked = count, True
                return
        raise ValueError(
            "this batch does not fit and cannot be run in parts: the loss of two samples "
            f"({losses[0]:.6g}) does not follow from their own ({losses[1]:.6g} and "
            f"{losses[2]:.6g}), as it would if it were {' or '.join(self._kinds)}. Pass count= if "
            "it is a mean over something else; losses that compare the samples have no parts"
        )

    def _loss(self, inputs: Any, model: Any, num_items: Any) -> float:
        trainer = self._trainer
        with trainer.compute_loss_context_manager():
            own = trainer._prepare_inputs(inputs)
            loss = trainer.compute_loss(model, own, num_items_in_batch=num_items)
        return float(loss)


@contextmanager
def _undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Without gradients, dropout and a trace in the random state."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng([device.index for device in devices]):
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
