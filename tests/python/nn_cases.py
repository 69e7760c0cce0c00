"""The layers and options that the tests of brim.nn go through, and how two layers are compared."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import brim
from brim.nn.modules import activation

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
HALVES = (torch.bfloat16, torch.float16)
FORMATS = ("contiguous", "channels_last", "sliced")
BITS_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Needs = frozenset[str]
"""Which of "input", "weight" and "bias" need a gradient."""

ALL: Needs = frozenset(["input", "weight", "bias"])

ACTIVATIONS = activation.__all__
IN_PLACE = [
    name
    for name in [*ACTIVATIONS, "Dropout"]
    if "inplace" in inspect.signature(getattr(nn, name)).parameters
]
"""The layers that can write into their input."""

REQUIRED: dict[str, tuple[float, ...]] = {"Threshold": (0.1, -0.2)}
"""Arguments of activations that have no defaults."""


@dataclass(frozen=True)
class Case:
    """One layer with its options, and an input that fits."""

    layer: str
    shape: tuple[int, ...]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    train: bool = True
    forward: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [str(a).replace(" ", "") for a in self.args]
        parts += [f"{k}={v}".replace(" ", "") for k, v in (self.kwargs | self.forward).items()]
        parts += [] if self.train else ["eval"]
        return f"{self.layer}({','.join(parts)})x{'x'.join(map(str, self.shape))}"

    @property
    def inplace(self) -> bool:
        return bool(self.kwargs.get("inplace"))

    @property
    def keeps_sign_of_zero(self) -> bool:
        """Where torch multiplies by zero, brim selects: +0 for its -0."""
        return self.layer != "Dropout" and (self.layer, self.args) != ("LeakyReLU", (0.0,))

    def exact_grads(self, needs: Needs, device: str = "cpu") -> Needs:
        """Which gradients are torch.nn's bit for bit, as the values always are.

        The others have the same terms but another order of summing, since another kernel does it.
        Half types in slices are left out: there BatchNorm in eval mode may round once more.
        """
        if self.layer == "RMSNorm":
            return frozenset()
        if self.layer.startswith("Conv"):
            # Without its weight's gradient a layer calls no kernel that wants the input kept.
            frozen = needs - {"bias"} if device == "cpu" else frozenset()
            exact = needs if "weight" in needs else frozen
            # torch adds up what it padded with atomics on CUDA, in any order.
            pads = device != "cpu" and "padding_mode" in self.kwargs
            return exact - {"input"} if pads else exact
        if self.layer.startswith("BatchNorm"):
            own = not self.train and self.kwargs.get("track_running_stats", True)
            if own and device != "cpu":
                return frozenset()  # a kernel of our own takes all sums in one pass
            if "weight" in needs or (not own and "input" in needs):
                return needs
            return needs - {"bias"} if device == "cpu" else frozenset()
        if self.layer == "LayerNorm":
            return needs if needs != {"bias"} else frozenset()
        if self.layer == "GroupNorm":  # torch's own crashes in channels_last without the input's
            return needs if "input" in needs else frozenset()
        if device != "cpu" and "Pool" in self.layer:
            return frozenset()  # torch adds with atomics there, in any order
        return needs

    def exact(self, needs: Needs, device: str = "cpu") -> bool:
        """Whether all gradients are torch.nn's bit for bit."""
        return self.exact_grads(needs, device) == needs

    def make(self, of: Any, dtype: torch.dtype, device: str = "cpu") -> nn.Module:
        """The layer out of `of` (torch.nn or brim.nn), always with the same state."""
        with torch.device("meta"):  # draws no random numbers
            layer: nn.Module = getattr(of, self.layer)(*self.args, **self.kwargs)
        layer = layer.to(dtype).to_empty(device=device).train(self.train)
        dice = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, tensor in layer.state_dict().items():
                values = torch.randn(tensor.shape, generator=dice)
                if name == "running_var":
                    values = values.abs() + 0.5
                tensor.copy_(values if tensor.is_floating_point() else torch.zeros(()))
        return layer

    def needs(self) -> list[Needs]:
        """Every mix of what can need a gradient, at least one of them."""
        names = ["input"]
        names += [name for name, _ in self.make(nn, torch.float32, "meta").named_parameters()]
        return [
            frozenset(some)
            for count in range(1, len(names) + 1)
            for some in itertools.combinations(names, count)
        ]

    def formats(self) -> list[str]:
        unbatched = "3d" in self.layer and len(self.shape) == 4  # torch wants no channels_last
        return [
            f
            for f in FORMATS
            if (f != "channels_last" or (len(self.shape) in (4, 5) and not unbatched))
            and (f != "sliced" or self.shape)
        ]

    def input(
        self, dtype: torch.dtype, layout: str = "contiguous", device: str = "cpu"
    ) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2)
        values = torch.randn(self.shape, generator=generator, dtype=torch.float64).to(dtype)
        return in_layout(values.to(device), layout)


