"""Public calls for prove_faults.py, in each of which every allocation fails in turn.

`calls` gives them by name, each as a function that makes a `Call`. Names begin with a kind, which
is a row of the proof's table: "adapt", "microbatches", "layers in float32", "models", "measuring",
"reports", "data", "memory".
"""

from __future__ import annotations

import functools
import itertools
import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tests.python import interrupt_cases, nn_cases, test_nn_pressure_sweep
from tests.python.explained_failures import network
from tests.python.interrupts import random_state, state_of_module
from tests.python.joint_cases import Clip, Tower, encode_with
from tests.python.microbatches_cases import Net
from tests.python.nn_product_models import MODELS
from tests.python.test_adapt_restore import OPTIMIZERS, Job
from tests.python.test_data_fit_restores import Trainer
from tests.python.test_microbatches_packed import Model, loss_of, samples
from tests.python.test_nn_auto import step as step_of_a_model
from torch import nn

import brim
from brim.data import PackedBatchSampler, PackedCollator, SizeAwareBatchSampler, pack_stream

MODES = (None, "cheap", "products", "auto")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def nothing() -> None:
    """Nothing has to be set up ahead of a call."""


@dataclass
class Call:
    """A public call, which can be made again and again.

    Attributes:
        call: makes it; its value is compared after `result`.
        start: ahead of each call, without faults: brings what the call changes to where it began.
        result: what of the value is compared, as plain values.
        right: whether a result (first) is as good as that of a call without faults (second).
        leaves: what a call that runs out of memory leaves as it was.
        puts_back: whether it also leaves the bytes that tensors hold; else gradients may be gone.
        tells: part of the only warning that it may give.
    """

    call: Callable[[], Any]
    start: Callable[[], object] = nothing
    result: Callable[[Any], Any] = lambda value: value
    right: Callable[[Any, Any], bool] = operator.eq
    leaves: Callable[[], dict[str, Any]] = dict
    puts_back: bool = True
    tells: str = ""


Make = Callable[[], Call]


