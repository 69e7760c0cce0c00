"""brim's layers never fail where torch's work: classes, layouts and types that brim does not know.

Each kind of tensor goes through each layer of torch.nn and of brim. Where torch works, brim works,
with the same values, gradients and classes; where torch raises, brim raises the same error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn

import brim

from .nn_cases import ONE_OF_EACH, Case, near, pair, same_bits
from .nn_tensor_kinds import Doubled, Int8Weight, Named, Watching, nested, plain, summed

# Most of these kinds are prototypes and say so in torch's own layers too.
pytestmark = pytest.mark.filterwarnings("ignore")

CASES = [
    *ONE_OF_EACH,
    Case("Linear", (3, 5, 7), (7, 6)),
    Case("BatchNorm2d", (3, 4, 5, 6), (4,), train=False),
    Case("Dropout", (3, 4), (0.3,), train=False),
    Case("MaxPool2d", (2, 3, 9, 10), (2,), {"return_indices": True}),
    *(Case(name, (3, 5), (), {"inplace": True}) for name in ("ReLU", "SiLU", "Dropout")),
]
WEIGHTED = [case for case in ONE_OF_EACH if len(case.needs()) > 1]


@pytest.fixture(scope="module")
def _mesh() -> Iterator[Any]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    from torch.distributed.device_mesh import init_device_mesh

    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@dataclass
class Outcome:
    """What a layer gave: an error, or values and gradients with their classes."""

    error: type[Exception] | None = None
    kinds: tuple[Any, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    message: str = ""

    def differs(self, other: Outcome, case: Case) -> str:
        """In words; empty if it does not."""
        if not _alike(self.error, other.error):
            return f"{self.error}: {self.message!r}, not {other.error}: {other.message!r}"
        if self.kinds != other.kinds or len(self.tensors) != len(other.tensors):
            return f"classes {self.kinds}, not {other.kinds}"
        for place, (a, b) in enumerate(zip(self.tensors, other.tensors, strict=True)):
            if not _same(a.detach(), b.detach(), case):
                return f"tensor {place}"
        return ""


def _alike(a: type[Exception] | None, b: type[Exception] | None) -> bool:
    """Some errors are of a narrower class, where torch's Python and its operators both check."""
    return a is b or (a is not None and b is not None and (issubclass(a, b) or issubclass(b, a)))


def _same(a: Tensor, b: Tensor, case: Case) -> bool:
    if a.device.type == "meta":
        return a.device == b.device and a.dtype == b.dtype and a.shape == b.shape
    if a.is_complex():
        return torch.equal(a, b)
    # RMSNorm, where brim does it itself, sums in another order.
    return same_bits(a, b, case.keeps_sign_of_zero) or (case.layer == "RMSNorm" and near(a, b))


def outcome(layer: nn.Module, make: Callable[[], Tensor], mode: str) -> Outcome:
    try:
        with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode == "grad"):
            x = make()
            floats = x.is_floating_point() or x.is_complex()
            x = x.requires_grad_(mode == "grad" and floats)
            given = x * 1 if getattr(layer, "inplace", False) else x
            torch.manual_seed(0)
            y = layer(given)
            values = plain(y)
            leaves = [x, *layer.parameters()]
            if mode == "grad" and any(v.requires_grad for v in values):
                summed(values).backward()
        grads = [leaf.grad for leaf in leaves if leaf.is_leaf and leaf.grad is not None]
        kinds = tuple(type(part) for part in (*(y if isinstance(y, tuple) else (y,)), *grads))
        return Outcome(None, kinds, (*values, *plain(grads), *layer.buffers()))
    except Exception as error:
        return Outcome(type(error), message=str(error))


