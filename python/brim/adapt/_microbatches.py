"""Training on batches in parts that fit, with the gradients of the whole batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Unpack

from brim import _C
from brim._arguments import positive, whole
from brim._C import Attempt
from brim.adapt import _parts
from brim.adapt._identity import structure
from brim.adapt._options import Options, identity, inside, make, name_of, rank_setting

Loss: TypeAlias = "torch.Tensor | tuple[torch.Tensor, float | torch.Tensor]"
_Module = TypeVar("_Module", bound=torch.nn.Module)


class Scaler(Protocol):
    """As `torch.amp.GradScaler`."""

    def scale(self, outputs: torch.Tensor, /) -> torch.Tensor: ...


class Microbatches:
    """Calls `loss_fn` on parts of a batch that fit, and backward on each.

    `step(batch)` leaves in `.grad` what the whole batch would have left, added to what was there,
    and returns the loss of the whole batch. If memory runs out, the batch is run again in smaller
    parts, with the same random state: the gradients are those of a run that had that size from the
    start, to the bit. The size is worked out and remembered as `brim.maximize` does it.

    Args:
        loss_fn: a part -> its loss, a tensor of one element. If that is not a mean (or sum) over
            the batch's items but over something else (tokens that are no padding), it returns
            `(loss, count)`.
        model: checked for layers that see the whole batch, as BatchNorm in training. Also needed
            for reentrant checkpoints, which hide parameters from the loss's graph, and with
            `ranks`.
        reduction: `"mean"` or `"sum"`: what `loss_fn` does over the items of a part.
        size: the longest part, tried first; the whole batch if None.
        dim: the dimension of the batch's tensors along which its items are.
        split: a function `(batch, start, stop)` -> the part with these items, for batches that are
            no tensor and no tuple, list, dict or dataclass of tensors; `"slice"` for
            `batch[start:stop]`, as of a list of samples.
        length: a function of a batch -> how many items it has; `len` by default. With `split`.
        scaler: a `torch.amp.GradScaler`; backward gets the scaled loss.
        allow: classes of layers that see the whole batch and are used all the same. Their buffers
            are put back after an attempt that ran out of memory.
        q: prefer multiples of this.
        **options: see `Options`. With `ranks`, the gradients and the loss are those of the batches
            of all ranks together, as if one process had run them; DDP's own reduction is not used.
            With `collectives="inside"` the model reduces its gradients itself (FSDP).

    Raises:
        ValueError: if a layer sees the whole batch, the members of a batch differ in length, or,
            with `ranks`, the loss has gradients for parameters that are not in `model`.

    Example:
        >>> import brim, torch
        >>> model = torch.nn.Linear(4, 1)
        >>> step = brim.Microbatches(lambda part: (model(part) ** 2).mean(), model=model, size=16)
        >>> loss = step(torch.ones(100, 4))
        >>> model.weight.grad.shape, step.size
        (torch.Size([1, 4]), 16)
    """

    def __init__(
        self,
        loss_fn: Callable[[Any], Loss],
        *,
        model: torch.nn.Module | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        size: int | None = None,
        dim: int = 0,
        split: _parts.Split | Literal["slice"] | None = None,
        length: _parts.Length | None = None,
        scaler: Scaler | None = None,
        allow: type[torch.nn.Module] | tuple[type[torch.nn.Module], ...] = (),
        q: int = 1,
        **options: Unpack[Options],
    ) -> None:
        if model is not None and not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {model!r:.100}")
        if scaler is not None and not hasattr(scaler, "scale"):
            raise TypeError(f"scaler must have a method `scale`, got {scaler!r:.100}")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
        self._loss_fn, _ = inside(loss_fn)
        self._most = None if size is None else positive("size", size)
        self._split, self._length = _splitting(split, length, whole("dim", dim, -(2**63)))
        self._scale = None if scaler is None else scaler.scale
        self._items = self._longest = self._size = 0
        self._model, self._allow = model, allow
        self._busy = threading.Lock()
        self._pass = _C.BatchPass(reduction)
        self._ranks = rank_setting(options, f"Microbatches {name_of(loss_fn)}")
        self._reduction: _C.GradientReduction | None = None
        if self._ranks is not None and options.get("collectives", "between") == "between":
            if model is None:
                raise ValueError("ranks needs model=, whose gradients are reduced over the ranks")
            if options.get("sync") == "settled":
                raise ValueError(
                    "sync='settled' is not for Microbatches: the gradients are reduced in every "
                    "call, and each rank must know that no other has failed"
                )
            self._reduction = _C.GradientReduction(reduction)
        mine = options.get("restore")
        restore: list[Any] = [] if mine is None else [mine]
        allowed = [layer for layer in self._modules(_BatchNorm) if isinstance(layer, allow)]
        restore += [buffer for layer in allowed for buffer in layer.buffers()]
        if self._ranks is not None:  # an attempt that fitted is undone if it failed elsewhere
            restore.append((lambda: None, lambda _: self._pass.undo()))
        if restore:
            options["restore"] = restore
        slots: dict[str, tuple[str, int]] = {"batch": ("batch", 0), "size": ("size", 1)}
        self._adaptive = make(
            "maximize",
            self._attempt,
            options,
            ranks_of=lambda *_: self._ranks,
            slots=slots,
            site=self._identity() if options.get("persist") else "",
            name="part size",
            log_name=name_of(loss_fn),
            parameters=[slots["size"]],
            quanta=[positive("q", q)],
            groups=[[0]],
            cut_dim=dim,
            maxima_may_differ=True,
        )

    def __call__(self, batch: Any) -> torch.Tensor:
        """Run the batch; the gradients are in `.grad` when it returns.

        Returns:
            The loss of the whole batch, without a graph.

        Raises:
            torch.OutOfMemoryError: if a part does not fit even at the floor. The gradients are then
                as before, and so they are after any other exception.
        """
        return self._run(batch, record=False)[0]

    def record(self, batch: Any) -> tuple[torch.Tensor, list[Attempt]]:
        """The same, with the attempts that it took."""
        return self._run(batch, record=True)

    @property
    def size(self) -> int:
        """The size of the parts of the last batch; 0 before the first."""
        return self._size

    def clear(self) -> None:
        """Forget what was learned about sizes."""
        self._adaptive.clear()

    def _run(self, batch: Any, *, record: bool) -> tuple[torch.Tensor, list[Attempt]]:
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(
                "a Microbatches runs inside of its own loss_fn, or in two threads at once: make "
                "one for each"
            )
        try:
            self._begin(batch)
            return self._run_parts(batch, record=record)
        finally:
            self._pass.undo()
            self._busy.release()

    def _begin(self, batch: Any) -> None:
        """Check the model and the batch, as they are now."""
        try:
            self._refuse_whole_batch()
            self._refuse_waiting()
            self._items = whole("the length of the batch", self._length(batch), 1)
        except Exception as error:
            agreement = None if self._ranks is None else self._ranks()
            if agreement is not None:  # else the other ranks' present call meets our next one
                agreement.refuse_call(f"{type(error).__name__}: {error}")
            raise
        self._longest = max(self._longest, self._items)
        parameters = [] if self._model is None else list(self._model.parameters())
        self._pass.name(parameters)
        if self._reduction is not None:
            self._reduction.name(parameters)

    def _run_parts(self, batch: Any, *, record: bool) -> tuple[torch.Tensor, list[Attempt]]:
        # On several ranks the same on each, though some may have shorter batches now.
        upper = self._items if self._ranks is None else self._longest
        most = upper if self._most is None else min(self._most, upper)
        if record:
            loss, attempts = self._adaptive.record(batch, most)
        else:
            loss, attempts = self._adaptive(batch, most), []
        if self._reduces():
            loss = self._reduction.run(self._sum_over_ranks)  # type: ignore[union-attr]
        self._pass.finish()
        return loss, attempts

    def _attempt(self, batch: Any, size: int) -> torch.Tensor:
        self._size = size

        def part(start: int, stop: int) -> Any:
            if stop - start == self._items:
                return batch
            return self._split(batch, start, stop)

        with self._without_collectives():
            loss = self._pass.run(self._items, size, self._loss_fn, part, self._scale)
        if self._reduces():
            self._refuse_other_parameters()
            self._reduction.prepare(loss, self._pass.count)  # type: ignore[union-attr]
        return loss

    def _reduces(self) -> bool:
        """Whether there are other ranks, and this reduces the gradients over them."""
        return self._reduction is not None and self._ranks.group is not None

    def _sum_over_ranks(self, tensor: torch.Tensor) -> None:
        torch.distributed.all_reduce(tensor, group=self._ranks.group)

    def _modules(self, kind: type[_Module]) -> list[_Module]:
        modules = () if self._model is None else self._model.modules()
        return [module for module in modules if isinstance(module, kind)]

    @contextmanager
    def _without_collectives(self) -> Iterator[None]:
        """No rank waits in a part for one that fails."""
        with ExitStack() as stack:
            if self._reduction is not None and self._model is not None:
                parallel = self._modules(DistributedDataParallel)
                for module in parallel:
                    module.require_forward_param_sync = False  # else its first forward waits
                    stack.enter_context(module.no_sync())
                if not parallel:
                    hook = self._model.register_forward_pre_hook(_refuse_parallel_around)
                    stack.callback(hook.remove)
            yield

    def _refuse_other_parameters(self) -> None:
        for leaf in self._pass.not_named():
            if isinstance(leaf, torch.nn.Parameter):
                raise ValueError(
                    f"loss_fn uses a parameter of shape {list(leaf.shape)} that model= does not "
                    "have: its gradient would differ between the ranks. Pass a model that has it, "
                    "as torch.nn.ModuleList([first, second])"
                )

    def _refuse_waiting(self) -> None:
        if self._ranks is not None:
            return
        for module in self._modules(DistributedDataParallel):
            group: Any = module.process_group
            if group.size() > 1:
                raise ValueError(
                    "model is or has a DistributedDataParallel, whose ranks wait for each other "
                    "in every part: pass ranks=True"
                )

    def _refuse_whole_batch(self) -> None:
        layers = [m for m in self._modules(_BatchNorm) if not isinstance(m, self._allow)]
        seeing = [m for m in layers if m.training or not m.track_running_stats]
        if not seeing or self._model is None:
            return
        names = {id(module): name for name, module in self._model.named_modules()}
        listed = ", ".join(
            f"{names.get(id(layer)) or 'model'} ({type(layer).__name__})" for layer in seeing[:8]
        )
        more = f" and {len(seeing) - 8} more" if len(seeing) > 8 else ""
        raise ValueError(
            f"model has layers that see the whole batch, which would see a part of it: {listed}"
            f"{more}. Call eval() on them, replace them (GroupNorm), or pass "
            f"allow={type(seeing[0]).__name__} if statistics of parts are good enough"
        )

    def _identity(self) -> str:
        """What tells this from others in files."""
        model = 0 if self._model is None else structure(self._model)
        return f"{identity('microbatches', self._loss_fn, '')} {model}"


def _refuse_parallel_around(model: torch.nn.Module, _: object) -> None:
    if torch.compiler.is_compiling():
        return
    if DistributedDataParallel._active_ddp_module is not None:
        raise ValueError(
            "loss_fn calls a DistributedDataParallel, and model= is the module inside of it, so "
            "that both would reduce the gradients: pass the DistributedDataParallel as model="
        )


def _splitting(split: Any, length: Any, dim: int) -> tuple[_parts.Split, _parts.Length]:
    if split is None:
        if length is not None:
            raise ValueError("length is for batches with a split of their own: pass split= too")
        return (
            lambda batch, start, stop: _parts.part(batch, dim, start, stop),
            lambda batch: _parts.length(batch, dim),
        )
    if split == "slice":
        split = _slice
    for name, value in (("split", split), ("length", length or len)):
        if not callable(value):
            raise TypeError(f"{name} must be callable, got {value!r:.100}")
    return split, length or len


def _slice(batch: Any, start: int, stop: int) -> Any:
    return batch[start:stop]