def bits(value: Any) -> Any:
    """Tensors as their bytes, so that results are compared bit for bit, NaN and -0 included."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), plain.numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(each) for each in value]
    return value


def state_of(*modules: nn.Module) -> Callable[[], dict[str, Any]]:
    """Values and gradients of modules, bit for bit, and the random state."""

    def leaves() -> dict[str, Any]:
        found: dict[str, Any] = random_state()
        for index, module in enumerate(modules):
            for name, value in (*module.named_parameters(), *module.named_buffers()):
                found[f"{index}.{name}"] = bits([value, value.grad]), type(value)
        return found

    return leaves


def reset_to(*modules: nn.Module) -> Callable[[], None]:
    """Puts values back as they are now, and drops gradients."""
    kept = [
        (value, value.detach().clone())
        for module in modules
        for value in (*module.parameters(), *module.buffers())
    ]

    def start() -> None:
        torch.manual_seed(3)
        with torch.no_grad():
            for value, before in kept:
                value.copy_(before)
                value.grad = None

    return start


# -- Calls of which Ctrl-C ends every line ---------------------------------------------------------

#: What they come under. The others allocate nothing, or tell the size, or a case below has more.
INTERRUPTED = {
    "measuring": ("largest_size", "probe", "fit_of_a_sampler"),
    "reports": (
        *("audit", "audit_of_a_converted_model", "assert_saved", "convert_and_restore"),
        *("estimate",),
    ),
    "models": ("step_of_a_converted_model", "saving"),
    "memory": ("budget", "budget_of_a_function", "meters_and_injectors", "collect_peaks"),
}


def fewer(found: Any, expected: Any) -> bool:
    """Sizes that failed are no samples of a model; a sampler leaves them out, with a warning."""
    return set(found) <= set(expected)


#: As (what is right, what may be warned of).
LESS = {"probe": (fewer, ""), "fit_of_a_sampler": (fewer, "left out, over budget")}


def interrupted(name: str) -> Call:
    made = interrupt_cases.CASES[name]()
    right, tells = LESS.get(name, (operator.eq, ""))
    return Call(
        made.call,
        result=made.result,
        right=right,
        tells=tells,
        leaves=made.leaves,
        puts_back=False,
    )


# -- Adaptive calls --------------------------------------------------------------------------------


def data_of(device: str, rows: int = 12) -> torch.Tensor:
    made = torch.randn(rows, 8, generator=torch.Generator().manual_seed(5))
    return made.to(device)


def norms(x: torch.Tensor, size: int) -> torch.Tensor:
    """The same bits in parts of any size."""
    return torch.cat([part.sin().norm(dim=1) for part in x.split(size)])


def adaptive(device: str) -> Iterator[tuple[str, Make]]:
    x = data_of(device)
    options: Any = {"device": device}

    def of(wrap: Callable[[], Callable[[], Any]]) -> Make:
        return lambda: Call(wrap(), result=bits)

    def one(name: str, **more: Any) -> tuple[str, Make]:
        return name, of(lambda: brim.batch(12, **options, **more)(functools.partial(norms, x)))

    yield one("batch of tensors")
    for strategy in ("halving", "bisect"):
        yield one(strategy, strategy=strategy)
    yield one("throughput", objective="throughput")
    yield one("nothing remembered", remember="none")
    yield one("no host limit", host_limit=False)

    def maximized(**more: Any) -> Callable[[], Any]:
        work = brim.maximize("size", **options, **more)(lambda size: norms(x, size))
        return lambda: work(12)

    yield "maximize of tensors", of(maximized)
    yield "foreseen", of(lambda: maximized(foresee=True))
    yield "foreseen anew", of(lambda: lambda: maximized(foresee=True)())

    def several(*names: Any, **more: Any) -> Callable[[], Any]:
        @brim.maximize(*names, **options, **more)
        def work(a: int, b: int) -> torch.Tensor:
            return norms(x, a) + norms(x, b)

        return lambda: work(12, 8)

    yield "two names", of(lambda: several("a", "b"))
    yield "a group", of(lambda: several(("a", "b")))

    def recorded() -> Callable[[], Any]:
        work = brim.maximize("size", **options)(lambda size: norms(x, size))
        return lambda: work.record(12)[0]

    yield "recorded", of(recorded)

    def parts() -> Callable[[], Any]:
        work = brim.range(4, collect=True, **options)(
            lambda start, end: x[start:end].sin().norm(dim=1)
        )
        return lambda: torch.cat(work(0, 12))

    def chunks() -> Callable[[], Any]:
        work = brim.chunked(5, collect=True, **options)(
            lambda part, start, end: part.sin().norm(dim=1)
        )
        return lambda: torch.cat(work(x))

    yield "range", of(parts)
    yield "chunks", of(chunks)
    yield (
        "run_batch",
        of(lambda: lambda: brim.run_batch(12, functools.partial(norms, x), **options)),
    )
    yield (
        "run_range",
        of(
            lambda: (
                lambda: torch.cat(
                    brim.run_range(0, 12, 5, lambda a, b: x[a:b].sin(), collect=True, **options)
                )
            )
        ),
    )
    yield (
        "run_chunked",
        of(
            lambda: (
                lambda: torch.cat(
                    brim.run_chunked(x, 5, lambda part, a, b: part.sin(), collect=True, **options)
                )
            )
        ),
    )
    for optimizer, steps, gradients in itertools.product(OPTIMIZERS, (0, 2), ("none", "some")):
        name = f"restores {optimizer} after {steps} steps, gradients: {gradients}"
        yield name, functools.partial(restoring, optimizer, steps, gradients, device)


def restoring(optimizer: str, steps: int, gradients: str, device: str) -> Call:
    """A training step that must leave the very state it found; made anew for each call."""
    jobs: list[Job] = []

    def start() -> None:
        jobs.clear()
        job = Job(optimizer, steps, gradients, device=device, remember="none")
        jobs.append(job)
        torch.manual_seed(1)

    def leaves() -> dict[str, Any]:
        return {"job": bits(jobs[0].all()), **random_state()}

    return Call(lambda: jobs[0].step(), start, lambda loss: (loss, leaves()), leaves=leaves)


# -- Microbatches ----------------------------------------------------------------------------------


class Steps:
    """Steps of Microbatches. The right result depends on the size that was used, not on faults."""

    def __init__(
        self, model: nn.Module, make: Callable[..., Any], batch: Any, length: int, more: Any = ()
    ) -> None:
        self.model, self.batch, self.more = model, batch, more
        self.start = reset_to(model)
        self.step = make()
        self.by_size = {}
        for size in range(1, length + 1):
            step = make(size=size)
            self.start()
            self.by_size[step.size or size] = self._result(step(batch))

    def _result(self, loss: torch.Tensor) -> Any:
        gradients = [parameter.grad for parameter in self.model.parameters()]
        return bits([loss, gradients, list(self.model.buffers()), torch.rand(1)])

    def call(self) -> Call:
        return Call(
            lambda: self.step(self.batch),
            self.start,
            lambda loss: (self.step.size, self._result(loss)),
            lambda found, _: found[1] == self.by_size[found[0]],
            state_of(self.model),
        )


def microbatches(device: str) -> Iterator[tuple[str, Make]]:
    x = torch.rand(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)
    y = x.mean(1)

    def plain(dropout: float = 0.0, **more: Any) -> Call:
        torch.manual_seed(0)
        model = Net(dropout).to(device)

        def loss_fn(part: Any) -> torch.Tensor:
            return nn.functional.mse_loss(model(part[0]), part[1])

        def make(**options: Any) -> Any:
            return brim.Microbatches(loss_fn, model, device=device, **{**more, **options})

        return Steps(model, make, (x, y), len(x)).call()

    yield "mean", plain
    yield "dropout", functools.partial(plain, 0.4)
    yield "unchecked", functools.partial(plain, check=False)
    yield "first in parts of 4", functools.partial(plain, size=4)
    yield "foreseen", functools.partial(plain, foresee=True)
    yield "halving", functools.partial(plain, strategy="halving")

    def trained() -> Call:
        """With an optimizer and a scaler, as a training loop has them."""
        torch.manual_seed(0)
        model = Net(0.2).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=8.0)

        def loss_fn(part: Any) -> torch.Tensor:
            return nn.functional.mse_loss(model(part[0]), part[1])

        def make(**options: Any) -> Any:
            return brim.Microbatches(loss_fn, model, scaler=scaler, device=device, **options)

        made = Steps(model, make, (x, y), len(x)).call()
        weights = state_of(model)
        made.leaves = lambda: {
            **weights(),
            "optimizer": bits(optimizer.state_dict()),
            "scaler": scaler.state_dict(),
        }
        return made

    yield "scaler", trained

    def packed() -> Call:
        collate = PackedCollator(row_multiple=8)
        batch = collate([each["input_ids"] for each in samples([5, 1, 9, 3])])
        model = Model()

        def make(**options: Any) -> Any:
            return brim.Microbatches(loss_of(model), model, device="cpu", **options)

        return Steps(model, make, batch, 4).call()

    def joint(dropout: float = 0.4, **more: Any) -> Call:
        torch.manual_seed(3)
        spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6).double())
        model = nn.ModuleList([nn.Sequential(spectral, Tower(dropout)), Tower(), Clip()])

        def make(**options: Any) -> Any:
            given = {"encode": encode_with(model), "loss": model[2], "model": model}
            return brim.Microbatches(**given, device="cpu", **{**more, **options})

        return Steps(model, make, (x, x.cos()), len(x)).call()

    def automatic() -> Call:
        """A model that drops values itself: no size has to change for a failure or two."""
        brim.nn.reset_pressure()
        model = test_nn_pressure_sweep.small()
        given = torch.randn(4, 6, 8)

        def make(**options: Any) -> Any:
            return brim.Microbatches(
                lambda part: model(part).square().mean(), model, device="cpu", **options
            )

        return Steps(model, make, given, len(given)).call()

    if device == "cpu":
        yield "packed", packed
        yield "joint", joint
        yield "joint, in parts of 4", functools.partial(joint, size=4)
        yield 'recompute="auto"', automatic


# -- Layers ----------------------------------------------------------------------------------------


class Between(nn.Module):
    """A layer between activations, so that its neighbours can be computed again."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.before, self.layer, self.after = nn.GELU(), layer, nn.GELU()

    def forward(self, x: torch.Tensor, **options: Any) -> Any:
        y = self.layer(self.before(x), **options)
        if isinstance(y, tuple):
            return self.after(y[0]), *y[1:]
        return self.after(y)


