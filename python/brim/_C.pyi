"""Types of the C++ core's bindings. Python code imports these through `brim` and `brim.memory`."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import Signature
from pathlib import Path
from types import TracebackType
from typing import (
    Any,
    Concatenate,
    Final,
    Generic,
    Literal,
    ParamSpec,
    TypeAlias,
    TypeVar,
    overload,
)

import torch
from torch import Tensor
from typing_extensions import Self

from brim.adapt._attempts import Attempts

_Ints: TypeAlias = Sequence[int]
_T = TypeVar("_T")
_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_R = TypeVar("_R", covariant=True)
_Device: TypeAlias = str | torch.device | int | None

__version__: str
built_with_torch: str

class MemoryStats:
    allocated: Final[int]
    peak: Final[int]
    reserved: Final[int]
    limit: Final[int]
    free: Final[int]
    reservable: Final[int]
    inactive_split: Final[int]
    alloc_retries: Final[int]
    ooms: Final[int]

class HostMemory:
    """What the operating system says about this process's memory; a limit that is not set is None.

    `cgroup_limit` is that of the container, `address_space_limit` that of `ulimit -v`.
    """

    physical_total: Final[int]
    resident: Final[int]
    cgroup_limit: Final[int | None]
    address_space_limit: Final[int | None]

def host_memory() -> HostMemory: ...

class Fragmentation:
    cached: Final[int]
    stuck: Final[int]
    share: Final[float]
    usable: Final[int]
    def explains_failure_of(self, requested: int) -> bool: ...

class ClockByHand:
    def __enter__(self) -> ClockByHand: ...
    def __exit__(self, *exception: object) -> None: ...
    def advance(self, seconds: float) -> None: ...

class BlockWatch:
    def __init__(self, device: _Device = None, least: int = 0) -> None: ...
    def __enter__(self) -> BlockWatch: ...
    def __exit__(self, *exception: object) -> None: ...
    is_open: Final[bool]
    device: Final[torch.device]
    least: Final[int]
    in_use: Final[int]
    clock: Final[int]
    def blocks(self) -> list[tuple[int, int, int, str]]: ...
    def open(self) -> None: ...

class ExplainedBlock:
    def __init__(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

def explained_block() -> ExplainedBlock | None: ...

class ExplainingBlocks:
    def __init__(self, device: _Device) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    _device: Final[torch.device]

def live_objects(*types: type) -> list[Any]: ...
def held_by_python(tensors: list[torch.Tensor]) -> list[torch.Tensor]: ...
def is_counted(tensor: torch.Tensor) -> bool: ...
def uses_of_weights(tensors: list[torch.Tensor]) -> float: ...
def gradients_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]: ...

class Holder:
    kind: Final[MemoryKind]
    where: Final[str]
    bytes: Final[int]
    count: Final[int]
    grows: Final[bool]

class HeldBlock:
    def __init__(
        self, size: int, made_at: int, kind: MemoryKind, where: str, has_reason: bool
    ) -> None: ...

def holders_of(blocks: Sequence[HeldBlock], clock: int) -> list[Holder]: ...
def left_by_calls(held: Sequence[int]) -> int: ...
def holders_text(holders: Sequence[Holder], most: int = 10) -> str: ...

class Shortage:
    cause: Final[str]
    reason: Final[str]
    requested: Final[int]
    in_use: Final[int]
    limit: Final[int]
    missing: Final[int]
    others: Final[int]
    grown: Final[int]
    scattered: Final[int]

def diagnose(
    error: OomCause, stats: MemoryStats, resident: int, held: Sequence[Holder], grown: int
) -> Shortage: ...

class PeakMeter:
    def __init__(self, device: _Device | Sequence[_Device] = None) -> None: ...
    def __enter__(self) -> PeakMeter: ...
    def __exit__(self, *exception: object) -> None: ...
    peak: Final[int]
    start: Final[int]
    left: Final[int]
    peaks: Final[dict[torch.device, int]]

class Undoing:
    def __init__(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None: ...
    def callback(self, call: Callable[[], object]) -> None: ...
    def afterwards(self, call: Callable[[], object]) -> None: ...
    def keep(self) -> None: ...

class RegionState: ...

def within(
    recompute: str | None, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any: ...
def within_block(
    recompute: str | Literal[False] | None,
    again: Callable[..., object],
    function: Callable[..., Any],
    module: torch.nn.Module,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any: ...
def region_state() -> RegionState: ...

class Region:
    def __init__(self, recompute: str | None) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...

def pause_regions() -> None: ...
def leave_region() -> None: ...
def come_back() -> None: ...

class BeyondBudget:
    def __enter__(self) -> BeyondBudget: ...
    def __exit__(self, *error: object) -> None: ...

class Budget:
    def __init__(self, limit: int | str, device: _Device = None) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...
    is_open: Final[bool]
    limit: Final[int]
    device: Final[torch.device]
    _asked: Final[int | str]
    _entered: Final[bool]

class OomKind:
    none: OomKind
    device_memory: OomKind
    host_memory: OomKind
    library_workspace: OomKind
    size_limit: OomKind
    name: Final[str]

class OomCause:
    kind: Final[OomKind]
    device: Final[torch.device | None]
    requested: Final[int | None]
    in_use: Final[int | None]
    def __bool__(self) -> bool: ...

class OomInjector:
    def __init__(self, at: int, count: int, device: _Device) -> None: ...
    def __enter__(self) -> OomInjector: ...
    def __exit__(self, *exception: object) -> None: ...
    allocations: Final[int]
    failures: Final[int]

class Attempt:
    """One attempt of an adaptive call: what was tried and how it ended."""

    size: Final[int]
    values: Final[tuple[int, ...]]
    fitted: Final[bool]
    outcome: Final[OomKind]
    peak: Final[int | None]
    requested: Final[int | None]
    held: Final[int]
    available: Final[int | None]
    seconds: Final[float]
    repeats: Final[bool]

class SizeMemory:
    """What earlier calls learned about sizes."""

    def __init__(
        self, capacity: int = 4096, directory: str | os.PathLike[str] | None = None
    ) -> None: ...
    def __len__(self) -> int: ...
    def clear(self) -> None: ...
    @staticmethod
    def flush() -> None: ...
    @staticmethod
    def default_directory() -> Path: ...

class RankError(RuntimeError):
    """Another rank failed or is gone, or the ranks do different things."""

class GroupChannel:
    """Messages between the ranks of a torch.distributed group."""

    def __init__(self, messages: Any, store: Any, program: Any) -> None: ...
    def close(self) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...

class PaddedNeed:
    """About how many bytes a batch needs whose samples are padded in several sizes."""

    def __init__(self, sizes: int, weights: Sequence[float]) -> None: ...
    sizes: Final[int]
    weights: Final[list[float]]
    terms: Final[list[str]]
    def __call__(self, n: float, *longest: float) -> float: ...

class EvenSteps:
    def __init__(
        self, channel: GroupChannel | None, at_end: str, ahead: int, done: int, total: int | None
    ) -> None: ...
    def read(self) -> None: ...
    def end(self) -> None: ...
    def compare(self, first: int) -> None: ...
    def step(self) -> bool: ...
    def fail(self, why: str) -> None: ...
    to_read: Final[int]
    steps: Final[int]
    batches_read: Final[int]
    total: Final[int | None]
    ended: Final[bool]
    agrees_next: Final[bool]
    exchanges: Final[int]
    all_begin_alike: Final[bool]

class FitRanks:
    """The ranks of a group that measure together."""

    def __init__(self, channel: GroupChannel, what: str = "fit") -> None: ...
    def least(self, number: int) -> int: ...
    def same(self, text: str) -> None: ...
    def end_with_next(self) -> None: ...
    def fail(self, why: str) -> None: ...

class AgreementOptions:
    def __init__(self, per_rank: bool, sync: str, collectives: str) -> None: ...

class GroupSum:
    """Replaces a tensor by its sum over the ranks of a process group."""

    def __init__(self, group: Any) -> None: ...
    def __call__(self, tensor: Tensor) -> None: ...

class Agreement:
    """How the adaptive calls of one function agree on their size with other ranks."""

    def __init__(self, channel: GroupChannel, options: AgreementOptions, function: str) -> None: ...
    def refuse_call(self, why: str) -> None: ...
    def end_with(self, reduction: GradientReduction, add: GroupSum) -> None: ...
    def meet_in_attempts(self, meet: bool) -> bool: ...
    def unsettle(self) -> None: ...
    length: int
    @property
    def longest(self) -> int: ...
    @property
    def parts(self) -> int: ...

class AdaptiveFunction(Generic[_P, _R]):
    """A function that adapts its sizes when called; made by the decorators of `brim.adapt`."""

    __name__: str
    __qualname__: str
    __doc__: str | None
    __signature__: Signature
    __wrapped__: Callable[..., Any]
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R: ...
    @overload
    def __get__(self, instance: None, owner: type | None = None) -> AdaptiveFunction[_P, _R]: ...
    @overload
    def __get__(
        self: AdaptiveFunction[Concatenate[Any, _Q], _R],
        instance: object,
        owner: type | None = None,
    ) -> AdaptiveFunction[_Q, _R]: ...
    def record(self, *args: _P.args, **kwargs: _P.kwargs) -> tuple[_R, Attempts]: ...
    def clear(self) -> None: ...
    def forget(self, *args: _P.args, **kwargs: _P.kwargs) -> None: ...

class BatchPass:
    def __init__(self, reduction: str) -> None: ...
    def name(self, leaves: Sequence[Tensor]) -> None: ...
    def not_named(self) -> list[Tensor]: ...
    def run(
        self,
        items: int,
        size: int,
        loss_fn: Callable[..., Any],
        cut: Callable[[int, int], Any],
        scale: Callable[[Tensor], Tensor] | None,
        all_ranks: tuple[int, float, Callable[[list[float]], list[float]]] | None,
    ) -> Tensor: ...
    def run_joint(
        self,
        items: Sequence[int],
        size: int,
        encode: Callable[[int, int, int], Sequence[Tensor]],
        loss: Callable[[list[list[Tensor]]], Tensor],
        backward: Callable[[list[Tensor], list[Tensor] | None], None],
        device: object,
        more: tuple[Callable[[], int], Callable[[int], None]],
        buffers: tuple[list[str], list[Tensor], list[Tensor]],
        ranks: tuple[Agreement, GroupSum] | None,
    ) -> Tensor | None: ...
    def finish(self) -> None: ...
    def undo(self) -> None: ...
    def pool(self, loss: Tensor, count: float, shape: float) -> None: ...
    def finish_pool(self) -> Tensor: ...
    def undo_pool(self) -> None: ...
    def count_always(self, always: bool) -> None: ...
    count: Final[float]
    shape: Final[float]

class SplitCheck:
    UNKNOWN: Final[str]
    def __init__(self) -> None: ...
    def pairs(self, tensors: Sequence[Tensor], dim: int) -> list[int]: ...
    def pairs_of(self, traits: Sequence[Sequence[float]]) -> list[int]: ...
    def run(
        self,
        batch_pass: BatchPass,
        items: int,
        size: int,
        places: Sequence[int],
        loss_of: Callable[[int, int], Any],
        gradients: Callable[[Tensor, list[Tensor]], Sequence[Tensor | None]],
    ) -> str: ...
    @property
    def is_open(self) -> bool: ...

class GradientReduction:
    def __init__(self, reduction: str) -> None: ...
    def name(self, parameters: Sequence[Tensor]) -> None: ...
    @property
    def is_planned(self) -> bool: ...
    def prepare(self, loss: Tensor, count: float, shape: float) -> None: ...
    total: Final[float]
    shape: Final[float]
    loss: Final[Tensor]

class PolynomialRegression:
    def __init__(self, degree: int) -> None: ...
    def _fit(self, x: Sequence[float], y: Sequence[float], features: int) -> None: ...
    def _predict(self, x: Sequence[float], features: int) -> list[float]: ...
    def _inverse(
        self, budget: float, point: Sequence[float], feature: int, lower: int, upper: int
    ) -> int: ...
    degree: Final[int]
    features: Final[int]
    fitted: Final[bool]
    exponents: Final[list[tuple[int, ...]]]
    coefficients: Final[list[float]]

class PeakSample:
    """What one piece of work held at its peak; see `brim.collect_peaks`."""

    feature: Final[Any]
    peak: Final[int]
    start: Final[int]
    out_of_memory: Final[bool]
    requested: Final[int | None]

class MemorySample:
    """What a `brim.MemoryModel` was fitted to: a size, its peak, whether that is a lower bound."""

    def __init__(self, n: float, length: float, peak: float, out_of_memory: bool) -> None: ...
    n: Final[float]
    length: Final[float]
    peak: Final[float]
    out_of_memory: Final[bool]
    base: Final[float]

class ModelError:
    """How far a model is off for sizes that it has not seen: predicted / measured - 1."""

    median: Final[float]
    worst: Final[float]
    each: Final[list[float]]

class MemoryModel:
    def __init__(self) -> None: ...
    def _assign(self, other: MemoryModel) -> None: ...
    def _fit(self, samples: Sequence[MemorySample], batch: bool) -> None: ...
    def _state(self) -> dict[str, Any]: ...
    def _load(self, state: dict[str, Any]) -> None: ...
    def _peak(self, n: float, length: float | None) -> float: ...
    def _safe_peak(self, n: float, length: float | None) -> float: ...
    def _peak_of(self, lengths: Sequence[float]) -> float: ...
    def _largest_batch(self, length: float, budget: float) -> int: ...
    def _largest_size(self, budget: float) -> int: ...
    fitted: Final[bool]
    kind: Final[str]
    error: Final[ModelError]
    margin: Final[float]
    floor: Final[float]
    phases: Final[list[dict[str, float]]]
    samples: Final[list[MemorySample]]

class Rehearsal:
    def __init__(
        self,
        options: AllocatorOptions,
        grows: bool,
        device: torch.device,
        is_hidden: bool,
        mode: object,
    ) -> None: ...
    def begin(self) -> None: ...
    def hold(self, size: int) -> int: ...
    def allocate(self, size: int) -> int: ...
    def free(self, number: int) -> None: ...
    def empty_cache(self) -> None: ...
    def end(self) -> None: ...
    keeps_while_room: Final[bool]
    given_up: Final[tuple[int, int, int]]

class FakeResults:
    def __init__(self, fake: type, hides: bool) -> None: ...
    def get(
        self,
        mode: Any,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        on_meta: Callable[..., Any] | None,
        run: Callable[[Any, Any, dict[str, Any]], Any],
    ) -> Any: ...

def tensors_of(tree: Any) -> list[Tensor]: ...
def show_fake_device(tensors: Sequence[Tensor], show: bool) -> None: ...
def exchange_tensors(a: Tensor, b: Tensor) -> None: ...
def dispatch(
    mode: object,
    func: Any,
    types: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any: ...
def pass_on(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

class AllocatorOptions:
    """Settings of the allocator that a `MemoryTrace` is replayed in; None stands for no limit."""

    def __init__(self, kind: str = "caching", *, capacity: int | None = None) -> None: ...
    @staticmethod
    def from_settings(
        text: str | None = None, *, capacity: int | None = None, beyond: int = 0
    ) -> tuple[AllocatorOptions, list[str]]:
        """Reads `PYTORCH_CUDA_ALLOC_CONF`; also says which settings are not modelled.

        Args:
            text: the settings. Those of the environment by default.
            capacity: in bytes. No limit by default.
            beyond: what may be reserved beyond it, under a budget of what is allocated.
        """
    capacity: Final[int | None]
    expandable_segments: Final[bool]
    max_split_size: Final[int | None]

class AllocatorUse:
    """What an allocator has given out and taken, in bytes."""

    requested: Final[int]
    allocated: Final[int]
    reserved: Final[int]
    inactive_split: Final[int]

class AllocatorModel:
    """What a device's allocator does with a sequence of allocations and frees; for tests."""

    def __init__(self, options: AllocatorOptions = ...) -> None: ...
    def allocate(self, size: int, stream: int = 0) -> int | None: ...
    def free(self, allocation: int) -> None: ...
    def empty_cache(self) -> None: ...
    def set_segment_addresses(self, addresses: Sequence[int]) -> None: ...
    now: Final[AllocatorUse]
    peak: Final[AllocatorUse]
    retries: Final[int]

