"""Real tensors that are fake for the duration of a trace."""

from __future__ import annotations

import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from brim import _C
from brim._estimate._errors import LeftBehindError
from brim._estimate._values import give_input, give_value
from brim._state.undoing import Undoing

_C.provide(swap_tensors=torch._C._swap_tensor_impl)

_SWAPPABLE = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _is_swappable(tensor: torch.Tensor) -> bool:
    """Whether it is a plain tensor; subclasses are left to torch."""
    return type(tensor) in _SWAPPABLE and tensor.layout is torch.strided and not tensor.is_quantized


def _meta_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """One of the same size without memory."""
    return torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()


class Swap:
    """Makes tensors fake in place: every reference sees the fake one until it is put back.

    A tensor's Python object stays, so an optimizer's state, closures and lists of parameters remain
    valid. The real tensor, with its values, its gradient and its version, rests in the meantime
    behind another Python object, where nothing can change it.

    Args:
        undo: puts them back.
        mode: the mode of the fake tensors.
        target: the device that the trace is for.
        moves: whether tensors on the CPU are taken to be on the target. Those on the meta device
            always are: they stand for tensors that the program has elsewhere.
        lost: gets a text for each tensor that could not be put back.
    """

    def __init__(
        self,
        undo: Undoing,
        mode: FakeTensorMode,
        target: torch.device,
        moves: bool,
        lost: list[str],
    ) -> None:
        self._undo = undo
        self._lost = lost
        self.mode = mode
        self._target = target
        self._moves = moves
        self._storages: dict[
            int, weakref.ref[torch.UntypedStorage]
        ] = {}  # by the real one's address

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Where a real tensor is taken to be."""
        if tensor.is_meta or (self._moves and tensor.device.type == "cpu" and tensor.dim() > 0):
            return self._target
        return tensor.device

    def fake(self, tensor: torch.Tensor) -> FakeTensor:
        """A new fake tensor for a real one. Tensors that share memory share it as fakes too."""
        with _disable_current_modes(), torch.no_grad():
            storage = tensor.untyped_storage()
            known = self._storages.get(storage._cdata)
            meta = None if known is None else known()
            if meta is None:
                meta = _meta_storage(storage)
                self._storages[storage._cdata] = weakref.ref(meta)
            made = self._made(tensor, meta, self.device_of(tensor))
            give_input(made, tensor)
            made.requires_grad_(tensor.requires_grad)
            if isinstance(tensor, torch.nn.Parameter):
                made._is_param = True
            return made

    def fake_of_new(self, tensor: torch.Tensor, device: torch.device) -> FakeTensor:
        """A fake tensor for a real one that nothing else refers to."""
        with torch._C._DisableTorchDispatch():
            made = self._made(tensor, _meta_storage(tensor.untyped_storage()), device)
        give_value(made, tensor)
        return made

    def _made(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, device: torch.device
    ) -> FakeTensor:
        element = torch.empty(0, dtype=tensor.dtype, device="meta").set_(
            storage, tensor.storage_offset(), tensor.size(), tensor.stride()
        )
        return FakeTensor(self.mode, element, device)

    def swap(self, tensor: torch.Tensor) -> bool:
        """Make a tensor fake in place; false if it is fake already, or cannot be."""
        if isinstance(tensor, FakeTensor) or not _is_swappable(tensor):
            return False
        made = self.fake(tensor)
        grad = tensor.grad if tensor.is_leaf else None
        if grad is not None and grad.layout is torch.strided:
            with _disable_current_modes():
                made.grad = grad if isinstance(grad, FakeTensor) else self.fake(grad)
        if tensor.requires_grad:
            for hook in list((tensor._backward_hooks or {}).values()):
                made.register_hook(hook)  # type: ignore[no-untyped-call]
        if tensor.is_leaf and tensor.requires_grad:
            for hook in list((tensor._post_accumulate_grad_hooks or {}).values()):
                made.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        made.__dict__ = {**tensor.__dict__, **made.__dict__}
        self._undo.callback(lambda: self._put_back(tensor, made, grad))
        _C.exchange_tensors(tensor, made)
        return True

    def _put_back(
        self, tensor: torch.Tensor, real: torch.Tensor, grad: torch.Tensor | None
    ) -> None:
        """Make a tensor real again, if it was made fake."""
        if isinstance(tensor, FakeTensor):
            try:
                _C.exchange_tensors(tensor, real)
            except RuntimeError as error:
                self._lost.append(
                    f"a {type(real).__name__} of shape {list(real.shape)} could not be put back "
                    f"and has no values now, so load it again: {error}"
                )
                raise LeftBehindError(self._lost[-1]) from error
        if tensor.is_leaf and tensor.grad is not grad:
            tensor.grad = None if isinstance(grad, FakeTensor) else grad
