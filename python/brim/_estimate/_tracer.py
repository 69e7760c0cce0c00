"""Follows the storages of fake tensors through a call: forward, backward and optimizer step."""

from __future__ import annotations

import functools
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from brim import _C
from brim._estimate._backward import InPlace, backward_now
from brim._estimate._cpu import CpuTemporaries
from brim._estimate._cpu_libraries import reserved_by_onednn_rnn
from brim._estimate._cuda_kernels import CudaTemporaries
from brim._estimate._cuda_rnns import fake_backward, reserved_by_cudnn_rnn
from brim._estimate._errors import EstimateError
from brim._estimate._log import Allocation, Kind, Log
from brim._estimate._places import ModuleStack, current_line
from brim._estimate._quick import on_meta
from brim._estimate._shapes import LARGEST, by_numbers, grouped_product
from brim._estimate._swap import Swap
from brim._estimate._temporaries import tensors_in
from brim._estimate._values import Values
from brim._estimate._work import flops_of
from brim._state.kept import Kept

aten = torch.ops.aten

_RESERVES = {
    aten._cudnn_rnn.default: reserved_by_cudnn_rnn,
    aten.mkldnn_rnn_layer.default: reserved_by_onednn_rnn,
}

# They have no fake kernel, the first one before torch 2.12: their result is like this argument.
_LIKE = {aten._transformer_encoder_layer_fwd.default: 0, aten._ctc_loss_backward.Tensor: 1}

# Their results stay in the memory of something larger that was calculated before.
_IN_LARGER_MEMORY = {
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.binary_cross_entropy.default,
    aten.col2im.default,
}

# Operators whose kernels in torch consist of other operators: those are traced.
_TRACED_INSIDE = """
_euclidean_dist _safe_softmax affine_grid_generator binary_cross_entropy_with_logits linalg_pinv
logsumexp soft_margin_loss soft_margin_loss_backward
"""


@functools.cache
def _depends_on_values(func: Any) -> bool:
    """Whether an operator's result, or its shape, depends on more than its arguments' shapes."""
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
    if func is aten.index.Tensor:  # by numbers: masks are made into such
        return False
    pure = func.namespace in ("aten", "brim", "prims") and func is not aten.lift_fresh.default
    return not pure or not tags.isdisjoint(func.tags)


@functools.cache
def _inside(func: Any) -> Callable[..., Any] | None:
    """Runs the operators that this one consists of, if those are to be traced."""
    has_kernel = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    lifts = func is aten.lift_fresh.default
    if has_kernel("CompositeImplicitAutograd") and not has_kernel("CPU") and not lifts:
        run: Callable[..., Any] = func.decompose  # without autograd it arrives here whole
        return run
    for name in ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"):
        if func.__name__.partition(".")[0] in _TRACED_INSIDE.split() and has_kernel(name):
            return functools.partial(func._op_dk, getattr(torch._C.DispatchKey, name))
    return None