class MemoryKind:
    """What memory is held for."""

    __members__: Final[dict[str, MemoryKind]]
    parameter: MemoryKind
    gradient: MemoryKind
    optimizer_state: MemoryKind
    activation: MemoryKind
    temporary: MemoryKind
    input: MemoryKind
    workspace: MemoryKind
    other: MemoryKind
    name: Final[str]

class MemoryTrace:
    """A recorded sequence of allocations and frees. Its length is the number of events."""

    def __init__(self) -> None: ...
    def place(self, text: str) -> int: ...
    def allocate(
        self, size: int, kind: MemoryKind = ..., place: int = 0, stream: int = 0
    ) -> int: ...
    def free(self, allocation: int) -> None: ...
    def empty_cache(self) -> None: ...
    def begin_call(self) -> None: ...
    def scaled(self, kind: MemoryKind, factor: float) -> MemoryTrace: ...
    def place_of(self, allocation: int) -> str: ...
    def __len__(self) -> int: ...

class TracedAllocation:
    """An allocation that was held at the peak, or failed."""

    id: Final[int]
    bytes: Final[int]
    kind: Final[MemoryKind]
    place: Final[str]

class TraceReport:
    """What became of a `MemoryTrace` in an allocator, in bytes."""

    held_before: Final[int]
    peak: Final[int]
    left: Final[int]
    reserved: Final[int]
    held: Final[dict[MemoryKind, int]]
    largest: Final[list[TracedAllocation]]
    fits: Final[bool]
    fragmentation: Final[float]