def compare(
    case: Case,
    make: Callable[[Tensor], Tensor],
    weights: Callable[[nn.Module], object] | None = None,
    modes: tuple[str, ...] = ("grad", "no grad", "inference"),
) -> int:
    """Ours as torch's in every mode. Returns in how many torch works."""
    works = 0
    for mode in modes:
        found = []
        for layer in pair(case, torch.float32):
            if weights is not None:
                weights(layer)
            found.append(outcome(layer, lambda: make(case.input(torch.float32)), mode))
        ours, torchs = found
        difference = ours.differs(torchs, case)
        assert not difference, f"{case}, {mode}: {difference}"
        works += torchs.error is None
    return works


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "wrapper": lambda x: Doubled(x, x + 1),
    "torch_function": lambda x: x.as_subclass(Watching),
    "plain subclass": lambda x: x.as_subclass(Named),
    "nested": nested(torch.strided),
    "jagged": nested(torch.jagged),
    "sparse": lambda x: x.relu().to_sparse(),
    "csr": lambda x: x.relu().to_sparse_csr(),
    "mkldnn": lambda x: x.to_mkldnn(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 3, torch.quint8),
    "complex": lambda x: torch.complex(x, x + 1),
    "conjugate": lambda x: torch.complex(x, x + 1).conj(),
    "negated": lambda x: torch.complex(x, x + 1).conj().imag,
    "int64": lambda x: (x * 5).long(),
    "uint8": lambda x: (x * 5).byte(),
    "bool": lambda x: x > 0,
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "meta": lambda x: x.to("meta"),
    "float64": lambda x: x.double(),  # the weights are float32
}


@pytest.mark.parametrize("kind", KINDS)
def test_inputs(kind: str) -> None:
    works = sum(compare(case, KINDS[kind]) for case in CASES)
    assert works > 0 or kind in ("float8", "conjugate")


def _to(dtype: Any) -> Callable[[nn.Module], object]:
    return lambda layer: layer.to(dtype)


WEIGHTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[nn.Module], object]]] = {
    "complex": (KINDS["complex"], _to(torch.complex64)),
    "complex weights": (lambda x: x, _to(torch.complex64)),
    "float8": (KINDS["float8"], _to(torch.float8_e4m3fn)),
    "float8 weights": (lambda x: x, _to(torch.float8_e4m3fn)),
    "meta": (KINDS["meta"], _to("meta")),
}