@functools.cache
def _results(elsewhere: bool) -> _C.FakeResults:
    """What operators return, for all traces of one kind of device."""
    return _C.FakeResults(FakeTensor, elsewhere)


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator that runs on fake tensors, and notes each storage once.

    Args:
        swap: makes real tensors fake that the call touches.
        kept: puts back what modules and optimizers hold.
        is_here: whether the calling thread is the traced one.
        target: the device whose memory counts.
        moves: whether tensors on the CPU count as being on the target.
        temporaries: what the target's kernels allocate inside.
        rehearsal: what the call would have to give up.
        on_operator: called for each operator.
    """

    def __init__(
        self,
        swap: Swap,
        kept: Kept,
        is_here: Callable[[], bool],
        target: torch.device,
        moves: bool,
        temporaries: CpuTemporaries | CudaTemporaries,
        rehearsal: _C.Rehearsal,
        on_operator: Callable[[], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.answer = _C.pass_on
        vars(self)["__torch_dispatch__"] = types.MethodType(_C.dispatch, self)
        self.log = Log(rehearsal)
        self.flops = 0
        self.assumptions: dict[str, None] = {}  # in order, each once
        self.modules = ModuleStack(self.take_module, is_here)
        self._swap = swap
        self._kept = kept
        self._is_here = is_here
        self._target = target
        self._moves = moves
        self._elsewhere = target.type != "cpu"
        self._temporaries = temporaries
        self.values = Values()
        self._results = _results(self._elsewhere)
        self._on_operator = on_operator
        self._live: dict[int, tuple[weakref.ref[Any], Allocation]] = {}  # by address of the storage
        self._parameters: dict[int, tuple[torch.Tensor, str]] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._seen_modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.in_place = InPlace()
        self.unknown: Counter[Any] = Counter()  # operators whose temporaries are not known
        self._backward = -1
        self.ran_backward = False
        self.left: list[tuple[weakref.ref[Any], Allocation]] = []  # when it stops

    # ---- what exists before the call ----------------------------------------------------------

    def take_module(self, root: torch.nn.Module) -> None:
        """Make a module's parameters and buffers fake."""
        if root in self._seen_modules:
            return
        self.modules.add(root)
        for path, module in root.named_modules():
            if module in self._seen_modules:
                continue
            self._seen_modules.add(module)
            own = module.__dict__
            self._kept.keep_with_contents(own)  # parameters, hooks
            for name, tensor in (*own["_parameters"].items(), *own["_buffers"].items()):
                if tensor is not None:
                    full = f"{path}.{name}" if path else name
                    if is_lazy(tensor):  # its first call changes the module's class
                        raise EstimateError(
                            f"{full} of {type(root).__name__} has no shape yet: run the module "
                            "once on a real input before it is estimated"
                        )
                    self.take(tensor, Kind.parameter, full)
                    self._parameters.setdefault(id(tensor), (tensor, full))
            for name, value in own.items():
                if isinstance(value, torch.Tensor):
                    self.take(value, Kind.parameter, f"{path}.{name}" if path else name)

    def take_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer's parameters and state fake."""
        if id(optimizer) in self._optimizers:
            return
        self._optimizers[id(optimizer)] = optimizer
        self._kept.keep_with_contents(optimizer.__dict__)
        for group in optimizer.param_groups:
            self._kept.keep(group)
            for parameter in group["params"]:
                self.take(parameter, Kind.parameter, "")
                self._parameters.setdefault(id(parameter), (parameter, ""))
        for state in optimizer.state.values():
            if isinstance(state, dict):
                self._kept.keep(state)
            for tensor in tensors_in(state):
                self.take(tensor, Kind.optimizer_state, "")

    def take(self, tensor: torch.Tensor, kind: Kind, name: str) -> None:
        """Make a tensor fake in place, and count it as held before the call."""
        if not self._swap.swap(tensor):
            return
        self._hold(tensor, kind, name)
        if tensor.is_leaf and tensor.grad is not None:
            self._hold(tensor.grad, Kind.gradient, name)

    def _hold(self, tensor: torch.Tensor, kind: Kind, name: str) -> None:
        self._hide_device([tensor])
        storage = tensor.untyped_storage()
        if not self._counts(tensor) or storage._cdata in self._live:
            return
        self._watch(storage, self.log.hold(storage.nbytes(), kind, name))

    # ---- operators ----------------------------------------------------------------------------

    def handle(self, func: Any, _: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator on fake tensors and note what it allocated."""
        self._on_operator()
        kwargs = dict(kwargs)
        inputs = _C.tensors_of((args, kwargs))
        for tensor in inputs:
            if not isinstance(tensor, FakeTensor) and func is not aten.lift_fresh.default:
                self.take(tensor, Kind.input, current_line())
        if self._elsewhere:
            self._place_on_target(func, inputs, kwargs)
        backward = backward_now()
        if backward != self._backward:
            self._enter_backward(backward)
        inside = _inside(func) if func is not aten.index.Tensor else by_numbers(*args)
        if inside is not None:
            with self:
                return inside(*args, **kwargs)
        if backward != -1:
            func = self.in_place.variant(func, args, self._is_temporary(args))
        if _depends_on_values(func):
            result = self._by_value(func, args, kwargs, inputs)
        else:
            quick = on_meta(func, not self._elsewhere)
            result = self._results.get(self._swap.mode, func, args, kwargs, quick, self._run)
        outputs = [tensor for tensor in _C.tensors_of(result) if isinstance(tensor, FakeTensor)]
        self._note(func, args, kwargs, outputs, backward != -1)
        self.flops += flops_of(func, args, kwargs, result)
        if func._schema.is_mutable:
            self._note_resized(inputs)
        self.values.follow(func, args, kwargs, inputs, outputs)
        return result

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not self._elsewhere:
            return self._work_out(func, args, kwargs)
        inputs = [t for t in _C.tensors_of((args, kwargs)) if isinstance(t, FakeTensor)]
        _C.show_fake_device(inputs, True)
        try:
            result = self._work_out(func, args, kwargs)
        finally:
            self._hide_device(inputs)
        self._hide_device(_C.tensors_of(result))
        return result

    def _work_out(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if (
            func is aten._to_copy.default
            and self._elsewhere
            and kwargs.get("device") == args[0].device
            and kwargs.get("dtype") in (None, args[0].dtype)
            and kwargs.get("memory_format") in (None, torch.preserve_format)
        ):
            # It is there already; C++ code asks for a copy because it sees another device.
            return aten.detach.default(args[0])
        if func is aten._cudnn_rnn_backward.default:
            return fake_backward(args)
        if func is aten._grouped_mm.default:
            return grouped_product(*args, **kwargs)
        if func in _LIKE:
            return torch.empty_like(args[_LIKE[func]])
        result = func(*args, **kwargs)
        if func in _RESERVES:
            # Their fake kernels do not know how much the library keeps for backward.
            space = torch.empty(_RESERVES[func](args), dtype=torch.uint8, device=result[0].device)
            result = (*result[:3], space, *result[4:])
        elif func in _IN_LARGER_MEMORY and args[0].numel() > result.numel():
            larger = torch.empty_like(args[0], memory_format=torch.contiguous_format)
            result = larger.as_strided(result.shape, result.stride())
        return result

    def _place_on_target(
        self, func: Any, inputs: Iterable[torch.Tensor], kwargs: dict[str, Any]
    ) -> None:
        """C++ formulas ask for the device that they see of fake tensors, which is meta."""
        device = kwargs.get("device")
        if device is not None:
            moves = self._moves and device.type == "cpu"
            if moves or device.type in ("meta", self._target.type):
                kwargs["device"] = self._target
        elif self._moves and not inputs and any(a.name == "device" for a in func._schema.arguments):
            kwargs["device"] = self._target

    def _by_value(
        self, func: Any, args: Any, kwargs: dict[str, Any], inputs: list[torch.Tensor]
    ) -> Any:
        """The result of an operator that depends on values, or the largest that it may have."""
        tags = func.tags
        if func is aten.lift_fresh.default and type(args[0]) is torch.Tensor:
            return self._fake_of_new(args[0], args[0].device)
        if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
            found = self.values.result(func, args, kwargs, inputs)
            if found is not ...:
                where = inputs[0].device
                return tree_map_only(torch.Tensor, lambda t: self._fake_of_new(t, where), found)
            if func is aten._local_scalar_dense.default:
                return self._unknown_number(args[0])
            if func in LARGEST:
                self.assumptions[
                    f"{current_line()}: the size of the result of {func.name()} depends on values; "
                    "the largest possible stands for it"
                ] = None
                func = LARGEST[func]
        return self._run(func, args, kwargs)

    def _fake_of_new(self, tensor: torch.Tensor, device: torch.device) -> FakeTensor:
        made = self._swap.fake_of_new(tensor, device)
        self._hide_device([made])
        return made

    def _unknown_number(self, tensor: torch.Tensor) -> float:
        if not tensor.dtype.is_floating_point:
            raise EstimateError(
                f"{current_line()}: the code depends on a value that is not known without running "
                f"it (a tensor of {tensor.dtype} as a number or condition). Pass the value as an "
                "argument, or keep the decision in tensors (torch.where)"
            )
        self._assume_value("NaN")
        return float("nan")

    def _assume_value(self, value: str) -> None:
        line = current_line()
        self.assumptions[f"{line}: the value of a tensor is not known; {value} stands for it"] = (
            None
        )

    def formatted(self, tensor: torch.Tensor, how: str) -> str:
        """Text for a number in an f-string, which decides nothing: `f"{loss:.3f}"`."""
        if tensor.dim() > 0 or not isinstance(tensor, FakeTensor):
            return object.__format__(tensor, how)
        if tensor.dtype.is_floating_point:
            return format(tensor.item(), how)
        self._assume_value("0")
        return format(False if tensor.dtype == torch.bool else 0, how)

    def not_packed(self, *_: object, **__: object) -> None:
        """The answer of transformers where it looks for packed sequences."""
        self.assumptions["sequences are not packed (transformers)"] = None

    def watched(self, make: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """A function whose result, a real tensor on the CPU, counts: checkpoints keep such."""

        def made() -> torch.Tensor:
            tensor = make()
            if self._target.type == "cpu":
                storage = tensor.untyped_storage()
                place = self._place(backward_now() != -1)
                self._watch(storage, self.log.allocate(storage.nbytes(), Kind.temporary, place))
            return tensor

        return made

    def _is_temporary(self, args: Any) -> bool:
        if not args or not isinstance(args[0], torch.Tensor):
            return False
        entry = self._live.get(args[0].untyped_storage()._cdata)
        return entry is not None and entry[1].kind is Kind.temporary

    # ---- storages -----------------------------------------------------------------------------

    def _counts(self, tensor: torch.Tensor) -> bool:
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        return bool(device.type == self._target.type)

    def _hide_device(self, tensors: Any) -> None:
        if self._elsewhere:
            _C.show_fake_device(
                [t for t in tensors if isinstance(t, FakeTensor) and t.fake_device.type != "cpu"],
                False,
            )

    def _note_resized(self, inputs: Iterable[torch.Tensor]) -> None:
        for tensor in inputs:
            storage = tensor.untyped_storage()
            size, entry = storage.nbytes(), self._live.get(storage._cdata)
            if entry is not None and size != entry[1].bytes:
                self.log.free(entry[1])
                self._watch(storage, self.log.allocate(size, entry[1].kind, entry[1].place))

    def _note(
        self, func: Any, args: Any, kwargs: Any, outputs: list[FakeTensor], backward: bool
    ) -> None:
        place = ""
        inside = list(self._temporaries.of(func, args, kwargs, outputs, backward))
        if outputs and not self._temporaries.is_known(func):
            self.unknown[func] += 1
        for i, tensor in enumerate(outputs):
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if size and storage._cdata not in self._live and self._counts(tensor):
                place = place or self._place(backward)
                self._watch(storage, self.log.allocate(size, Kind.temporary, place))
                self.in_place.allocated(func, storage)
            for one in inside:
                if (one.outputs or len(outputs)) == i + 1:
                    name = ""
                    if one.bytes:
                        place = place or self._place(backward)
                        name = f"{func.name().split('::')[-1]} at {place}"
                    allocation = self.log.allocate(one.bytes, Kind.workspace, name)
                    if not one.stays:
                        self.log.free(allocation)

    def _place(self, backward: bool) -> str:
        if not backward:
            return self.modules.place()
        node = torch._C._current_autograd_node()
        return f"{current_line()} {node.name() if node is not None else 'backward'}"

    def _watch(self, storage: torch.UntypedStorage, allocation: Allocation) -> None:
        address = storage._cdata
        live, log = self._live, self.log

        def released(_: object) -> None:
            entry = live.get(address)
            if entry is not None and entry[1] is allocation:
                del live[address]
                log.free(allocation)

        live[address] = (weakref.ref(storage, released), allocation)

    # ---- kinds --------------------------------------------------------------------------------

    def _enter_backward(self, task: int) -> None:
        self._backward = task
        if task != -1:
            self.ran_backward = True
            for _, allocation in self._live.values():
                if allocation.kind is Kind.temporary:
                    allocation.kind = Kind.activation
        else:
            self.name_gradients()

    def name_gradients(self) -> None:
        """Note which storages are gradients by now."""
        for parameter, name in self._parameters.values():
            if isinstance(parameter, FakeTensor) and parameter.grad is not None:
                self._rename(parameter.grad, Kind.gradient, name)

    def before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """The hook that torch calls before every optimizer's step."""
        if self._is_here():
            self.take_optimizer(optimizer)
            self.name_gradients()

    def after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """The hook that torch calls after it: what the state consists of is known now."""
        if not self._is_here():
            return
        for parameter, state in optimizer.state.items():
            name = self._parameters.get(id(parameter), (None, ""))[1]
            for tensor in tensors_in(state):
                self._rename(tensor, Kind.optimizer_state, name)

    def _rename(self, tensor: torch.Tensor, kind: Kind, name: str) -> None:
        entry = self._live.get(tensor.untyped_storage()._cdata)
        if entry is not None:
            entry[1].kind = kind
            entry[1].place = name or entry[1].place

    def stop(self) -> None:
        """What is released from now on is not noted."""
        self.left = self.left or list(self._live.values())
        self._live.clear()
        self._parameters.clear()
        self._optimizers.clear()