class HeldMoment:
    """What is held at one moment of a `MemoryTrace`, in bytes; `held` by `MemoryKind`, in order."""

    event: Final[int]
    held: Final[list[int]]
    reserved: Final[int]
    allocation: Final[int]

def timeline(
    trace: MemoryTrace, options: AllocatorOptions = ..., start: int = 0, points: int = 1000
) -> list[HeldMoment]: ...
def replay(
    trace: MemoryTrace, options: AllocatorOptions = ..., start: int = 0, largest: int = 10
) -> TraceReport: ...

class TraceSearch:
    next: Final[int]
    finished: Final[bool]
    best: Final[int | None]
    expected: Final[int | None]
    def __init__(self, options: AllocatorOptions, lower: int, upper: int) -> None: ...
    def record(self, size: int, trace: MemoryTrace, start: int, capacity: int) -> bool: ...

def collect_peaks(
    work: Callable[[_T], Any],
    inputs: Iterable[_T],
    device: _Device,
    cleanup: Callable[[], object] | None,
) -> list[PeakSample]: ...
def probe_memory(
    fn: Callable[..., object],
    sizes: Sequence[tuple[int, int]],
    batch: bool,
    device: _Device,
    budget: int | None,
    probes: int,
    near_budget: int,
    cleanup: Callable[[], object] | None,
) -> MemoryModel: ...