def layer(
    case: nn_cases.Case,
    dtype: torch.dtype,
    mode: str | None,
    needs: nn_cases.Needs,
    layout: str,
    device: str,
) -> Call:
    model = Between(case.make(nn, dtype, device)).train(case.train)
    for name, parameter in model.layer.named_parameters():
        parameter.requires_grad_(name in needs)
    brim.convert(model, recompute=mode)
    x = case.input(dtype, layout, device)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    wanted = [each for each in model.parameters() if each.requires_grad]
    shape = model(x, **case.forward)
    output = shape[0] if isinstance(shape, tuple) else shape
    cotangent = nn_cases.cotangent_of(output.detach(), layout)
    del shape, output
    generators = (torch.default_generator, *torch.cuda.default_generators)
    generator = generators[device != "cpu"]

    def start() -> None:
        generator.manual_seed(4)  # torch.manual_seed takes milliseconds
        for buffer, before in buffers:
            buffer.copy_(before)

    def call() -> Any:
        leaf = x.detach().requires_grad_("input" in needs)
        given = model(leaf, **case.forward)
        values = list(given) if isinstance(given, tuple) else [given]
        leaves = [leaf, *wanted] if "input" in needs else wanted
        grads = torch.autograd.grad(values[0], leaves, cotangent)
        return [values, grads, list(model.buffers())]

    def leaves() -> dict[str, Any]:
        return {
            "classes": [type(each) for each in model.modules()],
            "values": bits([[each, each.grad] for each in model.parameters()]),
            "input": bits(x),
        }

    start()
    return Call(call, start, bits, leaves=leaves)


