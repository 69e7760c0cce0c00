"""Training on batches in parts that fit, with the gradients of the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch._guards import active_fake_mode
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import Never, Unpack

from brim import _C
from brim._arguments import flag, name_of, positive, shown, whole
from brim._estimate import FirstSize
from brim._state.undo import reached_modules
from brim._state.undoing import Undoing
from brim.adapt import _parts
from brim.adapt._attempts import Attempts
from brim.adapt._identity import identity, structure
from brim.adapt._joint import Encode, Joint, buffers_of, joint_of, reached_by
from brim.adapt._options import Options, inside, make, rank_setting
from brim.adapt._parallel import (
    has_other_ranks,
    parallel_modules,
    refuse_other_parameters,
    refuse_waiting,
    sharded,
    without_collectives,
)
from brim.adapt._refusals import check_loss_fn, refuse_whole_batch
from brim.adapt._run_loss import RunLoss
from brim.adapt._split_check import SplitCheck

Loss: TypeAlias = "torch.Tensor | tuple[torch.Tensor, float | torch.Tensor]"

_FORESEEN = (
    "Microbatches finds its size by running, so a call cannot be foreseen: estimate what it runs, "
    "brim.estimate(lambda: loss_fn(batch).backward())"
)
_BUSY = (
    "a Microbatches runs inside of its own loss_fn, or in two threads at once: make one for each"
)


class Scaler(Protocol):
    """As `torch.amp.GradScaler`."""

    def scale(self, outputs: torch.Tensor, /) -> torch.Tensor: ...


class Microbatches:
    """Calls `loss_fn` on parts of a batch that fit, and backward on each.

    A loss that needs all items at once (a contrastive one) is given as `encode` and `loss`.

    `step(batch)` leaves in `.grad` what the whole batch would have left, added to what was there,
    and returns the loss of the whole batch. If memory runs out, the batch is run again in smaller
    parts, with the same random state: the gradients are those of a run that had that size from the
    start, to the bit. The size is worked out and remembered as `brim.maximize` does it. Where a
    model with `recompute="auto"` drops values so that a part fits, smaller parts that drop nothing
    are timed beside it, in about eight steps, and the faster ones stay.

    Args:
        loss_fn: a part -> its loss, a tensor of one element. What a mean divides by is read from
            the loss's graph: elements, labels that are not ignored, weights of classes, what a sum
            is divided by. Where the graph does not show it, return `(loss, count)`.
        model: checked for layers that see the whole batch, as BatchNorm in training. Also needed
            for reentrant checkpoints, which hide parameters from the loss's graph, and with
            `ranks`.
        loss: the outputs of `encode` for all items -> their loss. May have its own parameters.
        encode: a part -> its embeddings: a tensor with a row per item, which depends on that item
            only, or a tuple, list, dict or dataclass of such. A dictionary or tuple of functions:
            several encoders, each for its own member of the batch; `loss` gets the like.
        reduction: `"mean"` or `"sum"`: what `loss_fn` does over a part.
        check: compare the losses and gradients of a few items, together and apart, in the first
            batch that is split, and in later ones whose items differ more. `loss_fn` is then called
            with copies of one and two items, in eval mode, three times for each of up to three
            pairs; what it does to buffers and modes of modules is put back. A loss that does not
            follow from its parts is an error: one that compares items with each other, takes a
            root, norm or maximum over the batch, or adds means over different things. False trusts
            `loss_fn`. With `encode`: compare the embeddings of two items.
        size: the longest part, tried first; the whole batch if None.
        dim: the dimension of the batch's tensors along which its items are. A packed batch (of a
            `brim.data.PackedCollator`, or a dictionary with `cu_seqlens`) is cut between documents,
            which are its items.
        split: a function `(batch, start, stop)` -> the part with these items, for batches other
            than a tensor or a tuple, list, dict or dataclass of tensors; `"slice"` for
            `batch[start:stop]`, as of a list of samples.
        length: a function of a batch -> how many items it has; `len` by default. With `split`.
        scaler: a `torch.amp.GradScaler`; backward gets the scaled loss.
        allow: classes of layers that see the whole batch and are used all the same. Their buffers
            are put back after an attempt that ran out of memory.
        q: prefer multiples of this.
        foresee: before the first batch of a kind, trace two parts on fake tensors and start at the
            size that fits (see `brim.maximize`). With `model`, gradients that are there count too.
        **options: see `Options`. With `ranks`, the gradients and the loss are those of the batches
            of all ranks together, as if one process had run them; DDP's own reduction is not used.
            A model that reduces its gradients itself (FSDP) needs `collectives="inside"`, which
            is the default if `model` is sharded already.

    Raises:
        ValueError: if a layer sees the whole batch, the members of a batch differ in length, the
            loss does not follow from those of parts, or, with `ranks`, the loss has gradients for
            parameters that are not in `model`.

    Example:
        >>> import brim, torch
        >>> model = torch.nn.Linear(4, 1)
        >>> step = brim.Microbatches(lambda part: (model(part) ** 2).mean(), model=model, size=16)
        >>> loss = step(torch.ones(100, 4))
        >>> model.weight.grad.shape, step.size
        (torch.Size([1, 4]), 16)
        >>> loss = brim.Microbatches(encode=model, loss=torch.var, size=16)(torch.rand(100, 4))
    """

    def __init__(
        self,
        loss_fn: Callable[[Any], Loss] | None = None,
        model: torch.nn.Module | None = None,
        *,
        loss: Callable[[Any], torch.Tensor] | None = None,
        encode: Encode | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        size: int | None = None,
        dim: int = 0,
        split: _parts.Split | Literal["slice"] | None = None,
        length: _parts.Length | None = None,
        scaler: Scaler | None = None,
        allow: type[torch.nn.Module] | tuple[type[torch.nn.Module], ...] = (),
        q: int = 1,
        foresee: bool = False,
        check: bool = True,
        **options: Unpack[Options],
    ) -> None:
        self._split, self._length = _parts.splitting(split, length, whole("dim", dim, -(2**63)))
        # Not cached properties: before Python 3.12 a lock of theirs outlives a fork.
        self._encoded_by_found: list[torch.nn.Module] | None = None
        self._reached_found: list[torch.nn.Module] | None = None
        self._joint = joint_of(loss_fn, loss, encode, reduction, self._split, self._length, options)
        if self._joint is None:
            check_loss_fn(loss_fn, model)
        else:
            loss_fn = self._joint.work
        if model is not None and not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {shown(model)}")
        if scaler is not None and not hasattr(scaler, "scale"):
            raise TypeError(f"scaler must have a method `scale`, got {shown(scaler)}")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
        self._loss_fn, _ = inside(loss_fn, "loss_fn")
        self._most = None if size is None else positive("size", size)
        self._scale = None if scaler is None else scaler.scale
        self._items = self._size = 0
        self._lengths: list[int] = []  # of each encoder's batch
        self._device = options.get("device")
        self._model, self._allow = model, allow
        self._name = name_of(loss_fn if loss is None else loss)
        self._running: dict[str, object] = {}  # the call that runs
        self._pass = _C.BatchPass(reduction)
        if model is not None and options.get("ranks") and sharded([model]):
            if self._joint is not None:
                raise ValueError(
                    "model is sharded (FSDP), so that its ranks wait for each other in every part, "
                    "of which loss= and encode= know nothing: use a DistributedDataParallel"
                )
            if options.get("collectives", "inside") == "between":
                raise ValueError(
                    "model is sharded (FSDP), so that its ranks wait for each other in every part, "
                    'but collectives is "between": pass collectives="inside", or leave it out'
                )
            options["collectives"] = "inside"
        self._ranks = rank_setting(options, f"Microbatches {self._name}")
        self._check: SplitCheck | None = None
        self._checks = flag("check", check)
        if self._checks and self._joint is None:
            self._check = SplitCheck(
                self._loss_fn, model, self._split, dim if split is None else None
            )
        self._pools = False  # the batches of `accumulate`
        self._reduction: _C.GradientReduction | None = None
        self._inside: _C.Agreement | None = None  # with collectives inside of the parts
        if self._ranks is not None and options.get("collectives", "between") == "between":
            if model is None:
                raise ValueError("ranks needs model=, whose gradients are reduced over the ranks")
            self._reduction = _C.GradientReduction("sum" if self._joint else reduction)
        mine = options.get("restore")
        restore: list[Any] = [] if mine is None else [mine]
        layers = () if model is None else model.modules()
        allowed = [m for m in layers if isinstance(m, _BatchNorm) and isinstance(m, allow)]
        restore += [buffer for layer in allowed for buffer in layer.buffers()]
        if self._ranks is not None:  # an attempt that fitted is undone if it failed elsewhere
            restore.append((lambda: None, lambda _: self._pass.undo()))
        if restore:
            options["restore"] = restore
        slots: dict[str, tuple[str, int]] = {
            "batch": ("batch", 0),
            "size": ("size", 1),
            "items": ("items", 2),
        }
        self._adaptive = make(
            "maximize",
            self._attempt,
            options,
            ranks_of=lambda *_: self._ranks,
            slots=slots,
            site=self._identity() if options.get("persist") else "",
            name="part size",
            log_name=self._name,
            parameters=[slots["size"]],
            quanta=[positive("q", q)],
            groups=[[0]],
            cut_dim=dim,
            items=slots["items"],
            maxima_may_differ=True,
            maxima_are_lengths=True,
            foresee=self._foresight(options) if flag("foresee", foresee) else None,
        )

    def __call__(self, batch: Any, *others: Never) -> torch.Tensor:
        """Run the batch; the gradients are in `.grad` when it returns.

        Returns:
            The loss of the whole batch, without a graph.

        Raises:
            torch.OutOfMemoryError: if a part does not fit even at the floor. The gradients are then
                as before, and so they are after any other exception.
        """
        if others:
            raise TypeError(
                f"a batch is one argument, got {1 + len(others)}: pass a tuple, as step((x, y)), "
                "which loss_fn gets in parts"
            )
        return self._run(batch, record=False)[0]

    def record(self, batch: Any) -> tuple[torch.Tensor, Attempts]:
        """The same, with the attempts that it took."""
        return self._run(batch, record=True)

    def accumulate(self, batches: Iterable[Any]) -> torch.Tensor:
        """Run several batches as if they were one.

        The gradients and the loss are means over all batches together, by what each of them counts
        (items, or tokens where the loss is a mean over tokens), and not sums of means, as several
        calls leave them. With `ranks`, all ranks have as many batches.

        Returns:
            The loss of all batches, without a graph.

        Raises:
            torch.OutOfMemoryError: as a call. Gradients are then as before the first batch.

        Example:
            >>> import brim, torch
            >>> model = torch.nn.Linear(4, 1)
            >>> step = brim.Microbatches(lambda part: (model(part) ** 2).mean(), model=model)
            >>> loss = step.accumulate([torch.ones(100, 4), torch.ones(50, 4)])
        """
        if self._joint is not None:
            raise ValueError("loss needs all items at once: pass one batch, not several")
        with Undoing() as undo:
            undo.callback(self._end_pool)
            self._pools = True
            for batch in batches:
                self._run(batch, record=False)
            return RunLoss.of(self._pass.finish_pool())

    def _end_pool(self) -> None:
        self._pass.undo_pool()
        self._pools = False

    def __repr__(self) -> str:
        size = f"parts of {self._size}" if self._size else "not called yet"
        return f"<Microbatches of {self._name}: {size}>"

    @property
    def size(self) -> int:
        """The size of the parts of the last batch; 0 before the first."""
        return self._size

    def clear(self) -> None:
        """Forget what was learned about sizes."""
        self._adaptive.clear()

    def _run(self, batch: Any, *, record: bool) -> tuple[torch.Tensor, Attempts]:
        if active_fake_mode() is not None:
            raise TypeError(_FORESEEN)
        own = object()
        with Undoing() as undo:
            undo.callback(functools.partial(self._leave, own))
            if self._running.setdefault("call", own) is not own:  # in one step of Python
                raise RuntimeError(_BUSY)
            undo.callback(self._pass.undo)
            self._begin(batch)
            loss, attempts = self._run_parts(batch, record=record)
            return RunLoss.of(loss), attempts

    def _leave(self, own: object) -> None:
        if self._running.get("call") is own:
            self._running.clear()

    def _begin(self, batch: Any) -> None:
        """Check the model and the batch, as they are now."""
        agreement = None if self._ranks is None else self._ranks()
        parameters = [] if self._model is None else list(self._model.parameters())
        self._pass.name(parameters)
        self._pass.count_always(self._pools or self._ranks is not None)
        if self._reduction is not None and agreement is not None:
            self._reduction.name(parameters)
            agreement.end_with(self._reduction, self._ranks.sum)
            if not self._reduction.is_planned:
                agreement.unsettle()  # a rank can vote only on what it has prepared before
        try:
            refuse_whole_batch([] if self._model is None else [self._model], self._allow)
            refuse_waiting(self._parallel(), self._ranks is not None, self._reduction is not None)
            if self._joint is not None:
                self._lengths = [
                    whole("the length of the batch", length, 1)
                    for length in self._joint.lengths(batch)
                ]
                self._items = max(self._lengths)
                if agreement is not None:
                    agreement.meet_in_attempts(True)
            else:
                self._items = whole("the length of the batch", self._length(batch), 1)
            self._inside = agreement if self._reduction is None else None
            if self._inside is not None:
                self._inside.length = self._items
        except Exception as error:
            if agreement is not None:  # else the other ranks' present call meets our next one
                agreement.refuse_call(f"{type(error).__name__}: {error}")
            raise

    def _run_parts(self, batch: Any, *, record: bool) -> tuple[torch.Tensor, Attempts]:
        most = self._items if self._most is None else min(self._most, self._items)
        if record:
            loss, attempts = self._adaptive.record(batch, most, self._items)
        else:
            loss, attempts = self._adaptive(batch, most, self._items), Attempts()
        if self._reduces():
            loss = self._reduction.loss  # type: ignore[union-attr]
        if self._pools:
            counted = self._reduction if self._reduces() else None
            count = self._pass.count if counted is None else counted.total
            shape = self._pass.shape if counted is None else counted.shape
            self._pass.pool(loss, count, shape)
        else:
            self._pass.finish()
        return loss, attempts

    def _attempt(self, batch: Any, size: int, items: int) -> torch.Tensor | None:
        self._size = size
        if self._joint is not None:
            return self._attempt_joint(self._joint, batch)

        def part(start: int, stop: int) -> Any:
            if stop - start == items:
                return batch
            return self._split(batch, start, stop)

        with Undoing() as undo:
            loss = self._run_pass(batch, size, part, undo)
        if self._reduces():
            refuse_other_parameters(self._pass.not_named())
            self._reduction.prepare(loss, self._pass.count, self._pass.shape)  # type: ignore[union-attr]
        return loss

    def _attempt_joint(self, joint: Joint, batch: Any) -> torch.Tensor | None:
        """An attempt at a loss of all items. None where another rank failed in it."""

        def backward(roots: list[torch.Tensor], gradients: list[torch.Tensor] | None) -> None:
            if gradients is None and self._scale is not None:
                roots = [self._scale(roots[0])]
            torch.autograd.backward(roots, gradients)

        with Undoing() as undo:
            if self._reduction is not None:
                without_collectives(undo, self._model, not self._reduction.is_planned)
            ranks = None
            if self._reduces():
                ranks = (self._ranks(), self._ranks.sum)

            def first() -> None:
                if self._size < self._items and self._model is None:
                    refuse_whole_batch(self._encoded_by, self._allow)
                if self._size < self._items and self._checks:
                    joint.check(batch, self._lengths, self._model)
                    self._checks = False

            loss = joint.run(
                self._pass,
                batch,
                self._size,
                self._lengths,
                backward=backward,
                buffers=buffers_of(self._model, self._reached, self._allow),
                device=self._device,
                ranks=ranks,
                first=first,
            )
        if loss is not None and self._reduces():
            refuse_other_parameters(self._pass.not_named())
            self._reduction.prepare(loss, 1.0, 0.0)  # type: ignore[union-attr]
        return loss

    @property
    def _encoded_by(self) -> list[torch.nn.Module]:
        """The modules that `encode` leads to. Looked for once."""
        if self._encoded_by_found is None:
            self._encoded_by_found = [] if self._joint is None else reached_by(self._joint.encoders)
        return self._encoded_by_found

    def _run_pass(
        self, batch: Any, size: int, part: Callable[[int, int], Any], undo: Undoing
    ) -> torch.Tensor:
        if self._reduction is not None:
            without_collectives(undo, self._model, not self._reduction.is_planned)
        if self._model is None and size < self._items:
            refuse_whole_batch(self._reached, self._allow)
        if self._check is not None and size < self._items and self._may_check():
            self._check.run(self._pass, batch, self._items, size)
        try:
            return self._pass.run(
                self._items, size, self._loss_fn, part, self._scale, self._all_ranks()
            )
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            raise RuntimeError(
                "the loss has a graph that backward has used already: loss_fn must not call "
                "backward itself, and must compute in each part all that has gradients"
            ) from error

    def _may_check(self) -> bool:
        """Whether no other rank waits in the forwards of a check.

        With `ranks`, parts have no collectives, or all ranks run as many.
        """
        return self._reduction is not None or (self._inside is None and not has_other_ranks())

    def _all_ranks(self) -> tuple[int, float, Callable[[list[float]], list[float]]] | None:
        """How the parts of all ranks fit together, if they have collectives inside."""
        ranks = self._inside
        if ranks is None:
            return None
        device = next((p.device for p in self._model.parameters()), None) if self._model else None

        def means(own: list[float]) -> list[float]:
            total = torch.tensor(own, dtype=torch.float64, device=device)
            group: Any = self._ranks.group
            self._ranks.sum(total)
            return (total / float(group.size())).tolist()

        return ranks.parts, float(ranks.longest), means

    def _foresight(self, options: Options) -> FirstSize:
        """Traces two parts: further ones need no more than the second, which meets gradients."""
        loss_fn, split, scale = self._loss_fn, self._split, self._scale
        parameters = [] if self._model is None else list(self._model.parameters())

        joint = self._joint

        def two_parts(batch: Any, size: int, items: int) -> None:
            before = [parameter.grad for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None
            if joint is not None:
                items = joint.foresee(batch, size, joint.lengths(batch), scale)
            for start in range(0, min(items, 2 * size), size):
                stop = min(start + size, items)
                result = loss_fn(batch if stop - start == items else split(batch, start, stop))
                loss = result[0] if isinstance(result, tuple) else result
                loss = loss if scale is None else scale(loss)
                loss.backward(torch.full_like(loss, size / items))
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient

        def quietly(body: Callable[[], Any]) -> Any:
            with Undoing() as undo:
                if self._reduction is not None:
                    without_collectives(undo, self._model, not self._reduction.is_planned)
                return body()

        return FirstSize("size", options, two_parts, quietly)

    def _reduces(self) -> bool:
        """Whether there are other ranks, and this reduces the gradients over them."""
        return self._reduction is not None and self._ranks.group is not None

    def _parallel(self) -> list[torch.nn.Module]:
        """Modules whose ranks may wait for each other, also those that only `loss_fn` names."""
        modules = [] if self._model is None else [self._model]
        if self._ranks is None and has_other_ranks():
            modules += self._reached
        return parallel_modules(modules)

    @property
    def _reached(self) -> list[torch.nn.Module]:
        """The modules that the work leads to. Looked for once: that takes as long as a step."""
        if self._reached_found is None:
            self._reached_found = reached_modules(self._loss_fn)
        return self._reached_found

    def _identity(self) -> str:
        """What tells this from others in files."""
        model = 0 if self._model is None else structure(self._model)
        return f"{identity('microbatches', self._loss_fn, '')} {model}"