class PlanReport:
    """What becomes of the samples of an epoch, over all ranks."""

    samples: Final[int]
    batched: Final[int]
    batches: Final[int]
    world_size: Final[int]
    fill: Final[float]
    padding: Final[float]
    imbalance: Final[float]
    fill_histogram: Final[list[int]]
    padding_histogram: Final[list[int]]
    left_out: Final[dict[str, Tensor]]
    def plot(self, where: Any = None) -> Any: ...

class BatchIterator:
    def __iter__(self) -> BatchIterator: ...
    def __next__(self) -> list[int] | Tensor: ...
    def state_dict(self, batches: int | None = None) -> dict[str, Any]: ...

class BatchRun:
    def iterator(self) -> BatchIterator: ...
    def begun(self) -> bool: ...
    def asked(self) -> tuple[int, int]: ...
    def held(self) -> bool: ...
    def ended(self) -> bool: ...
    def state_dict(self, batches: int | None = None) -> dict[str, Any]: ...

class SampleBatching:
    samples: Final[int]
    left_out: Final[dict[str, Tensor]]
    def iterate(
        self,
        seed: int,
        rank: int,
        world_size: int,
        cursor: _Ints,
        segments: Sequence[_Ints],
        as_tensors: bool,
        description: dict[str, Any],
    ) -> BatchRun: ...
    def count(
        self,
        seed: int,
        rank: int,
        world_size: int,
        cursor: _Ints,
        segments: Sequence[_Ints],
        index: SampleIndex | None,
        settings: str,
    ) -> int: ...
    def plan(
        self,
        seed: int,
        rank: int,
        world_size: int,
        cursor: _Ints,
        segments: Sequence[_Ints],
        index: SampleIndex | None,
        settings: str,
        first: int,
        end: int | None,
    ) -> tuple[Tensor, Tensor]: ...
    def report(
        self, seed: int, world_size: int, cursor: _Ints, segments: Sequence[_Ints]
    ) -> PlanReport: ...