def some_needs(case: nn_cases.Case) -> list[nn_cases.Needs]:
    """All gradients, the input's alone (a frozen layer), and all but the input's."""
    everything = case.needs()[-1]
    wanted = [everything, frozenset(["input"]), everything - {"input"}]
    return [each for each in dict.fromkeys(wanted) if each]


def layers(device: str) -> Iterator[tuple[str, str, Make]]:
    every = [(torch.float32, case) for case in nn_cases.CASES]
    every += [(dtype, case) for dtype in DTYPES[1:] for case in nn_cases.ONE_OF_EACH]
    for dtype, case in every:
        for needs, mode in itertools.product(some_needs(case), MODES):
            what = f"{case} {'+'.join(sorted(needs))} {mode}"
            make = functools.partial(layer, case, dtype, mode, needs, "contiguous", device)
            yield f"layers in {str(dtype)[6:]}", what, make


# -- Models ----------------------------------------------------------------------------------------


def model_of(name: str, mode: str | None, autocast: bool, device: str) -> Call:
    torch.manual_seed(0)
    make, shape, _ = MODELS[name]
    model, x = make().train().to(device), torch.randn(shape).to(device)
    brim.convert(model, recompute=mode)
    parameters = reset_to(model)

    def start() -> None:
        brim.nn.reset_pressure()
        parameters()

    def leaves() -> dict[str, Any]:
        return {"values": bits(list(model.parameters())), "input": bits(x)}

    return Call(
        lambda: step_of_a_model(model, x, autocast=autocast),
        start,
        lambda found: (bits(found), bits(list(model.buffers()))),
        leaves=leaves,
        puts_back=False,
    )


def kind_of_step(kind: str, device: str) -> Call:
    """A step of a model with `recompute="auto"`, which has a group of one rank if it needs one."""
    if kind == "replicated" and not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    model, x = test_nn_pressure_sweep.small().to(device), torch.randn(2, 6, 8, device=device)

    def start() -> None:
        brim.nn.reset_pressure()
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)

    def leaves() -> dict[str, Any]:
        return {"values": bits(list(model.parameters())), "input": bits(x)}

    return Call(
        lambda: [each.clone() for each in test_nn_pressure_sweep.KINDS[kind](model, x)],
        start,
        bits,
        leaves=leaves,
        puts_back=False,
    )


def models(device: str) -> Iterator[tuple[str, Make]]:
    for name, mode, autocast in itertools.product(MODELS, MODES, (False, True)):
        what = f"{name} {mode}{' autocast' if autocast else ''}"
        yield what, functools.partial(model_of, name, mode, autocast, device)
    for kind in test_nn_pressure_sweep.KINDS:
        if device == "cpu" or kind != "replicated":
            yield f"auto, {kind}", functools.partial(kind_of_step, kind, device)


# -- Reports and measurements ----------------------------------------------------------------------


