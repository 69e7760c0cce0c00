"""Random networks through brim.convert, random training steps, and what brim.estimate says of them.

A program is a list of layers and operations with the shapes that follow from them. It runs as torch
made it, and converted in every mode; a program that differs is made smaller, one piece at a time,
before it is printed with its seed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import random
import statistics
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  as everyone calls it
from tally import Tally
from tests.python import nn_modules
from tests.python.nn_cases import ACTIVATIONS, IN_PLACE, REQUIRED, how_far, same_bits
from torch import nn

import brim

warnings.simplefilter("ignore")

MODES: tuple[str | None, ...] = (None, "cheap", "products", "auto")


# ---------------------------------------------------------------- programs


@dataclass(frozen=True)
class Piece:
    """A layer, or an operation between layers.

    Attributes:
        kind: the name of the layer in torch.nn or nn_modules, or of an operation below.
        arguments: of the constructor.
        frozen: which parameters need no gradient.
        train: the layer's own mode.
        inner: what a residual branch holds.
    """

    kind: str
    arguments: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    frozen: frozenset[str] = frozenset()
    train: bool = True
    inner: tuple[Piece, ...] = ()

    def __str__(self) -> str:
        text = self.kind + (repr(self.arguments) if self.arguments else "")
        text += "".join(f" {name}={value}" for name, value in self.options)
        text += f" frozen {sorted(self.frozen)}" if self.frozen else ""
        text += "" if self.train else " eval"
        return text + (f" [{'; '.join(map(str, self.inner))}]" if self.inner else "")


@dataclass(frozen=True)
class Program:
    """A network with its input.

    Attributes:
        autocast: the type of autocast, or None.
        leaf: whether the input needs a gradient.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    leaf: bool = True
    channels_last: bool = False
    seed: int = 0
    again: bool = field(default=False)  # a second call before backward, of the same layers

    def __str__(self) -> str:
        settings = f"{self.dtype}, autocast {self.autocast}, leaf {self.leaf}, twice {self.again}"
        form = " channels_last" if self.channels_last else ""
        return f"{self.shape}{form} {settings}: {'; '.join(map(str, self.pieces))}"

    def has(self, *kinds: str) -> bool:
        """Whether a layer of these kinds is in it, also in a branch."""
        return any(each.kind in kinds for each in every(self.pieces))


def every(pieces: tuple[Piece, ...]) -> Iterator[Piece]:
    """All pieces, with those in branches."""
    for piece in pieces:
        yield piece
        yield from every(piece.inner)


OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add_": lambda x: x.clone().add_(0.5),
    "mul_": lambda x: (x + 0).mul_(1.5),
    "transposed": lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
    "silu": F.silu,
    "relu": lambda x: x.relu(),
    "relu_": lambda x: F.relu(x + 0, inplace=True),
    "product": lambda x: x * torch.sigmoid(x),
    "scaled": lambda x: 0.5 * x,
    "clone": lambda x: x.clone(),
    "sum": lambda x: x + x.mean(),
    "checked": lambda x: x.view(-1).view(x.shape) if x.is_contiguous() else x,
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "cropped": lambda x: (
        x[..., : max(x.shape[-1] // 2, 1)].repeat_interleave(2, -1) if x.shape[-1] % 2 == 0 else x
    ),
}


class Network(nn.Module):
    """The layers of a program, in its order; shared ones come again."""

    def __init__(self, pieces: tuple[Piece, ...]) -> None:
        super().__init__()
        self.pieces = pieces
        self.layers = nn.ModuleList(made(piece) for piece in pieces)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the pieces."""
        before: list[Callable[[torch.Tensor], torch.Tensor]] = []
        for piece, layer in zip(self.pieces, self.layers, strict=True):
            if piece.kind == "residual":
                x = x + layer(x)
            elif piece.kind == "shared":  # the last layer that keeps the shape
                x = before[-1](x) if before else x
            elif piece.kind in OPERATIONS:
                x = OPERATIONS[piece.kind](x)
            else:
                y = layer(x.clone() if dict(piece.options).get("inplace") else x)
                before = [*before, layer] if y.shape == x.shape else []
                x = y
        return x


def made(piece: Piece) -> nn.Module:
    """The module of a piece."""
    if piece.kind == "residual":
        return Network(piece.inner)
    if piece.kind in OPERATIONS or piece.kind == "shared":
        return nn.Identity()
    kind = getattr(nn, piece.kind, None) or getattr(nn_modules, piece.kind)
    layer: nn.Module = kind(*piece.arguments, **dict(piece.options))
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name not in piece.frozen)
    return layer.train(piece.train)


def build(program: Program) -> nn.Module:
    """The network of a program with its weights, as torch makes it."""
    torch.manual_seed(program.seed)
    network = Network(program.pieces).to(program.dtype)
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return network


# ---------------------------------------------------------------- drawing them


class Drawing:
    """Draws pieces that fit the shape so far."""

    def __init__(self, dice: random.Random, shape: tuple[int, ...], unit: int = 1) -> None:
        self.dice, self.shape, self.unit = dice, list(shape), unit

    def pieces(self, count: int, *, keeps_shape: bool = False) -> tuple[Piece, ...]:
        """So many pieces, one after the other."""
        found = []
        while len(found) < count:
            piece = self.piece(keeps_shape)
            if piece is not None:
                found.append(piece)
        return tuple(found)

    def _layer(self, kind: str, *arguments: Any, **options: Any) -> Piece:
        choice = self.dice.random()
        frozen: frozenset[str] = frozenset()
        if choice < 0.25:
            frozen = frozenset({"weight", "bias"})
        elif choice < 0.4:
            frozen = frozenset({self.dice.choice(["weight", "bias"])})
        train = self.dice.random() < 0.8
        return Piece(kind, arguments, tuple(options.items()), frozen, train)

    def piece(self, keeps_shape: bool) -> Piece | None:
        """One piece, or None where what was drawn does not fit."""
        dice, shape = self.dice, self.shape
        image, width = len(shape) == 4, shape[-1]
        kinds = ["activation"] * 3 + ["dropout", "operation", "operation", "shared", "residual"]
        kinds += ["conv", "conv", "batch norm", "group norm", "pool"] if image else []
        kinds += ["linear", "linear", "layer norm", "rms norm", "known"] if not image else []
        kind = dice.choice(kinds)
        if kind == "activation":
            name = dice.choice(ACTIVATIONS)
            options = {"inplace": True} if name in IN_PLACE and dice.random() < 0.3 else {}
            return self._layer(name, *REQUIRED.get(name, ()), **options)
        if kind == "dropout":
            return self._layer("Dropout", dice.choice([0.1, 0.5, 0.0]))
        if kind == "operation":
            name = dice.choice(list(OPERATIONS))
            return None if name == "attention" and (image or len(shape) < 3) else Piece(name)
        if kind == "shared":
            return Piece("shared")
        if kind == "residual":
            inner = Drawing(dice, tuple(shape), self.unit)
            return Piece("residual", inner=inner.pieces(dice.randint(1, 4), keeps_shape=True))
        if kind == "conv":
            channels = shape[1] if keeps_shape else self.unit * dice.choice([2, 4, 6])
            size = dice.choice([1, 3])
            groups = 2 if dice.random() < 0.2 and channels % 2 == shape[1] % 2 == 0 else 1
            options = {"padding": size // 2, "groups": groups, "bias": dice.random() < 0.8}
            if size == 3 and dice.random() < 0.3:
                options["padding_mode"] = dice.choice(["reflect", "replicate", "circular"])
            if min(shape[2:]) < 2:
                options.pop("padding_mode", None)
            piece = self._layer("Conv2d", shape[1], channels, size, **options)
            shape[1] = channels
            return piece
        if kind == "batch norm":
            return self._layer("BatchNorm2d", shape[1])
        if kind == "group norm":
            return self._layer("GroupNorm", dice.choice([1, 2, shape[1]]), shape[1])
        if kind == "pool":
            if keeps_shape or min(shape[2:]) < 4:
                return None
            shape[2:] = [n // 2 for n in shape[2:]]
            return self._layer(dice.choice(["MaxPool2d", "AvgPool2d"]), 2)
        if kind == "linear":
            out = width if keeps_shape else self.unit * dice.choice([4, 8, 8, 16])
            piece = self._layer("Linear", width, out, bias=dice.random() < 0.8)
            shape[-1] = out
            return piece
        if kind in ("layer norm", "rms norm"):
            return self._layer("LayerNorm" if kind == "layer norm" else "RMSNorm", width)
        if width != 8:
            return None
        return Piece(
            dice.choice(["NewGelu", "Swish", "LlamaNorm", "GatedMlp", "PackedMlp", "Gate"])
        )


def drawn(number: int, unit: int = 1) -> Program:
    """The program of a seed; channels and widths are multiples of the unit."""
    dice = random.Random(number)
    if dice.random() < 0.5:
        channels, side = unit * dice.choice([2, 4]), dice.choice([6, 8])
        shape: tuple[int, ...] = (dice.choice([1, 2, 5]), channels, 8, side)
    else:
        shape = (dice.choice([1, 2, 4]), dice.choice([3, 5]), 8 * unit)
    dtype = dice.choice([torch.float32] * 3 + [torch.float64, torch.bfloat16])
    program = Program(
        shape,
        Drawing(dice, shape, unit).pieces(dice.randint(1, 9)),
        dtype,
        torch.bfloat16 if dtype == torch.float32 and dice.random() < 0.3 else None,
        dice.random() < 0.6,
        len(shape) == 4 and dice.random() < 0.3,
        number,
        dice.random() < 0.2,
    )
    if program.has("GroupNorm"):  # torch's own crashes there where its input needs no gradient
        program = replace(program, channels_last=False)
    if dtype == torch.bfloat16 and program.has("LlamaNorm"):  # whose weights stay as they are
        return replace(program, dtype=torch.float32)
    return program


# ---------------------------------------------------------------- running them


@dataclass
class Outcome:
    """What a run gave: values, and gradients by name."""

    values: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def input_of(program: Program) -> torch.Tensor:
    """The input, always the same."""
    dice = torch.Generator().manual_seed(program.seed + 1)
    x = torch.randn(program.shape, generator=dice, dtype=torch.float64).to(program.dtype)
    return x.contiguous(memory_format=torch.channels_last) if program.channels_last else x


def run(program: Program, network: nn.Module) -> Outcome:
    """Forward and backward."""
    x = input_of(program).requires_grad_(program.leaf)
    torch.manual_seed(program.seed + 2)
    mixed = program.autocast
    with torch.autocast("cpu", mixed) if mixed is not None else contextlib.nullcontext():
        y = network(x)
        values = [y]
        if program.again:
            values.append(network(x))
    if any(value.requires_grad for value in values):
        dice = torch.Generator().manual_seed(program.seed + 3)
        total = sum(
            (value * torch.randn(value.shape, generator=dice).to(value.dtype)).sum()
            for value in values
            if value.requires_grad
        )
        assert isinstance(total, torch.Tensor)
        total.backward()
    named = [("input", x), *network.named_parameters()]
    return Outcome(
        [value.detach().clone() for value in values],
        {name: each.grad.clone() for name, each in named if each.grad is not None},
        {name: each.clone() for name, each in network.named_buffers()},
    )


SUMS_OTHERWISE = ("RMSNorm", "LlamaNorm", "GroupNorm", "Hardtanh", "ReLU6", "Softsign", "NewGelu")
"""Gradients of programs with these may be rounded otherwise: docs/explanation/nn.md.

Hardtanh and ReLU6 let the gradient of NaN pass, which torch's kernels do in places. Softsign and
NewGelu are several operators in torch: where others use their input too, gradients are added in
between.
"""


def exact(program: Program, name: str, network: nn.Module) -> bool:
    """Whether this gradient is torch's bit for bit."""
    if program.has(*SUMS_OTHERWISE):
        return False
    # With frozen weights torch rounds more than brim there: docs/explanation/nn.md.
    low = torch.bfloat16 in (program.dtype, program.autocast)
    if low and program.channels_last and program.has("BatchNorm2d"):
        return False
    layer, _, parameter = name.rpartition(".")
    if parameter != "bias":
        return True
    weight = getattr(network.get_submodule(layer), "weight", None)
    return weight is not None and bool(weight.requires_grad)


def near(a: torch.Tensor, b: torch.Tensor, program: Program, scale: float = 0.0) -> bool:
    """Within some roundings of the type that is calculated in, for a network of several layers.

    Args:
        a: ours.
        b: torch's.
        program: which both are of.
        scale: the size of other gradients; one that is 0 but for rounding has that of its summands.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    low = program.autocast or program.dtype
    most = 64 * torch.finfo(low).eps * len(list(every(program.pieces)))
    a, b = a.double(), b.double()
    finite = a.isfinite() & b.isfinite()
    if not torch.equal(a.isnan(), b.isnan()) and not program.has("Hardtanh", "ReLU6"):
        return False
    if not finite.any():
        return True
    # Sums behind a norm are 0 but for the rounding of summands, which are about 1.
    least = 1.0 if program.has("GroupNorm", "BatchNorm2d", "LayerNorm", "RMSNorm") else 0.0
    largest = max(b[finite].abs().max().item(), scale, least)
    return (a - b)[finite].abs().max().item() <= most * max(largest, 1e-30)


def differences(program: Program, mode: str | None, budget: bool = False) -> list[str]:
    """What is not as torch has it; both fail, or neither."""
    torchs = build(program)
    mine = copy.deepcopy(torchs)
    try:
        expected = run(program, torchs)
    except Exception as error:
        expected_error: Exception | None = error
    else:
        expected_error = None
    brim.convert(mine, recompute=mode)  # type: ignore[arg-type]
    try:
        got = _pressed(program, mine) if budget else run(program, mine)
    except Exception as error:
        if expected_error is None:
            last = traceback.extract_tb(error.__traceback__)[-1]
            return [f"{type(error).__name__}: {error} ({last.name})"]
        return [] if isinstance(error, type(expected_error)) else [f"{expected_error!r}, {error!r}"]
    if expected_error is not None:
        return []  # torch fails, brim does without: layers never fail where torch works
    found = []
    for number, (a, b) in enumerate(zip(got.values, expected.values, strict=True)):
        if not same_bits(a, b, False):
            found.append(f"value {number}: {how_far(a, b)}")
    if got.gradients.keys() != expected.gradients.keys():
        found.append(f"gradients of {got.gradients.keys() ^ expected.gradients.keys()}")
        return found
    sizes = [each.double().abs() for each in expected.gradients.values()]
    scale = max(
        (float(each[each.isfinite()].max()) for each in sizes if each.isfinite().any()), default=0.0
    )
    for name, b in expected.gradients.items():
        a = got.gradients[name]
        bits = exact(program, name, torchs) and program.autocast is None
        if not (same_bits(a, b, False) if bits else near(a, b, program, scale)):
            found.append(f"gradient of {name}: {how_far(a, b)}")
    for name, b in expected.buffers.items():
        if not same_bits(got.buffers[name], b, False):
            found.append(f"{name}: {how_far(got.buffers[name], b)}")
    return found


def _pressed(program: Program, network: nn.Module) -> Outcome:
    """A run under a budget of a little less than it would take, as far as that fits at all."""
    with brim.PeakMeter("cpu") as meter:
        result = run(program, copy.deepcopy(network))
    base = brim.memory_stats("cpu").allocated
    try:
        with brim.budget(base + int(0.9 * meter.peak), device="cpu"):
            return run(program, network)
    except torch.OutOfMemoryError:
        return result


def smaller(program: Program, fails: Callable[[Program], bool]) -> Program:
    """The program without what is not needed for it to fail."""
    while True:
        tries = [replace(program, again=False)] if program.again else []
        for at, piece in enumerate(program.pieces):
            rest = program.pieces[:at], program.pieces[at + 1 :]
            tries.append(replace(program, pieces=rest[0] + rest[1]))
            if piece.inner:
                tries.append(replace(program, pieces=rest[0] + piece.inner + rest[1]))
                tries += (
                    replace(
                        program,
                        pieces=(
                            *rest[0],
                            replace(piece, inner=piece.inner[:k] + piece.inner[k + 1 :]),
                            *rest[1],
                        ),
                    )
                    for k in range(len(piece.inner))
                )
        for other in tries:
            with contextlib.suppress(Exception):
                if other.pieces and fails(other):
                    program = other
                    break
        else:
            return program


# ---------------------------------------------------------------- rows


def gradients_row(tally: Tally, mode: str | None, budget: bool, first: int, until: float) -> None:
    """Programs in one mode, until the time is over."""
    what = f"convert(recompute={mode!r})" + (", 0.9 of the memory" if budget else "")
    wrong: list[str] = []
    used: Counter[str] = Counter()
    number = first
    while time.monotonic() < until and len(wrong) < 5:
        program = drawn(number)
        used.update(each.kind for each in every(program.pieces))
        found = differences(program, mode, budget)
        if found:
            small = smaller(program, lambda p: bool(differences(p, mode, budget)))
            told = differences(small, mode, budget) or found
            wrong.append(f"seed {number}: {'; '.join(told)}: {small}")
        number += 1
    print(f"{what}: seeds {first} to {number - 1}, {sum(used.values()):,} pieces", flush=True)
    tally.row(what, number - first, wrong)


def check_steps(number: int) -> str | None:
    """Some training steps: optimizer, accumulation, scaler, as with torch's layers."""
    dice = random.Random(number)
    program = replace(drawn(number), leaf=False, again=False)
    mode = dice.choice(MODES)
    steps, parts = dice.randint(1, 3), dice.randint(1, 3)
    scaled = dice.random() < 0.4 and program.dtype == torch.float32
    make: Callable[..., torch.optim.Optimizer] = dice.choice(
        [
            lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
            lambda p: torch.optim.AdamW(p, 0.01),
            lambda p: torch.optim.Adam(p, 0.01, foreach=False),
            lambda p: torch.optim.RMSprop(p, 0.01),
        ]
    )

    def train(network: nn.Module) -> list[torch.Tensor]:
        trained = [p for p in network.parameters() if p.requires_grad]
        if not trained:
            return []
        optimizer = make(trained)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        torch.manual_seed(number)
        for _ in range(steps):
            for part in range(parts):
                x = input_of(replace(program, seed=program.seed + part))
                mixed = program.autocast
                with torch.autocast("cpu", mixed) if mixed else contextlib.nullcontext():
                    loss = network(x).float().square().mean() / parts
                if loss.requires_grad:
                    scaler.scale(loss).backward()
            scaler.step(optimizer) if any(p.grad is not None for p in trained) else None
            scaler.update() if any(p.grad is not None for p in trained) else None
            optimizer.zero_grad()
        return [*(p.detach().clone() for p in network.parameters()), *network.buffers()]

    torchs = build(program)
    mine = copy.deepcopy(torchs)
    brim.convert(mine, recompute=mode)  # type: ignore[arg-type]
    try:
        expected = train(torchs)
    except Exception:
        return None  # of torch itself
    got = train(mine)
    brim.restore(mine)
    for module, other in zip(mine.modules(), torchs.modules(), strict=True):
        if type(module) is not type(other):
            return f"restore left {type(module)}"
    # Steps of an optimizer divide by small numbers: what was rounded otherwise may grow.
    loose = program.has(*SUMS_OTHERWISE) or program.autocast is not None
    biases = any(
        "weight" in each.frozen and "bias" not in each.frozen for each in every(program.pieces)
    )
    for a, b in zip(got, expected, strict=True):
        if loose or biases:
            if not a.is_floating_point():
                continue
            fine = torch.equal(a.isfinite(), b.isfinite())
            far = (a.double() - b.double())[a.isfinite() & b.isfinite()].abs()
            low = program.autocast or program.dtype
            fine = fine and (
                far.numel() == 0 or far.max().item() <= 0.2 + 100 * torch.finfo(low).eps
            )
        else:
            fine = same_bits(a, b, False)
        if not fine:
            return f"after {steps} steps of {parts} parts, {mode}: {how_far(a, b)}: {program}"
    return None


def check_microbatches(number: int) -> str | None:
    """Gradients of Microbatches beside those of the whole batch, in float64."""
    dice = random.Random(number)
    program = replace(drawn(number), dtype=torch.float64, autocast=None, leaf=False, again=False)
    program = replace(program, shape=(dice.randint(2, 9), *program.shape[1:]))
    if program.has("BatchNorm2d", "Dropout", "LlamaNorm", "sum"):
        return ""
    torchs = build(program)
    mine = copy.deepcopy(torchs)
    if dice.random() < 0.5:
        brim.convert(mine, recompute=dice.choice(MODES))  # type: ignore[arg-type]
    x = input_of(program)
    try:
        y = torchs(x)
        if not y.requires_grad:
            return ""
        y.square().mean().backward()
    except Exception:
        return ""
    size = dice.randint(1, len(x))

    def loss_of(part: torch.Tensor) -> torch.Tensor:
        return mine(part).square().mean()

    step = brim.Microbatches(loss_of, model=mine, size=size, device="cpu")
    loss = step(x)
    if not math.isclose(float(loss), float(y.square().mean()), rel_tol=1e-9, abs_tol=1e-12):
        return f"loss {float(loss)}, of the whole {float(y.square().mean())}: {program}"
    for (name, a), b in zip(mine.named_parameters(), torchs.parameters(), strict=True):
        if (a.grad is None) != (b.grad is None):
            return f"gradient of {name} is {a.grad is None} None: {program}"
        if a.grad is not None and b.grad is not None:
            far = (a.grad - b.grad).abs().max().item()
            if not far <= 1e-9 * max(b.grad.abs().max().item(), 1e-3) and a.grad.isfinite().all():
                return (
                    f"gradient of {name} with parts of {size}: {how_far(a.grad, b.grad)}: {program}"
                )
    return None


ESTIMATED: dict[str, list[float]] = {"without convolutions": [], "with convolutions": []}
"""Estimated peak by measured peak."""

BY_RULES = ("Conv2d", "BatchNorm2d")
"""What oneDNN takes for convolutions, and torch for norms of channels_last, follows rules of thumb:
docs/explanation/estimate.md. Of programs with these the figures are told, and nothing is wrong."""


def check_estimate(number: int) -> str | None:
    """brim.estimate beside a measured run; a program that differs is made smaller.

    Of networks whose channels are multiples of 16: what oneDNN takes for fewer is not modelled.
    """
    dice = random.Random(number)
    program = replace(drawn(number, unit=16), again=False)
    program = replace(program, shape=(16 * program.shape[0], *program.shape[1:]))
    converted, mode = dice.random() < 0.5, dice.choice(MODES)
    told = estimated(program, converted, mode, keep=True)
    if not told:
        return told
    small = smaller(program, lambda p: bool(estimated(p, converted, mode)))
    how = f"converted with {mode}" if converted else "not converted"
    return f"{estimated(small, converted, mode)} ({how})"


def estimated(
    program: Program, converted: bool, mode: str | None, *, keep: bool = False
) -> str | None:
    """What is wrong with the estimate of a program, or with the model after it."""
    network = build(program)
    if converted:
        brim.convert(network, recompute=mode)  # type: ignore[arg-type]
    x = input_of(program).requires_grad_(program.leaf)
    kinds = [type(each) for each in network.modules()]

    def step() -> None:
        mixed = program.autocast
        with torch.autocast("cpu", mixed) if mixed else contextlib.nullcontext():
            y = network(x)
        if y.requires_grad:
            y.float().mean().backward()

    def clear() -> None:
        for each in (x, *network.parameters()):
            each.grad = None

    try:
        step()  # warm: caches of libraries; and some programs fail in torch itself
    except Exception:
        return ""
    clear()
    state = {name: each.clone() for name, each in network.state_dict().items()}
    random_state = torch.get_rng_state()
    found = brim.estimate(step, device="cpu", progress=False)
    if not torch.equal(random_state, torch.get_rng_state()):
        return f"the random state has changed: {program}"
    for name, each in network.state_dict().items():
        if type(each) is not torch.Tensor or not same_bits(each, state[name]):
            return f"{name} has changed: {program}"
    if [type(each) for each in network.modules()] != kinds:
        return f"modules have changed: {program}"
    if any(each.grad is not None for each in (x, *network.parameters())):
        return f"gradients were left: {program}"
    with brim.PeakMeter("cpu") as meter:
        step()
    ratio = found.peak / max(meter.peak, 1)
    by_rules = program.has(*BY_RULES)
    if keep:
        ESTIMATED[f"{'with' if by_rules else 'without'} convolutions"].append(ratio)
    if by_rules:
        return None
    if not 0.8 <= ratio <= 1.2 and abs(found.peak - meter.peak) > 4096:
        return f"estimated {found.peak:,}, measured {meter.peak:,}: {program}"
    return None


def each_program(
    tally: Tally, what: str, check: Callable[[int], str | None], first: int, seconds: float
) -> None:
    """A check of one program after the other, until the time is over; "" does not count."""
    wrong: list[str] = []
    until, number, cases = time.monotonic() + seconds, first, 0
    while time.monotonic() < until and len(wrong) < 10:
        try:
            told = check(number)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            told = f"{type(error).__name__}: {error} ({last.name}:{last.lineno}): {drawn(number)}"
        cases += told != ""
        wrong += [f"seed {number}: {told}"] if told else []
        number += 1
    print(f"{what}: seeds {first} to {number - 1}", flush=True)
    tally.row(what, cases, wrong)


def planted() -> list[str]:
    """Faults that the comparison does not notice: there must be none."""
    unnoticed = []
    program = Program((2, 5, 8), (Piece("Linear", (8, 8)), Piece("ReLU"), Piece("Linear", (8, 4))))
    right = run(program, build(program))
    for name, change in (
        ("a value", lambda o: o.values[0].view(-1)[3:4].mul_(1.0000002)),
        ("a gradient", lambda o: o.gradients["layers.0.weight"].view(-1)[:1].add_(1e-5)),
        ("the input's gradient", lambda o: o.gradients["input"].view(-1)[:1].mul_(1.000001)),
    ):
        original = globals()["run"]

        def wrong(p: Program, n: nn.Module, change: Any = change, real: Any = original) -> Outcome:
            got: Outcome = real(p, n)
            if any("brim" in type(each).__module__ for each in n.modules()):
                change(got)
            return got

        globals()["run"] = wrong
        try:
            if not differences(program, None):
                unnoticed.append(f"{name} that is changed is not noticed")
        finally:
            globals()["run"] = original
    if differences(program, None) or not right.values:
        unnoticed.append("what is right is called wrong")
    return unnoticed


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--seconds", type=float, default=90, help="of each row")
    options.add_argument("--one", type=int, help="print the program of a seed and what it gives")
    chosen = options.parse_args()
    brim.install_cpu_allocator()
    if chosen.one is not None:
        print(drawn(chosen.one))
        for mode in MODES:
            print(mode, differences(drawn(chosen.one), mode))
        return
    first = chosen.seed * 1_000_000
    tally = Tally("Random networks, training steps and estimates")
    tally.row("planted faults, all noticed", 4, planted())
    for mode in MODES:
        gradients_row(tally, mode, False, first, time.monotonic() + chosen.seconds)
    gradients_row(tally, "auto", True, first, time.monotonic() + chosen.seconds)
    each_program(tally, "training steps", check_steps, first, chosen.seconds)
    each_program(tally, "Microbatches", check_microbatches, first, chosen.seconds)
    each_program(tally, "estimates, within 20 %", check_estimate, first, chosen.seconds)
    for kind, ratios in ESTIMATED.items():
        if len(ratios) > 20:
            tenths = [f"{each:.3f}" for each in statistics.quantiles(ratios, n=10)]
            near_one = sum(abs(each - 1) <= 0.01 for each in ratios) / len(ratios)
            print(
                f"estimated by measured, {len(ratios):,} programs {kind}: {' '.join(tenths)}; "
                f"within 1 %: {near_one:.0%}; from {min(ratios):.3f} to {max(ratios):.3f}"
            )
    tally.finish()


if __name__ == "__main__":
    main()