def in_layout(values: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "sliced":
        return torch.stack([values, values + 1], -1).flatten(-2)[..., ::2]
    if layout == "channels_last":
        last = torch.channels_last if values.dim() == 4 else torch.channels_last_3d
        return values.contiguous(memory_format=last)
    return values


def set_needs(layer: nn.Module, needs: Needs) -> None:
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name in needs)


@dataclass
class Result:
    """What one forward and backward gave."""

    values: list[torch.Tensor]
    grads: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def cotangent_of(output: torch.Tensor, layout: str, seed: int = 3) -> torch.Tensor:
    """Random, laid out in memory as the next layer may hand it back."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    values = values.to(output.device, output.dtype)
    if layout == "channels_last" and output.dim() not in (4, 5):
        return values
    return in_layout(values, layout) if values.dim() else values


def forward(layer: nn.Module, leaf: torch.Tensor, case: Case, layout: str) -> Any:
    """Calls the layer; one that writes into its input gets a copy with the same layout."""
    if not case.inplace:
        return layer(leaf, **case.forward)
    if layout == "sliced":
        return layer(in_layout(leaf, layout))
    return layer(leaf.clone())


def run(
    layer: nn.Module,
    case: Case,
    x: torch.Tensor,
    needs: Needs,
    layout: str = "contiguous",
    seed: int = 4,
) -> Result:
    """Forward and backward with a random cotangent, under the same random state each time."""
    set_needs(layer, needs)
    leaf = x.detach().requires_grad_("input" in needs)
    torch.manual_seed(seed)
    given = forward(layer, leaf, case, layout)
    values = list(given) if isinstance(given, tuple) else [given]
    wanted = {"input": leaf} if "input" in needs else {}
    wanted |= {name: p for name, p in layer.named_parameters() if name in needs}
    grads = torch.autograd.grad(
        values[0], list(wanted.values()), cotangent_of(values[0].detach(), layout)
    )
    return Result(
        [value.detach() for value in values],
        dict(zip(wanted, grads, strict=True)),
        {name: buffer.clone() for name, buffer in layer.named_buffers()},
    )


def same_bits(a: torch.Tensor, b: torch.Tensor, sign_of_zero: bool = True) -> bool:
    """Whether all is equal: type, shape, and each element with its sign; NaN is NaN."""
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    bits = BITS_OF[a.element_size()]
    same = a.contiguous().view(bits) == b.contiguous().view(bits) if sign_of_zero else a == b
    return bool((same | (a.isnan() & b.isnan())).all())


def rounding(dtype: torch.dtype) -> float:
    """Allowed where the sums are taken in another order: in units of the largest element."""
    return 32 * torch.finfo(dtype).eps


def near(a: torch.Tensor, b: torch.Tensor, low: torch.dtype | None = None) -> bool:
    """Within rounding of their type, or of `low` if torch rounds to that in between."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.numel() == 0:
        return True
    largest = b.double().abs().max().item()
    return (a.double() - b.double()).abs().max().item() <= rounding(low or a.dtype) * largest