def _replaced(make: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    """Of a layer, all parameters by what `make` makes of them."""

    def replace(layer: nn.Module) -> None:
        for name, parameter in list(layer.named_parameters()):
            made = make(parameter.detach())
            floats = made.is_floating_point() or made.is_complex()
            setattr(layer, name, nn.Parameter(made, requires_grad=floats))

    return replace


WEIGHTS |= {
    f"{name} weights": ((lambda x: x), _replaced(KINDS[name]))
    for name in ("wrapper", "torch_function", "plain subclass", "mkldnn", "quantized", "int64")
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights(kind: str) -> None:
    make, weights = WEIGHTS[kind]
    for case in WEIGHTED:
        compare(case, make, weights)


@pytest.mark.parametrize("layout", ["sparse", "csr"])
def test_sparse_weights(layout: str) -> None:
    def sparse(layer: nn.Module) -> None:
        layer.weight = nn.Parameter(KINDS[layout](layer.weight.detach()))

    works = compare(Case("Linear", (5, 7), (7, 6)), lambda x: x, sparse)
    assert works > 0 or layout == "sparse"


def test_classes_see_torchs_functions() -> None:
    for case in CASES:
        seen = []
        for layer in pair(case, torch.float32):
            Watching.seen.clear()
            x = case.input(torch.float32).as_subclass(Watching)
            torch.manual_seed(0)
            layer(x * 1 if case.inplace else x)
            seen.append(Watching.seen[-1])
        assert seen[0] == seen[1], case


# -- torchao and DTensor --------------------------------------------------------------------------


def test_a_weight_that_only_linear_knows() -> None:
    """What torchao's Int8WeightOnly and Float8WeightOnly do, in both orders."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).requires_grad_(False)

    def quantize(model: nn.Sequential) -> None:
        for layer in (model[0], model[2]):
            layer.weight = nn.Parameter(Int8Weight.of(layer.weight), requires_grad=False)

    torchs, before, after = (copy.deepcopy(net) for _ in range(3))
    quantize(torchs)
    quantize(before)
    brim.convert(before)
    brim.convert(after)
    quantize(after)
    results = []
    for model in (torchs, before, after):
        x = torch.linspace(-1, 1, 24).reshape(3, 8).requires_grad_()
        y = model(x)
        y.square().sum().backward()
        results.append((y, x.grad))
    for y, grad in results[1:]:
        assert torch.equal(y, results[0][0])
        assert torch.equal(grad, results[0][1])


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_torchao(name: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    results = []
    for converted in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        quantization.quantize_(net.requires_grad_(False), getattr(quantization, name)())
        if converted:
            brim.convert(net)
        x = torch.linspace(-1, 1, 256).reshape(4, 64).requires_grad_()
        y = net(x)
        y.sum().backward()
        results.append((y, x.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("weights", [False, True], ids=["inputs", "inputs and weights"])
@pytest.mark.parametrize("placement", ["replicate", "shard"])
def test_dtensor(_mesh: Any, placement: str, weights: bool) -> None:  # noqa: PT019
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    where = [Replicate()] if placement == "replicate" else [Shard(0)]
    works = 0
    for case in CASES:
        if not case.layer.endswith(("1d", "3d")):
            works += compare(
                case,
                lambda x: distribute_tensor(x, _mesh, where),
                (lambda layer: distribute_module(layer, _mesh)) if weights else None,
                ("grad",),
            )
    assert works > 8


# -- What brim knows, it does itself --------------------------------------------------------------


def test_a_subclass_without_rules_still_keeps_bits() -> None:
    x = torch.randn(1024, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes), lambda t: t):
        y = brim.nn.ReLU()(x.as_subclass(Named))
    assert type(y) is Named
    assert kept == [128]


def test_fake_tensors_run_brims_operators() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.randn(1024, requires_grad=True)
        assert brim.nn.ReLU()(x).grad_fn.name() == "brim::relu_backward"


def test_a_device_mode_changes_nothing() -> None:
    with torch.device("cpu"):
        y = brim.nn.ReLU()(torch.randn(8, requires_grad=True))
    assert y.grad_fn.name() == "brim::relu_backward"


def test_compiled_layers_take_subclasses() -> None:
    for case in (
        Case("Linear", (5, 7), (7, 6)),
        Case("ReLU", (3, 5)),
        Case("MaxPool1d", (2, 3, 8), (2,)),
    ):
        ours, torchs = pair(case, torch.float32)
        run = torch.compile(ours, fullgraph=True, backend="aot_eager")
        results = []
        for call in (run, torchs):
            x = case.input(torch.float32)
            x = Doubled(x, x + 1).requires_grad_()
            y = call(x)
            y.sum().backward()
            results.append([*plain(y), *plain(x.grad)])
        assert all(map(torch.equal, *results))


def test_a_gradient_of_a_layer_inside_of_another_transform() -> None:
    """Below the gradient torch.func differentiates once more, or batches."""
    x = torch.randn(3, 2, 4)
    for name, layer in (("ReLU", nn.ReLU()), ("MaxPool1d", nn.MaxPool1d(2)), ("GELU", nn.GELU())):
        ours = copy.deepcopy(layer)
        brim.convert(ours)

        def loss(x: Tensor, layer: nn.Module) -> Tensor:
            return layer(x).pow(3).sum()

        for transform in (
            torch.func.hessian,
            lambda f: torch.func.vmap(torch.func.grad(f), (0, None)),
        ):
            mine, theirs = (transform(loss)(x, m) for m in (ours, layer))
            assert torch.equal(mine, theirs), name