class SampleIndex:
    fingerprint: Final[int]
    made: Final[int]
    def __init__(self, sizes: Tensor, folder: str, data: str) -> None: ...
    def take_notes(self) -> list[str]: ...
    def make_epoch(
        self, batching: SampleBatching, settings: str, seed: int, world_size: int
    ) -> None: ...

def data_file_state(file: str) -> str: ...
def compare_exchange(words: Tensor, place: int, expected: int, desired: int) -> bool: ...

class LookAheadStream:
    def __init__(
        self,
        samples: Iterable[Any],
        sizeof: Callable[[Any], Any],
        costs: list[Any],
        maxima: list[Any],
        measured: int,
        options: dict[str, Any],
        cut: Callable[[Any, int, int, int], Any],
        rank: int,
        world_size: int,
    ) -> None: ...
    def __iter__(self) -> LookAheadStream: ...
    def __next__(self) -> list[Any]: ...
    def skip(self) -> bool: ...
    def seek(self, cursor: _Ints, segments: Sequence[_Ints]) -> None: ...
    def position(self, batches: int) -> dict[str, Any]: ...
    read: Final[int]
    fingerprints: Final[list[int]]
    sizes_differ: Final[bool]
    left_out: Final[dict[str, torch.Tensor]]

class BlockStream(LookAheadStream):
    def __next__(self) -> list[tuple[Any, Tensor]]: ...