def differences(
    ours: Result, torchs: Result, exact: Needs = ALL, sign_of_zero: bool = True
) -> Iterator[str]:
    """In words, what of `ours` is not as in `torchs`; gradients not in `exact` may be rounded."""
    if len(ours.values) != len(torchs.values):
        yield f"{len(ours.values)} outputs, not {len(torchs.values)}"
    for i, (a, b) in enumerate(zip(ours.values, torchs.values, strict=False)):
        if not same_bits(a, b, sign_of_zero):
            yield f"output {i} differs: {how_far(a, b)}"
        elif a.stride() != b.stride():
            yield f"output {i} has strides {a.stride()}, not {b.stride()}"
    for name, a in ours.grads.items():
        b = torchs.grads[name]
        if not (same_bits(a, b, sign_of_zero) if name in exact else near(a, b)):
            yield f"gradient of {name} differs: {how_far(a, b)}"
    for name, b in torchs.buffers.items():
        if not same_bits(ours.buffers[name], b):
            yield f"{name} differs: {how_far(ours.buffers[name], b)}"


def how_far(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
    if not a.is_floating_point():
        return f"at {int((a != b).sum())} of {a.numel()} places"
    unit = torch.finfo(a.dtype).eps * b.double().abs().max().item()
    return f"by up to {(a.double() - b.double()).abs().max().item() / unit:.3g} roundings"


def pair(case: Case, dtype: torch.dtype, device: str = "cpu") -> tuple[nn.Module, nn.Module]:
    """brim's layer and torch's, with one state."""
    torchs = case.make(nn, dtype, device)
    ours = case.make(brim.nn, dtype, device)
    ours.load_state_dict(torchs.state_dict())
    return ours, torchs


def crutch(case: Case, x: torch.Tensor) -> Needs:
    """torch's GroupNorm needs the gradient of a channels_last input on the CPU, or it crashes."""
    crashes = case.layer == "GroupNorm" and x.device.type == "cpu" and not x.is_contiguous()
    return frozenset(["input"]) if crashes else frozenset()


def compare(
    case: Case, dtype: torch.dtype, device: str = "cpu", layouts: Sequence[str] | None = None
) -> list[str]:
    """All mixes of gradients and layouts of one case; what differs, in words."""
    ours, torchs = pair(case, dtype, device)
    found = []
    for layout in layouts if layouts is not None else case.formats():
        x = case.input(dtype, layout, device)
        for needs in case.needs():
            mine = run(ours, case, x, needs, layout)
            theirs = run(torchs, case, x, needs | crutch(case, x), layout)
            found += [
                f"{layout}, {'+'.join(sorted(needs))}: {what}"
                for what in differences(
                    mine, theirs, case.exact_grads(needs, device), case.keeps_sign_of_zero
                )
            ]
    return found


def _conv_cases() -> Iterator[Case]:
    for dim, shape in ((1, (2, 4, 11)), (2, (2, 4, 9, 8)), (3, (2, 4, 4, 5, 4))):
        name = f"Conv{dim}d"
        yield Case(name, shape, (4, 6, 3))
        yield Case(name, shape, (4, 6, 3), {"bias": False})
        yield Case(name, shape, (4, 6, 3), {"stride": 2, "padding": 1})
        yield Case(name, shape, (4, 6, 2), {"stride": 3, "padding": 1})
        yield Case(name, shape, (4, 6, 3), {"dilation": 2, "padding": 2})
        yield Case(name, shape, (4, 6, 3), {"groups": 2})
        yield Case(name, shape, (4, 4, 3), {"groups": 4, "padding": 1})  # depthwise
        yield Case(name, shape, (4, 8, 3), {"groups": 4, "stride": 2})
        yield Case(name, shape, (4, 6, 1))
        yield Case(name, shape, (4, 6, 3), {"padding": "same"})
        yield Case(name, shape, (4, 6, 4), {"padding": "same"})  # uneven: more on one side
        yield Case(name, shape, (4, 6, 3), {"padding": "valid"})
        for mode in ("zeros", "reflect", "replicate", "circular"):
            yield Case(name, shape, (4, 6, 3), {"padding": 2, "padding_mode": mode})
        yield Case(name, shape, (4, 6, 3), {"padding": "same", "padding_mode": "circular"})
        yield Case(name, shape[1:], (4, 6, 3), {"padding": 1})
    yield Case("Conv2d", (2, 4, 9, 8), (4, 6, (3, 2)), {"stride": (2, 1), "padding": (1, 0)})
    yield Case("Conv2d", (2, 4, 9, 8), (4, 6, 3), {"padding": (1, 2), "padding_mode": "reflect"})

    for dim, shape in ((1, (2, 4, 7)), (2, (2, 4, 5, 4)), (3, (2, 4, 3, 4, 3))):
        name = f"ConvTranspose{dim}d"
        yield Case(name, shape, (4, 6, 3))
        yield Case(name, shape, (4, 6, 3), {"bias": False})
        yield Case(name, shape, (4, 6, 3), {"stride": 2, "padding": 1})
        yield Case(name, shape, (4, 6, 3), {"stride": 2, "padding": 1, "output_padding": 1})
        yield Case(name, shape, (4, 6, 3), {"dilation": 2, "output_padding": 1})
        yield Case(name, shape, (4, 6, 3), {"groups": 2, "stride": 2})
        yield Case(name, shape[1:], (4, 6, 3), {"stride": 2})
        size = [2 * n + 2 for n in shape[2:]]
        yield Case(name, shape, (4, 6, 3), {"stride": 2}, forward={"output_size": size})


def _linear_cases() -> Iterator[Case]:
    for shape in ((7,), (5, 7), (3, 5, 7), (2, 3, 4, 7)):
        yield Case("Linear", shape, (7, 6))
        yield Case("Linear", shape, (7, 6), {"bias": False})
    yield Case("Linear", (4, 1), (1, 1))


def _norm_cases() -> Iterator[Case]:
    for dim, shape in ((1, (5, 4, 6)), (2, (3, 4, 5, 6)), (3, (2, 4, 3, 4, 5))):
        name = f"BatchNorm{dim}d"
        for train in (True, False):
            yield Case(name, shape, (4,), train=train)
            yield Case(name, shape, (4,), {"affine": False}, train)
            yield Case(name, shape, (4,), {"track_running_stats": False}, train)
            yield Case(name, shape, (4,), {"affine": False, "track_running_stats": False}, train)
            yield Case(name, shape, (4,), {"momentum": None, "eps": 1e-2}, train)
            yield Case(name, shape, (4,), {"momentum": 0.5}, train)
    for train in (True, False):
        yield Case("BatchNorm1d", (5, 4), (4,), train=train)
    yield Case("LayerNorm", (3, 5, 8), (8,))
    yield Case("LayerNorm", (8,), (8,))
    yield Case("LayerNorm", (3, 5, 8), ((5, 8),), {"eps": 1e-2})
    yield Case("LayerNorm", (3, 5, 8), (8,), {"bias": False})
    yield Case("LayerNorm", (3, 5, 8), (8,), {"elementwise_affine": False})
    yield Case("LayerNorm", (2, 3, 4, 5), ((3, 4, 5),))
    for shape in ((3, 5, 8), (8,), (2, 3, 4, 8), (1, 1, 33)):
        yield Case("RMSNorm", shape, (shape[-1],))
    yield Case("RMSNorm", (3, 5, 8), ((5, 8),), {"eps": 1e-2})
    yield Case("RMSNorm", (3, 5, 8), (8,), {"elementwise_affine": False})
    yield Case("GroupNorm", (3, 6, 5, 4), (2, 6))
    yield Case("GroupNorm", (3, 6, 5, 4), (3, 6), {"eps": 1e-2})
    yield Case("GroupNorm", (3, 6, 5, 4), (1, 6))
    yield Case("GroupNorm", (3, 6, 5, 4), (6, 6))
    yield Case("GroupNorm", (3, 6, 5, 4), (2, 6), {"affine": False})
    yield Case("GroupNorm", (3, 6), (2, 6))
    yield Case("GroupNorm", (3, 6, 7), (2, 6))
    yield Case("GroupNorm", (2, 6, 3, 2, 3), (2, 6))


def _activation_cases() -> Iterator[Case]:
    for shape in ((3, 5), (2, 3, 5, 7), (2, 3, 3, 2, 3), (77,), ()):
        for name in ACTIVATIONS:
            args = REQUIRED.get(name, ())
            yield Case(name, shape, args)
            if name in IN_PLACE and shape != ():
                yield Case(name, shape, args, {"inplace": True})
    yield Case("LeakyReLU", (2, 3, 5, 7), (0.3,))
    yield Case("LeakyReLU", (2, 3, 5, 7), (-0.2,))
    yield Case("LeakyReLU", (2, 3, 5, 7), (0.0,))
    yield Case("LeakyReLU", (2, 3, 5, 7), (2.0,))
    yield Case("Hardtanh", (2, 3, 5, 7), (-0.3, 0.7))
    yield Case("GELU", (2, 3, 5, 7), (), {"approximate": "tanh"})
    yield Case("ELU", (2, 3, 5, 7), (0.5,))
    yield Case("ELU", (2, 3, 5, 7), (-0.5,))
    yield Case("CELU", (2, 3, 5, 7), (0.3,))
    yield Case("CELU", (2, 3, 5, 7), (0.3,), {"inplace": True})
    yield Case("Threshold", (2, 3, 5, 7), (0.1, 0.7))
    yield Case("Threshold", (2, 3, 5, 7), (0.1, 0.7), {"inplace": True})
    yield Case("Softplus", (2, 3, 5, 7), (2.0, 1.0))
    yield Case("PReLU", (2, 3, 5, 7), (3,))
    yield Case("PReLU", (5, 3), (3,))
    for p in (0.1, 0.0, 0.5, 0.9, 1.0):
        yield Case("Dropout", (2, 3, 5, 7), (p,))
        yield Case("Dropout", (2, 3, 5, 7), (p,), {"inplace": True})
    yield Case("Dropout", (77,), (0.3,))
    yield Case("Dropout", (2, 3, 5, 7), (0.3,), train=False)
    yield Case("Dropout", (2, 3, 5, 7), (0.3,), {"inplace": True}, train=False)


def _pool_cases() -> Iterator[Case]:
    for dim, shape in ((1, (2, 3, 12)), (2, (2, 3, 9, 10)), (3, (2, 3, 6, 7, 6))):
        name = f"MaxPool{dim}d"
        yield Case(name, shape, (2,))
        yield Case(name, shape, (3, 2, 1))
        yield Case(name, shape, (3,), {"stride": 1})
        yield Case(name, shape, (2, 3))
        yield Case(name, shape, (2,), {"stride": 2, "dilation": 2, "padding": 1})
        yield Case(name, shape, (3, 2), {"ceil_mode": True})
        yield Case(name, shape, (3, 2, 1), {"return_indices": True})
        yield Case(name, shape[1:], (3, 2, 1))
        yield Case(name, shape[1:], (2,), {"return_indices": True})
        name = f"AvgPool{dim}d"
        yield Case(name, shape, (2,))
        yield Case(name, shape, (3, 2, 1))
        yield Case(name, shape, (3, 2, 1), {"count_include_pad": False})
        yield Case(name, shape, (3, 2), {"ceil_mode": True})
        yield Case(name, shape, (3, 2, 1), {"ceil_mode": True, "count_include_pad": False})
        yield Case(name, shape[1:], (3,), {"stride": 1})
        if dim > 1:
            yield Case(name, shape, (3, 2, 1), {"divisor_override": 5})
        name = f"AdaptiveAvgPool{dim}d"
        for size in (1, 2, 5, 20):
            yield Case(name, shape, (size,))
        yield Case(name, shape[1:], (3,))
    yield Case("MaxPool2d", (2, 3, 9, 10), ((2, 3),), {"stride": (1, 2), "padding": (1, 0)})
    yield Case("MaxPool2d", (2, 2, 20, 20), (17,))  # more than 256 places in a window
    yield Case("MaxPool2d", (2, 2, 20, 20), (16,))  # 256 of them
    yield Case("MaxPool2d", (2, 2, 20, 20), (17,), {"return_indices": True})
    yield Case("MaxPool1d", (1, 2, 600), (300,), {"stride": 150})
    yield Case("AvgPool2d", (2, 3, 9, 10), ((2, 3),), {"stride": (1, 2), "padding": (1, 0)})
    yield Case("AdaptiveAvgPool2d", (2, 3, 9, 10), ((None, 4),))
    yield Case("AdaptiveAvgPool2d", (2, 3, 9, 10), ((4, 1),))
    yield Case("AdaptiveAvgPool3d", (2, 3, 6, 7, 6), ((2, None, 3),))


CASES = [
    *_conv_cases(),
    *_linear_cases(),
    *_norm_cases(),
    *_activation_cases(),
    *_pool_cases(),
]

ONE_OF_EACH = list({case.layer: case for case in reversed(CASES)}.values())[::-1]
"""The first case of every layer: its plainest options."""