def explained(way: str) -> Call:
    net, x = network(random.Random(1))
    x = x[:16]

    def work(batch: torch.Tensor) -> None:
        net.zero_grad()
        net(batch).square().mean().backward()

    decorated = brim.explain(device="cpu")(work)

    def within() -> None:
        with brim.explain(device="cpu"):
            work(x)

    return Call(
        {
            "decorated": lambda: decorated(x),
            "with": within,
            "ahead": lambda: str(brim.explain(work, x, device="cpu", capacity="1MiB").cause),
        }[way],
        leaves=state_of(net) if way == "ahead" else dict,
        puts_back=False,
    )


def fitted(sampler: str, cost: str) -> Call:
    """A sampler's fit of a step that trains: all that it trained is put back."""
    trainer = Trainer()
    trainer.step([3])
    held = brim.memory_stats("cpu").allocated
    sizes = torch.arange(1, 17)
    fit: Any = {"packed": PackedBatchSampler, "size-aware": SizeAwareBatchSampler}[sampler].fit
    budget = held + 2**18

    def call() -> Any:
        return fit(
            sizes.tolist(), trainer.step, sizes, budget, "cpu", cost=cost, probes=3, progress=False
        )

    def leaves() -> dict[str, Any]:
        return {"trainer": trainer.state()}

    return Call(
        call,
        result=lambda made: sorted(itertools.chain(*made)),
        right=fewer,
        leaves=leaves,
        tells="left out, over budget",
    )


def collated(family: str | dict[str, str]) -> Call:
    collate = PackedCollator(family, row_multiple=8)
    given = [each["input_ids"] for each in samples([5, 1, 9, 3, 6])]
    return Call(lambda: dict(collate(given)), result=lambda made: bits({**made}))


def streamed() -> Call:
    given = [torch.ones(length) for length in interrupt_cases.LENGTHS]
    stack = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True)
    stream = pack_stream(given, 18, sizeof=len, collate_fn=stack)
    return Call(lambda: list(stream), result=bits)


def as_tensors() -> Call:
    sampler = PackedBatchSampler(interrupt_cases.LENGTHS, 18, as_tensors=True)

    def call() -> Any:
        sampler.set_epoch(0)
        return list(sampler)

    return Call(call, result=bits, puts_back=False)  # it holds the indices of its last batch


def estimated(mode: str | None) -> Call:
    net = test_nn_pressure_sweep.small()
    brim.restore(net)
    x = torch.randn(2, 6, 8)

    def work() -> None:
        net(x).square().mean().backward()

    def call() -> Any:
        return brim.estimate(work, device="cpu", recompute=mode, calls=2, progress=False).peak

    return Call(call, leaves=lambda: {**state_of_module(net), **random_state()})


def under_a_budget() -> Call:
    x = torch.ones(64)

    def call() -> Any:
        with brim.budget("1GiB", device="cpu"), brim.PeakMeter("cpu") as outer:
            with brim.budget("512MiB", device="cpu"), brim.PeakMeter("cpu") as inner:
                made = x.sin()
            kept = made.cos()
        return [kept, outer.peak, inner.peak]

    return Call(call, result=bits)


# -- All -------------------------------------------------------------------------------------------


def calls(device: str = "cpu") -> Iterator[tuple[str, str, Make]]:
    """Kind, name and maker of each call that this device can run."""
    for name, make in adaptive(device):
        if device == "cpu" or not name.startswith("restores"):
            yield "adapt", name, make
    for name, make in microbatches(device):
        yield "microbatches", name, make
    for name, make in models(device):
        yield "models", name, make
    if device == "cpu":
        for kind, names in INTERRUPTED.items():
            for name in names:
                yield kind, name, functools.partial(interrupted, name)
        for way in ("decorated", "with", "ahead"):
            yield "reports", f"explain, {way}", functools.partial(explained, way)
        for mode in (None, "cheap", "auto"):
            yield "reports", f"estimate, {mode}", functools.partial(estimated, mode)
        for sampler, cost in itertools.product(("packed", "size-aware"), ("sum", "padded")):
            yield "data", f"fit, {sampler}, {cost}", functools.partial(fitted, sampler, cost)
        for family in ("transformers", "flash_attn", "megatron"):
            yield "data", f"collate for {family}", functools.partial(collated, family)
        yield "data", "stream", streamed
        yield "data", "indices as tensors", as_tensors
        yield "memory", "nested budgets and meters", under_a_budget
    yield from layers(device)