class MixedSamples:
    def __init__(
        self,
        begin: Callable[[int], Iterator[Any]],
        words: Tensor,
        seed: int,
        at_end: str,
        sizeof: Callable[[Any], Any] | None,
        past: list[tuple[int, int, list[float]]],
        drawn: int,
        follow: bool,
    ) -> None: ...
    def __iter__(self) -> MixedSamples: ...
    def __next__(self) -> Any: ...
    taken: Final[int]
    changes: Final[list[tuple[int, int, list[float]]]]

def set_weights(words: Tensor, weights: list[float], stamp: int) -> None: ...
def weights_now(words: Tensor) -> list[float]: ...

class PackedRow:
    def __init__(
        self,
        lengths: Sequence[int],
        document_multiple: int = 1,
        row_multiple: int = 1,
        row_length: int = 0,
    ) -> None: ...
    documents: Final[int]
    size: Final[int]
    longest: Final[int]
    def length(self, document: int) -> int: ...
    def offsets(self) -> Tensor: ...
    def token_offsets(self) -> Tensor: ...
    def positions(self, begins: Sequence[int]) -> Tensor: ...
    def document_ids(self) -> Tensor: ...
    def gather(self, values: list[Any], name: str, begins: Sequence[int], pad: int) -> Tensor: ...
    def shift(self, values: Tensor, following: Sequence[int], none: int) -> None: ...
    def mask_first(self, values: Tensor, none: int) -> None: ...
    def blocks(self, block: int, causal: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...

class DocumentParts:
    def __init__(self, sizes: Tensor, largest: int) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, part: int) -> tuple[int, int, int]: ...
    def sizes(self) -> Tensor: ...

class SampleStream:
    def __init__(
        self,
        samples: Iterable[Any],
        sizeof: Callable[[Any], Any],
        costs: list[Any],
        maxima: list[Any],
        measured: int,
        oversize: str,
        skip: int,
    ) -> None: ...
    def __iter__(self) -> SampleStream: ...
    def __next__(self) -> list[Any]: ...
    read: Final[int]
    batched: Final[int]
    batches: Final[int]
    begin: Final[int]
    left_out: Final[list[int]]

