"""A callback for the `Trainer` of Hugging Face transformers: converted layers, steps in parts."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from traceback import walk_stack
from typing import Any

import torch

import brim
from brim._state.undoing import Undoing, set_attribute
from brim.integrations._weights import Count, Weights, check_options, labels_that_count, nothing
from brim.nn.convert import Choices, ConversionReport

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(
        "brim.integrations.transformers needs transformers: pip install 'brim[transformers]'"
    ) from error

__all__ = ["BrimCallback"]

_log = logging.getLogger("brim")


class BrimCallback(TrainerCallback):
    """Converts the model's layers, and runs batches that do not fit in parts.

    The parts leave the gradients and the loss of the whole batch, with gradient accumulation (also
    over tokens: `num_items_in_batch`), autocast, gradient scalers, label smoothing, peft and DDP.
    A batch that fits is one part, with the same bits as without this callback. Checkpoints have the
    same keys.

    Args:
        convert: change the model's layers to brim's, which keep less for backward (`brim.convert`).
        recompute: `"cheap"` or `"products"` for still less; see `brim.convert`.
        only: convert these layers alone; see `brim.convert`.
        skip: leave these layers out; see `brim.convert`.
        microbatches: run a batch that does not fit in parts.
        count: how many items the loss of some inputs is a mean over, as a function of the inputs.
            By default it is worked out: the loss is divided by `num_items_in_batch`, or it is a
            mean over labels that are not -100, or over samples.
        check: compare pairs of samples with both together in batches that are split, and refuse
            losses that do not follow from their parts. False trusts `count`, for losses that draw
            random numbers.
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
        check: bool = True,
        **options: Any,
    ) -> None:
        if not check and count is None:
            raise ValueError("check=False needs count=, which is then trusted")
        if not microbatches and (count is not None or options):
            given = ", ".join([*options, *(["count"] if count is not None else [])])
            raise ValueError(f"{given} is for microbatches, which are switched off")
        check_options("BrimCallback", options, "reduction", "model", "scaler")
        self._convert: dict[str, Any] | None = None
        if convert:
            self._convert = {"recompute": recompute, "only": only, "skip": skip}
        self._microbatches, self._options = microbatches, options
        self._count, self._check = count, check
        self._converted: Callable[[], torch.nn.Module | None] = lambda: None
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
            trainer.training_step = _Step(self, trainer)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Give the steps back."""
        trainer = self._trainer()
        if isinstance(vars(trainer).get("training_step"), _Step):
            del trainer.training_step

    def _change(self, model: torch.nn.Module | None) -> None:
        if self._convert is not None and model is not None and self._converted() is not model:
            self._converted = weakref.ref(model)
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

    def __init__(self, owner: BrimCallback, trainer: Any) -> None:
        self._owner, self._trainer = owner, trainer
        self._run = trainer.training_step
        self._model: Any = None
        self._inputs = self._num_items = None

    def __call__(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if self._owner not in self._trainer.callback_handler.callbacks:
            del self._trainer.training_step  # training ended in an error, without on_train_end
            found: torch.Tensor = self._run(model, inputs, num_items_in_batch)
            return found
        if self._model is not model or self._owner.step is None:
            self._model, self._owner.step = model, self._made_for(model)
            self._weights = self._weights_of(self._owner.step)
        self._inputs, self._num_items = inputs, num_items_in_batch
        self._weights.next_batch()
        try:
            loss = self._owner.step(inputs)
            return loss * int(self._trainer.accelerator.gradient_accumulation_steps)
        finally:
            self._inputs = self._num_items = None

    def _made_for(self, model: torch.nn.Module) -> brim.Microbatches:
        accelerator = self._trainer.accelerator
        given = {"model": model, "scaler": accelerator.scaler, "reduction": "sum"}
        given["check"] = False  # Weights compares
        if accelerator.num_processes > 1:
            given["ranks"] = True

        def training_step(part: Any) -> torch.Tensor:
            return self._loss(part)

        training_step.__qualname__ = "Trainer.training_step"  # for messages
        return brim.Microbatches(training_step, **{**given, **self._owner._options})

    def _loss(self, part: Any) -> torch.Tensor:
        """What the trainer would call backward of, with its share in the batch."""
        accelerator = self._trainer.accelerator
        weight = self._weights.of(part, self._inputs)
        if weight == 0:
            return nothing(self._model)
        caught: list[torch.Tensor] = []
        with Undoing() as undo:
            set_attribute(undo, accelerator, "backward", lambda loss, **_: caught.append(loss))
            self._run(self._model, part, self._num_items)
        if len(caught) != 1:
            raise ValueError(
                f"training_step of {type(self._trainer).__name__} called accelerator.backward "
                f"{len(caught)} times, but steps in parts need exactly one call, with the whole "
                "loss: add the losses up, or pass microbatches=False"
            )
        loss: torch.Tensor = caught[0] / accelerator.gradient_accumulation_steps
        weight /= accelerator.num_processes  # DDP would take the mean over ranks
        return loss if weight == 1 else loss * weight

    def _weights_of(self, step: brim.Microbatches) -> Weights:
        arguments = self._trainer.args
        model = self._trainer.accelerator.unwrap_model(self._model)
        rules: dict[str, Count | None] = {
            "divided by num_items_in_batch": None,
            "a mean over labels that are not -100": self._labels,
            "a mean over samples": step._length,
        }
        if self._owner._count is not None:
            rules = {"a mean over count(inputs)": self._owner._count}
        half = arguments.bf16 or arguments.fp16
        return Weights(rules, self._value, step, model, half, self._owner._check)

    def _labels(self, inputs: Any) -> float:
        """How many labels count: models of causal language have none for the first token."""
        first = int(getattr(self._trainer, "_loss_shifts_labels", False))
        found = [inputs[name] for name in self._trainer.label_names if name in inputs]
        return labels_that_count(found, first)

    def _value(self, inputs: Any) -> torch.Tensor:
        """The loss of some samples."""
        trainer = self._trainer
        model = trainer.accelerator.unwrap_model(self._model)
        with trainer.compute_loss_context_manager():
            own = trainer._prepare_inputs(inputs)
            loss: torch.Tensor = trainer.compute_loss(
                model, own, num_items_in_batch=self._num_items
            )
        return loss
