"""Losses that need the outputs of all items at once: encoders, and what they change."""

from __future__ import annotations

import dataclasses
import functools
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from brim import _C
from brim._arguments import check_callable, name_of, refused, runs_in_parts, shown
from brim._state.restorable import writable
from brim._state.undo import reached_modules, undisturbed
from brim._warn import warn
from brim.adapt._parts import Length, Split, members, rebuilt
from brim.memory import DeviceLike, is_out_of_memory

#: One function, or several: each with its own member of the batch.
Encode: TypeAlias = (
    "Callable[[Any], Any] | Mapping[Any, Callable[[Any], Any]] | Sequence[Callable[[Any], Any]]"
)


class Joint:
    """A loss of all embeddings, and what makes them of the parts of a batch.

    Args:
        loss: embeddings -> their loss.
        encode: as in `brim.Microbatches`.
        split: cuts a batch, or a member of it.
        length: how many items that has.
    """

    def __init__(
        self, loss: Callable[[Any], Any], encode: Encode, split: Split, length: Length
    ) -> None:
        check_callable("loss", loss)
        _check_takes_one(loss, "loss", "the embeddings")
        self.loss = loss
        self._keys: list[Any] | None = None  # of the batch's members; None: it is not divided
        if isinstance(encode, Mapping):
            self._keys = list(encode)
            encoders = list(encode.values())
        elif isinstance(encode, (tuple, list)):
            self._keys = list(range(len(encode)))
            encoders = list(encode)
        else:
            encoders = [cast("Callable[[Any], Any]", encode)]
        if not encoders:
            raise ValueError(f"encode must have one function or more, got {shown(encode)}")
        for encoder in encoders:
            check_callable("encode", encoder)
            if runs_in_parts(encoder):
                raise TypeError(f"encode must return its outputs, but {name_of(encoder)} yields")
            _check_takes_one(encoder, "encode", "a part of the batch")
        self.encoders: list[Callable[[Any], Any]] = encoders
        self._given = encode
        self._split, self._length = split, length
        self._structures: list[Any] = []
        #: Leads to all that is called, and identifies it.
        self.work: Callable[..., Any] = functools.partial(_together, loss, *encoders)

    def lengths(self, batch: Any) -> list[int]:
        """How many items each encoder has."""
        return [self._length(member) for member in self._members(batch)]

    def _members(self, batch: Any) -> list[Any]:
        """Of each encoder."""
        if self._keys is None:
            return [batch]
        if isinstance(self._given, Mapping):
            if not isinstance(batch, Mapping) or set(batch) != set(self._keys):
                got = list(batch) if isinstance(batch, Mapping) else shown(batch)
                raise ValueError(
                    f"encode has functions for {self._keys}, so a batch must be a dictionary with "
                    f"these keys, got {got}"
                )
            return [batch[key] for key in self._keys]
        if not isinstance(batch, (tuple, list)) or len(batch) != len(self._keys):
            raise ValueError(
                f"encode has {len(self._keys)} functions, so a batch must be a tuple of as many "
                f"members, got {shown(batch)}"
            )
        return list(batch)

    def run(
        self,
        batch_pass: _C.BatchPass,
        batch: Any,
        size: int,
        items: list[int],
        *,
        backward: Callable[[list[torch.Tensor], list[torch.Tensor] | None], None],
        buffers: Buffers,
        device: DeviceLike,
        ranks: tuple[_C.Agreement, _C.GroupSum] | None,
        first: Callable[[], None],
    ) -> torch.Tensor | None:
        """Leave the gradients of the whole batch.

        `first` is called ahead of all encoding, where the other ranks learn of its errors.

        Returns:
            The loss; None where another rank failed.
        """
        given = self._members(batch)
        self._structures = [None] * len(given)
        host = _HostRandom()
        written = _Written(given)
        begun = False
        again = False  # the parts are encoded
        is_one = size >= max(items)  # whose graph stays, and may hold what buffers were

        def encode(encoder: int, start: int, stop: int) -> list[torch.Tensor]:
            nonlocal begun
            if not begun:
                first()
                begun = True
            whole = stop - start == items[encoder]
            part = given[encoder] if whole else self._split(given[encoder], start, stop)
            try:
                output = self.encoders[encoder](part)
            except Exception as error:
                if is_out_of_memory(error):
                    written.refuse()
                raise
            written.refuse()
            if again:
                buffers.drop_objects()
            elif not is_one or ranks is not None:
                buffers.keep_objects()
            return self._flat(encoder, output)

        def loss(outputs: list[list[torch.Tensor]]) -> torch.Tensor:
            nonlocal again
            value: torch.Tensor = self.loss(self._nested(outputs))
            if ranks is not None:
                buffers.keep_objects()  # a changed one is refused
            elif not is_one:
                buffers.defer_objects()
            again = not is_one
            return value

        value: torch.Tensor | None = None
        try:
            value = batch_pass.run_joint(
                items,
                size,
                encode,
                loss,
                backward,
                device,
                (host.take, host.put_back),
                (buffers.names, buffers.tensors, buffers.carried),
                ranks,
            )
        finally:
            if value is None:
                buffers.put_objects_back()
        buffers.keep_objects()
        return value

    def _flat(self, encoder: int, output: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        structure = _structure(output, found, "encode's result")
        if not found:
            raise TypeError(f"encode must return a tensor, or several, got {shown(output)}")
        known = self._structures[encoder]
        if known is None:
            self._structures[encoder] = structure
        elif not _same(structure, known):
            raise ValueError(
                "encode must return the same structure for each part, with the same values beside "
                f"the tensors, got {structure} and {known}"
            )
        return found

    def _nested(self, outputs: list[list[torch.Tensor]]) -> Any:
        made = [
            _filled(structure, each)
            for structure, each in zip(self._structures, outputs, strict=True)
        ]
        if self._keys is None:
            return made[0]
        if isinstance(self._given, Mapping):
            return dict(zip(self._keys, made, strict=True))
        return tuple(made)

    def check(self, batch: Any, items: list[int], model: torch.nn.Module | None) -> None:
        """Compare the outputs of two items together and apart.

        Raises:
            ValueError: if they differ, so that those of parts are not those of the whole batch.

        Warns:
            UserWarning: if `encode` fails on so few items.
        """
        for encoder, member, count in zip(self.encoders, self._members(batch), items, strict=True):
            if count < 2:
                continue

            def outputs(
                start: int, stop: int, encoder: Any = encoder, member: Any = member
            ) -> list[torch.Tensor]:
                found: list[torch.Tensor] = []
                part = _copied(self._split(member, start, stop))
                _structure(encoder(part), found, "encode's result")
                return [tensor for tensor in found if tensor.ndim > 0]

            def compare(outputs: Any = outputs) -> str | None:
                with torch.no_grad():
                    return _difference(
                        *(outputs(*span) for span in ((0, 2), (0, 2), (0, 1), (1, 2)))
                    )

            try:
                difference = undisturbed(compare, model, encoder)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                warn(
                    "encode cannot be checked, as it fails on one or two items in eval mode "
                    f"({type(error).__name__}: {error}): make sure that each row depends on its "
                    "own item only; check=False trusts it"
                )
                continue
            finally:
                torch.clear_autocast_cache()  # of weights without a graph
            if difference:
                raise ValueError(
                    "encode does not treat the items of a part apart from each other: "
                    f"{difference}. It must return rows that depend on their own item only "
                    "(embeddings), which `loss` compares; check=False trusts it"
                )

    def foresee(self, batch: Any, size: int, items: list[int], scale: Any) -> int:
        """Allocate what a step allocates: a part without a graph, the loss, two with a graph."""
        longest = max(items)
        outputs: list[list[torch.Tensor]] = []
        members_ = self._members(batch)
        self._structures = [None] * len(members_)
        lengths = [_part_length(count, longest, size) for count in items]
        for at, (member, count) in enumerate(zip(members_, items, strict=True)):
            with torch.no_grad():
                part = self._flat(at, self.encoders[at](self._split(member, 0, lengths[at])))
                outputs.append(
                    [
                        each.new_zeros([count, *each.shape[1:]]).requires_grad_(
                            each.is_floating_point()
                        )
                        for each in part
                    ]
                )
                del part
        loss = self.loss(self._nested(outputs))
        (loss if scale is None else scale(loss)).backward()
        del loss
        for at, (member, count) in enumerate(zip(members_, items, strict=True)):
            for start in range(0, min(count, 2 * lengths[at]), lengths[at]):
                stop = min(start + lengths[at], count)
                part = self._flat(at, self.encoders[at](self._split(member, start, stop)))
                roots = [each for each in part if each.requires_grad]
                if roots:
                    torch.autograd.backward(roots, [torch.ones_like(each) for each in roots])
                del part, roots
        return 0  # items that are left


def joint_of(
    loss_fn: Any,
    loss: Any,
    encode: Any,
    reduction: str,
    split: Any,
    length: Any,
    options: Mapping[str, Any],
) -> Joint | None:
    """Checks what is only for a loss of all items."""
    if loss is None and encode is None:
        return None
    if loss_fn is not None:
        raise ValueError("loss_fn has the loss of a part: pass either it, or loss= and encode=")
    if loss is None or encode is None:
        given, other = ("loss", "encode") if encode is None else ("encode", "loss")
        raise ValueError(f"{given}= needs {other}= too: encode gives what loss gets")
    if reduction != "mean":
        raise ValueError(
            f"reduction says how losses of parts add up, got {reduction!r}, but loss gets all items"
        )
    for name, refused_value in (("per_rank", True), ("collectives", "inside")):
        if options.get(name) == refused_value:
            raise ValueError(
                f"{name}={refused_value!r} cannot be had with loss= and encode=: all ranks "
                "exchange their embeddings between the parts"
            )
    return Joint(loss, encode, split, length)


class Buffers:
    """The buffers that encoders may change.

    Args:
        modules: that have them.
        allow: classes of layers whose buffers may carry over from part to part.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], allow: type | tuple[type, ...]) -> None:
        self.names: list[str] = []
        self.tensors: list[torch.Tensor] = []
        self.carried: list[torch.Tensor] = []
        self._objects: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._deferred: list[tuple[torch.Tensor, torch.Tensor]] = []
        seen: set[int] = set()
        for module in modules:
            for path, layer in module.named_modules():
                if isinstance(layer, _BatchNorm) and not layer.training:
                    continue
                for name, buffer in layer._buffers.items():
                    if buffer is None or id(buffer) in seen or not _is_plain(buffer):
                        continue
                    seen.add(id(buffer))
                    self._objects.append((layer._buffers, name, buffer))
                    if isinstance(layer, _BatchNorm) and isinstance(layer, allow):
                        self.carried.append(writable(buffer))
                    else:
                        self.tensors.append(writable(buffer))
                        self.names.append(f"{path}.{name}" if path else name)

    def keep_objects(self) -> None:
        """A forward may have assigned new tensors: their values go to those that were there."""
        self.defer_objects()
        for buffer, now in self._deferred:
            writable(buffer).copy_(writable(now))
        self._deferred.clear()

    def defer_objects(self) -> None:
        """The same, but the values go there later: a graph may hold those that were there."""
        self._deferred += self.drop_objects()

    def drop_objects(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The same without the values, which are returned."""
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for holder, name, buffer in self._objects:
            now = holder.get(name)
            if now is None or now is buffer or now.requires_grad:
                continue
            if now.shape == buffer.shape and now.dtype == buffer.dtype:
                found.append((buffer, now))
                holder[name] = buffer
        return found

    def put_objects_back(self) -> None:
        """After a failure: all of them."""
        for holder, name, buffer in self._objects:
            holder[name] = buffer


def buffers_of(
    model: torch.nn.Module | None, reached: list[torch.nn.Module], allow: Any
) -> Buffers:
    """Those of `model` and of the modules that the encoders and the loss lead to."""
    return Buffers([*([] if model is None else [model]), *reached], allow)


def reached_by(encoders: list[Callable[[Any], Any]]) -> list[torch.nn.Module]:
    """The modules that they lead to."""
    return reached_modules(functools.partial(_together, *encoders))


class _Written:
    """Whether the tensors of a batch are written to."""

    def __init__(self, batch: Any) -> None:
        self._versions = [
            (tensor, tensor._version) for tensor in _tensors(batch) if not tensor.is_inference()
        ]

    def refuse(self) -> None:
        if any(tensor._version != version for tensor, version in self._versions):
            raise ValueError(
                "encode writes to its part in place, which it gets a second time, or again after "
                "running out of memory: write to a copy"
            )


class _HostRandom:
    """The states of Python's and NumPy's generators, by number."""

    def __init__(self) -> None:
        self._states: list[Any] = []

    def take(self) -> int:
        numpy: Any = sys.modules.get("numpy.random")
        state: list[Any] = [random.getstate()]
        if numpy is not None:
            kind, keys, *rest = numpy.get_state()
            state.append((kind, keys.tobytes(), rest))
        if not self._states or self._states[-1][0] != state:
            self._states.append((state, None if numpy is None else numpy.get_state()))
        return len(self._states) - 1

    def put_back(self, number: int) -> None:
        state, of_numpy = self._states[number]
        random.setstate(state[0])
        if of_numpy is not None:
            sys.modules["numpy.random"].set_state(of_numpy)


@dataclasses.dataclass(frozen=True)
class _Slot:
    """The place of a tensor in a structure."""

    index: int

    def __repr__(self) -> str:
        return "a tensor"


def _together(*functions: Callable[..., Any]) -> None:
    """Only leads to functions."""


def _check_takes_one(function: Any, name: str, what: str) -> None:
    if signature := refused(function, 1):
        raise TypeError(
            f"{name} is called with one argument, {what}, but {name_of(function)} takes {signature}"
        )


def _structure(value: Any, found: list[torch.Tensor], path: str) -> Any:
    """The value with slots for tensors, which are added to `found`."""
    if isinstance(value, torch.Tensor):
        found.append(value)
        return _Slot(len(found) - 1)
    if value is None or isinstance(value, (str, bytes, bool, int, float, complex)):
        return value
    if members(value) is None:
        raise TypeError(
            f"{path} has a {type(value).__name__}: encode must return a tensor, or a tuple, list, "
            "dict or dataclass of tensors"
        )
    return rebuilt(value, lambda each: _structure(each, found, path))


def _filled(structure: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(structure, _Slot):
        return tensors[structure.index]
    if members(structure) is None:
        return structure
    return rebuilt(structure, lambda each: _filled(each, tensors))


def _same(a: Any, b: Any) -> bool:
    inner, other = members(a), members(b)
    if inner is None or other is None:
        return type(a) is type(b) and (a == b or a != a)
    return (
        type(a) is type(b)
        and inner.keys() == other.keys()
        and all(_same(inner[key], other[key]) for key in inner)
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in (members(value) or {}).values() for tensor in _tensors(each)]


def _is_plain(buffer: torch.Tensor) -> bool:
    return not (
        is_lazy(buffer)
        or buffer.is_meta
        or buffer.layout != torch.strided
        or buffer.is_nested
        or hasattr(buffer, "to_local")
    )


def _part_length(items: int, longest: int, size: int) -> int:
    parts = -(-longest // size)
    return min(size if items == longest else -(-items // parts), items)


def _copied(part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return part.clone()
    return part if members(part) is None else rebuilt(part, _copied)


def _difference(
    whole: list[torch.Tensor],
    again: list[torch.Tensor],
    first: list[torch.Tensor],
    second: list[torch.Tensor],
) -> str | None:
    """How the outputs of two items differ from those of each; None where they do not."""
    if not len(whole) == len(again) == len(first) == len(second):
        return "another number of tensors for two items than for one"
    for pair, same, a, b in zip(whole, again, first, second, strict=True):
        if a.shape[1:] != pair.shape[1:] or b.shape[1:] != pair.shape[1:]:
            return f"shape {list(pair.shape)} for two items, and {list(a.shape)} for one"
        apart = torch.cat([a, b])
        if apart.shape != pair.shape:
            return f"shape {list(pair.shape)} for two items, and {list(a.shape)} for one"
        if not pair.is_floating_point():
            differs = not torch.equal(pair, apart) and torch.equal(pair, same)
        else:
            is_double = pair.dtype == torch.float64
            pair, same, apart = pair.double(), same.double(), apart.double()
            # float32 may have been made by bfloat16 or TF32, as by autocast inside of `encode`.
            bound = (1e-3 if is_double else 0.05) * float(pair.abs().max()) if pair.numel() else 0.0
            random_ = float((pair - same).abs().max()) > bound / 10 if pair.numel() else True
            differs = not random_ and float((pair - apart).abs().max()) > bound
        if differs:
            return "two items together have other values than each alone"
    return None