def ordered_batching(
    sizes: list[Tensor],
    costs: list[Any],
    maxima: list[Any],
    indices: Tensor | None,
    shuffle: bool,
    oversize: str,
    batch_multiple: int,
    index: SampleIndex | None,
) -> SampleBatching: ...
def packed_batching(
    sizes: list[Tensor],
    costs: list[Any],
    maxima: list[Any],
    indices: Tensor | None,
    shuffle: bool,
    window: int | None,
    oversize: str,
    batch_multiple: int,
    index: SampleIndex | None,
    work: Tensor | None = None,
) -> SampleBatching: ...
def bucket_batching(
    bucket_sizes: Tensor,
    boundaries: list[float],
    batch_sizes: list[int],
    sizes: list[Tensor],
    costs: list[Any],
    maxima: list[Any],
    drop_last: bool,
    shuffle: bool,
    oversize: str,
    batch_multiple: int,
    index: SampleIndex | None,
) -> SampleBatching: ...
def epoch_seed(seed: int, epoch: int) -> int: ...
def fingerprint(sizes: Tensor) -> int: ...
def check_limits(costs: list[Any], maxima: list[Any]) -> None: ...
def largest_sizes(costs: list[Any], maxima: list[Any], whole: bool) -> list[Any]: ...
def sizes_tensor(sizes: Sequence[Any], name: str = "sizes") -> Tensor: ...
def indices_tensor(indices: Iterable[int]) -> Tensor: ...
def make_adaptive(
    function: Callable[..., Any], config: Mapping[str, object]
) -> AdaptiveFunction[..., Any]: ...
def fit_batching(
    sizes: Tensor,
    work: Callable[[list[int]], object],
    make: Callable[[int, MemoryModel | PaddedNeed | None], SampleBatching],
    padded: bool,
    budget: int,
    device: _Device,
    probes: int,
    ranks: FitRanks | None,
    columns: int,
) -> tuple[int, MemoryModel | PaddedNeed | None, float]: ...
def fit_weights(
    features: Tensor,
    columns: int,
    work: Callable[[list[int]], object],
    budget: int,
    device: _Device,
    ranks: FitRanks | None,
) -> list[float]: ...
def combined_sizes(features: Tensor, weights: Sequence[float]) -> list[int]: ...
def create_buckets(
    sizes: Tensor, max_width: int, min_bucket_count: int
) -> tuple[Tensor, Tensor]: ...
def least_padding_boundaries(sizes: Tensor, buckets: int) -> Tensor: ...
def balance(
    costs: torch.Tensor,
    parts: int,
    equal_count: bool,
    sizes: torch.Tensor | None = None,
    cap: float = 0.0,
) -> list[list[int]]: ...
def fewest_parts(sizes: torch.Tensor, cap: float, multiple_of: int, equal_count: bool) -> int: ...
def flops(lengths: torch.Tensor, linear: float, squared: float) -> torch.Tensor: ...
def group_by_bucket(sizes: Tensor, boundaries: Tensor) -> tuple[Tensor, Tensor]: ...
def least_kept(
    values: Sequence[tuple[int, Sequence[int] | None]], needed: Sequence[int]
) -> list[bool]: ...
def memory_stats(device: _Device = None) -> MemoryStats: ...
def reset_peak(device: _Device = None) -> None: ...
def release_cached(device: _Device = None) -> int: ...
def fragmentation(device: _Device = None) -> Fragmentation: ...
def default_device() -> torch.device: ...
def format_bytes(bytes: int) -> str: ...  # noqa: A002
def text_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, last: Sequence[str] = ()
) -> str: ...
def parse_bytes(limit: int | str, of: int | None = None, name: str = "limit") -> int: ...
def install_cpu_allocator() -> None: ...
def cpu_allocator_installed() -> bool: ...
def classify_error(error: BaseException) -> OomCause: ...
def call_through_cpp(function: Callable[[], _T]) -> _T: ...
def provide(**named: object) -> None: ...
def watch_hooks(unpack: object, below: object) -> None: ...
def rerun(
    function: Callable[[list[Tensor]], Tensor],
    inputs: Sequence[Tensor],
    recompute: int,
    is_cheap: bool,
) -> Tensor: ...
def pressure() -> tuple[int, int, int, int, int, int, int, int, int, float]: ...
def reset_pressure() -> None: ...
def record_pressure(
    work: Callable[[], object], device: _Device
) -> list[tuple[int, int, int, int]]: ...

class _Operators:
    """The operators of brim: `torch.ops.brim`, called without torch's parser."""

    def __getattr__(self, name: str) -> Callable[..., Tensor]: ...

ops: _Operators
