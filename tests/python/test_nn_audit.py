"""brim.audit and brim.assert_saved: what is counted, and that the model is as it was."""

from __future__ import annotations

import json
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  as everyone calls it
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import brim
from brim.cli import main
from brim.compat import memsave_torch

N, C, H = 4, 8, 16
ELEMENTS = N * C * H * H


def image(**options: Any) -> Tensor:
    return torch.randn(N, C, H, H, **options)


def by_name(audit: brim.Audit) -> dict[str, tuple[int, int, int, int]]:
    """torch.nn, brim, cheap, least."""
    assert audit.least <= min(audit.torch_nn, audit.brim, audit.cheap)
    return {each.name: (each.torch_nn, each.brim, each.cheap, each.least) for each in audit.layers}


def make() -> nn.Module:
    """Its output cannot be recomputed cheaply; it keeps nothing itself."""
    return nn.Linear(H, H, bias=False).requires_grad_(False)


def frozen(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers).requires_grad_(False)


GRADIENT = {"requires_grad": True}


@pytest.mark.parametrize(
    ("layer", "torch_nn", "own", "least"),
    [
        (nn.ReLU(), 4 * ELEMENTS, ELEMENTS // 8, ELEMENTS // 8),
        (nn.LeakyReLU(), 4 * ELEMENTS, ELEMENTS // 8, ELEMENTS // 8),
        (nn.GELU(), 4 * ELEMENTS, 4 * ELEMENTS, 4 * ELEMENTS),
        (nn.MaxPool2d(2), None, ELEMENTS // 4, ELEMENTS // 4),
        (nn.AvgPool2d(2), 4 * ELEMENTS, 0, 0),
        (nn.Dropout(0.5), 4 * ELEMENTS, ELEMENTS // 8, ELEMENTS // 8),
        (nn.Conv2d(C, C, 3), 4 * ELEMENTS, 0, 0),
        (nn.BatchNorm2d(C).eval(), None, 0, 0),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_one_layer(layer: nn.Module, torch_nn: int | None, own: int, least: int) -> None:
    model = nn.Sequential(make(), layer.requires_grad_(False))
    figures = by_name(brim.audit(model, image(**GRADIENT)))["1"]
    assert figures[1:] == (own, own, least)
    assert figures[0] == torch_nn if torch_nn is not None else figures[0] > own


def test_parameters_buffers_and_inputs_do_not_count() -> None:
    assert brim.audit(nn.Linear(8, 8), torch.randn(4, 8)).to_dict()["total"] == {
        "torch_nn": 0,
        "brim": 0,
        "cheap": 0,
        "least": 0,
    }


def test_a_storage_counts_once_where_it_was_kept_first() -> None:
    model = nn.Sequential(nn.Conv2d(C, C, 3, padding=1), nn.ReLU(), nn.Conv2d(C, C, 1))
    figures = by_name(brim.audit(model, image()))
    whole = 4 * ELEMENTS
    # ReLU's output, or its input
    assert figures["0"] == (0, 0, 0, 0)
    assert figures["1"][:3] == (whole, 0, 0)
    assert figures["2"] == (0, whole, whole, whole)


def test_views_count_their_storage_once() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.made = nn.Linear(C, C)
            self.a, self.b = nn.Linear(C, C), nn.Linear(C, C)

        def forward(self, x: Tensor) -> Tensor:
            left, right = self.made(x).chunk(2)
            result: Tensor = self.a(left) + self.b(right)
            return result

    audit = brim.audit(Model(), torch.randn(64, C))
    figures, whole = by_name(audit), 64 * C * 4
    assert (figures["a"][:3], figures["b"][:3]) == ((whole,) * 3, (0, 0, 0))
    assert audit.least == whole


def test_operations_outside_of_known_layers_have_rows() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = make(), make()

        def forward(self, x: Tensor) -> Tensor:
            up: Tensor = self.up(x)
            return F.silu(self.gate(x)) * up

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp, self.pool = Gated(), nn.AdaptiveAvgPool2d(1)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(self.pool(self.mlp(x)).flatten(1) * 1, target)

    audit = brim.audit(Model(), image(**GRADIENT), torch.zeros(N, dtype=torch.int64))
    whole = 4 * ELEMENTS
    figures = by_name(audit)
    assert figures["mlp · silu"] == (whole, whole, whole, whole)
    assert figures["mlp · mul"][::3] == (2 * whole, whole)  # the product can be made again
    assert figures["(model) · cross_entropy"][0] >= 4 * N * C
    assert figures["(model) · cross_entropy"][3] == 0
    assert {each.name: each.type for each in audit.layers}["mlp · mul"] == "Gated"
    assert "(model) · flatten" not in figures


def test_the_least_of_a_language_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=224,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=2000,
    )
    model = transformers.LlamaForCausalLM(config).bfloat16()
    ids = torch.zeros(1, 128, dtype=torch.int64)
    audit = brim.audit(model, input_ids=ids, labels=ids)
    wide, narrow = 2 * 128 * 224, 2 * 128 * 64
    # Each layer's gate and up, query, key and value, attention's and both residuals; no logits.
    expected = 4 * (2 * wide + 2 * narrow + 3 * narrow)
    assert expected * 0.95 < audit.least < expected * 1.05
    names = {each.name for each in audit.layers}
    assert "model.layers.0.self_attn · scaled_dot_product_attention" in names
    assert "(model) · cross_entropy" in names


@pytest.mark.cuda
def test_the_least_on_cuda() -> None:
    model = nn.Sequential(make(), nn.BatchNorm2d(C), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(C, C, 1))
    audit = brim.audit(model.cuda(), image(device="cuda"))
    by_name(audit)
    # The input of BatchNorm, and the bits of Dropout; two statistics per channel of BatchNorm.
    assert audit.least <= 4 * ELEMENTS + ELEMENTS // 8 + 8 * C


def test_a_model_that_cannot_be_watched_has_a_note() -> None:
    class Shy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.utils._python_dispatch._len_torch_dispatch_stack():
                raise RuntimeError("somebody is watching\nmore of it")
            return x.exp()

    result = brim.audit(Shy(), torch.ones(8, requires_grad=True))
    assert result.least == result.torch_nn == 32
    line = str(result).splitlines()[-1]
    assert line.startswith("note: the least is the smallest of the measured sums")
    assert line.endswith("(RuntimeError: somebody is watching)")
    assert result.to_dict()["note"] == line
    assert brim.audit(nn.ReLU(), torch.ones(8, requires_grad=True)).note == ""


def test_a_module_that_brim_does_not_know_has_a_row_per_operation() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cosh(x * 1)

    assert by_name(brim.audit(Model(), image(**GRADIENT))) == {
        "(model) · cosh": (4 * ELEMENTS,) * 3 + (0,)
    }


class Holder(nn.Module):
    """Has a layer inside, and calls a function itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(F.relu(x * 1))
        return result


def test_a_region_of_saving_belongs_to_the_second_run() -> None:
    with brim.saving():
        figures = by_name(brim.audit(Holder(), image(**GRADIENT)))
    assert figures["(model) · relu"] == (4 * ELEMENTS, ELEMENTS // 8, ELEMENTS // 8, 0)


def test_the_least_of_a_part_of_a_larger_storage_is_a_copy() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.made, self.linear = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.made(x)[1:])  # type: ignore[no-any-return]

    audit = brim.audit(Net(), torch.randn(4, 2, 8))
    assert audit.torch_nn == audit.brim == 4 * 2 * 8 * 4
    assert audit.least == 3 * 2 * 8 * 4


def test_least_knows_that_a_consumer_keeps_the_output() -> None:
    def least_with(slope: float) -> int:
        model = nn.Sequential(make(), nn.LeakyReLU(slope), nn.Softmax(-1))
        return brim.audit(model, image(**GRADIENT)).least

    # Softmax needs its output, which is made from that of LeakyReLU.
    assert least_with(0.1) == 4 * ELEMENTS
    # With a slope below zero the bits are those of the input, which costs as much.
    assert least_with(-0.1) == 4 * ELEMENTS
    model = nn.Sequential(make(), nn.LeakyReLU(0.1), make())
    assert brim.audit(model, image(**GRADIENT)).least == ELEMENTS // 8


def test_what_needs_no_gradient_keeps_nothing() -> None:
    model = frozen(nn.Conv2d(C, C, 3), nn.ReLU(), nn.MaxPool2d(2))
    audit = brim.audit(model, image())
    assert (audit.torch_nn, audit.brim, audit.cheap, audit.least) == (0, 0, 0, 0)
    assert "brim keeps" not in str(audit)
    assert repr(audit) == "<Audit: torch.nn keeps 0 B, brim 0 B, with recompute 0 B>"
    assert "… 3 layers keep nothing" in str(audit)


def test_a_converted_model_is_measured_as_it_is() -> None:
    model = frozen(nn.ReLU(), nn.ReLU())
    x = image(**GRADIENT)
    brim.convert(model, only="1")
    figures = by_name(brim.audit(model, x))
    assert figures["0"][:2] == (4 * ELEMENTS, 4 * ELEMENTS)
    assert figures["1"][:2] == (4 * ELEMENTS, ELEMENTS // 8)
    assert [type(layer) for layer in model] == [nn.ReLU, brim.nn.ReLU]


def test_recompute_is_part_of_the_second_run() -> None:
    model = nn.Sequential(nn.BatchNorm2d(C), nn.ReLU(), nn.Conv2d(C, C, 1))
    x = image(**GRADIENT) * 1
    plain = brim.audit(model, x)
    brim.convert(model, recompute="cheap")
    cheap = brim.audit(model, x)
    assert cheap.torch_nn == plain.torch_nn
    assert cheap.brim <= plain.brim - 4 * ELEMENTS + ELEMENTS // 8
    assert model[2].recompute is True


class Everything(nn.Module):
    """Changes its buffers, its input and the random state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(inplace=True), nn.BatchNorm2d(C), nn.Dropout(0.5), nn.Conv2d(C, C, 3)
        )
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor, *, scale: float = 1.0, more: Any = None) -> dict[str, Tensor]:
        self.calls += random.random() + np.random.random()
        return {"y": self.layers(x) * scale + more["z"][0]}


def test_the_model_is_as_it_was() -> None:
    model = Everything()
    model.layers[0].eval()
    x = image()
    z = torch.ones((), requires_grad=True)
    model(x.clone(), more={"z": [z]})["y"].sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    buffers = {name: (id(b), b._version) for name, b in model.named_buffers()}
    classes = [type(module) for module in model.modules()]
    flags = [module.training for module in model.modules()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    values, states = x.clone(), (torch.get_rng_state(), random.getstate())
    numpys = pickle.dumps(np.random.get_state())

    audit = brim.audit(model, x, scale=2.0, more={"z": [z]})
    assert 0 < audit.brim < audit.torch_nn

    assert torch.equal(x, values)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert {name: (id(b), b._version) for name, b in model.named_buffers()} == buffers
    assert "nothing" in model._buffers
    assert len(grads) == len(list(model.parameters()))
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert torch.equal(parameter.grad, grad)  # type: ignore[arg-type]
    assert [type(module) for module in model.modules()] == classes
    assert [module.training for module in model.modules()] == flags
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert pickle.dumps(np.random.get_state()) == numpys


def test_the_model_is_as_it_was_after_an_error() -> None:
    model = nn.Sequential(nn.BatchNorm2d(C), nn.Conv2d(3, 3, 3))
    mean = model[0].running_mean
    with pytest.raises((RuntimeError, ValueError)):
        brim.audit(model, image())
    assert [type(layer) for layer in model] == [nn.BatchNorm2d, nn.Conv2d]
    assert model[0].running_mean is mean
    assert torch.equal(mean, torch.zeros(C))  # type: ignore[arg-type]
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def scripted() -> nn.Sequential:
    norm = nn.BatchNorm2d(C)
    traced = torch.jit.trace(nn.BatchNorm2d(C).eval(), image())  # type: ignore[no-untyped-call]
    return nn.Sequential(nn.Conv2d(C, C, 1), torch.jit.script(norm), nn.ReLU(), traced)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated")
@pytest.mark.parametrize("fails", [False, True])
def test_modules_of_torch_jit_are_measured_and_stay_as_they_were(fails: bool) -> None:
    model = scripted()
    if fails:
        model.append(nn.Conv2d(3, 3, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    addresses = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    classes = [type(module) for module in model.modules()]
    if fails:
        with pytest.raises((RuntimeError, ValueError)):
            brim.audit(model, image())
    else:
        figures = by_name(brim.audit(model, image()))
        # The scripted layers are not entered: what they keep is the model's.
        assert figures["(model)"][0] >= 4 * ELEMENTS
        assert figures["2"][:2] == (4 * ELEMENTS, ELEMENTS // 8)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert {name: buffer.data_ptr() for name, buffer in model.named_buffers()} == addresses
    assert [type(module) for module in model.modules()] == classes
    assert model[1].num_batches_tracked == 0
    if not fails:
        model(image()).sum().backward()
        assert model[1].num_batches_tracked == 1


def test_buffers_come_back_where_one_cannot_be_copied() -> None:
    class Unusual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(2).as_subclass(NoCopy))

    model = nn.Sequential(nn.BatchNorm2d(C), Unusual(), nn.BatchNorm2d(C))
    buffers = {name: id(buffer) for name, buffer in model.named_buffers()}
    with pytest.raises(RuntimeError, match="no copy"):
        brim.audit(model, image())
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == buffers


class NoCopy(Tensor):
    """A tensor that cannot be copied."""

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no copy")


def test_inside_inference_mode_it_measures_the_same() -> None:
    model = nn.Sequential(nn.Conv2d(C, C, 3), nn.BatchNorm2d(C), nn.ReLU())
    expected = by_name(brim.audit(model, image()))
    with torch.inference_mode():
        x = image()
        assert x.is_inference()
        assert by_name(brim.audit(model, x)) == expected
        assert brim.assert_saved(model, x, at_most="1GiB") > 0
        assert torch.is_inference_mode_enabled()
    assert by_name(brim.audit(model, x)) == expected


def test_an_argument_of_the_model_may_be_called_model() -> None:
    class Model(nn.Module):
        def forward(self, model: Tensor) -> Tensor:
            return model.relu()

    x = image(**GRADIENT) * 1
    assert brim.audit(Model(), model=x).torch_nn == 4 * ELEMENTS
    assert brim.assert_saved(Model(), model=x, at_most="1GiB") == 4 * ELEMENTS


class Named(brim.nn.ReLU):
    def help(self) -> str:
        return "something of its own"


class Twice(brim.nn.ReLU):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_classes_that_derive_from_brims_are_measured_against_torch() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.named, self.twice = Named(), Twice()

        def forward(self, x: Tensor) -> Tensor:
            assert self.named.help()
            result: Tensor = self.twice(self.named(x))
            return result

    model = Model()
    audit = brim.audit(model, image(**GRADIENT) * 1)
    # With a forward of its own, nobody knows what torch.nn would do.
    assert by_name(audit) == {
        "named": (4 * ELEMENTS, ELEMENTS // 8, ELEMENTS // 8, 0),
        "twice": (ELEMENTS // 8,) * 3 + (0,),
    }
    assert [each.type for each in audit.layers] == ["Named", "Twice"]
    assert [type(module) for module in model.children()] == [Named, Twice]


def test_a_model_of_the_compatible_face_is_measured_against_torch() -> None:
    plain = nn.Sequential(nn.Conv2d(C, C, 3), nn.BatchNorm2d(C).eval(), nn.ReLU(), nn.MaxPool2d(2))
    plain.append(nn.Dropout(0.5)).requires_grad_(False)
    model = memsave_torch.nn.convert_to_memory_saving(plain)
    classes = [type(module) for module in model]
    x = image(**GRADIENT) * 1
    assert by_name(brim.audit(model, x)) == by_name(brim.audit(plain, x))
    assert [type(module) for module in model] == classes
    norm = brim.audit(memsave_torch.nn.MemSaveRMSLayerNorm(H), x)
    assert [each.name for each in norm.layers] == ["(model)"]
    assert norm.torch_nn > norm.brim


def test_nothing_stays_in_memory() -> None:
    model = nn.Sequential(nn.Conv2d(C, C, 3), nn.ReLU())
    x = image()
    brim.install_cpu_allocator()
    brim.audit(model, x)
    with brim.PeakMeter("cpu") as meter:
        brim.audit(model, x)
    assert meter.left == 0


def test_a_layer_used_twice_has_one_row() -> None:
    act = nn.ReLU()
    figures = by_name(brim.audit(frozen(act, act), image(**GRADIENT)))
    assert figures == {"0": (8 * ELEMENTS, ELEMENTS // 4, ELEMENTS // 4, 0)}


def test_what_is_checkpointed_is_not_kept() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.act, x, use_reentrant=False)

    assert brim.audit(Model(), image(**GRADIENT)).to_dict()["total"] == {
        "torch_nn": 0,
        "brim": 0,
        "cheap": 0,
        "least": 0,
    }


def test_without_gradient_mode_it_still_measures() -> None:
    x = image(**GRADIENT)
    with torch.no_grad():
        assert brim.audit(nn.ReLU(), x).torch_nn == 4 * ELEMENTS


def test_autocast_needs_the_input_in_the_low_type_once() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.made = make()
            self.a, self.b = nn.Linear(H, H, bias=False), nn.Linear(H, H, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            made = self.made(x).float()
            result: Tensor = self.a(made) + self.b(made)
            return result

    with torch.autocast("cpu", torch.bfloat16):
        audit = brim.audit(Model(), image())
    assert audit.least == 2 * ELEMENTS
    assert by_name(audit)["a"][1] >= 2 * ELEMENTS


def test_on_tensors_without_memory() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Conv2d(C, C, 3)).to("meta").requires_grad_(False)
    audit = brim.audit(model, image(device="meta", requires_grad=True))
    assert (audit.brim, audit.least) == (ELEMENTS // 8, 0)
    assert audit.torch_nn >= 4 * ELEMENTS


def test_the_table_and_the_dict() -> None:
    audit = brim.audit(nn.Sequential(make(), nn.ReLU(), make()), image(**GRADIENT))
    lines = str(audit).splitlines()
    assert lines[0].split() == ["layer", "type", "torch.nn", "brim", "cheap", "least"]
    kept = ["32.00", "KiB", *("1.00", "KiB") * 3]
    assert lines[2].split() == ["1", "ReLU", *kept]
    assert lines[3] == "… 2 layers keep nothing"
    assert lines[5].split() == ["total", *kept]
    assert lines[6] == (
        'brim keeps 3.1% of what torch.nn keeps, 3.1% with recompute="cheap"; the least is 3.1%'
    )
    assert lines[7] == (
        "hint: brim.convert(model) keeps 1.00 KiB instead of 32.00 KiB; most is saved at 1 (ReLU): "
        "1.00 KiB instead of 32.00 KiB"
    )
    figures = json.loads(json.dumps(audit.to_dict()))
    total = {"torch_nn": 32768, "brim": 1024, "cheap": 1024, "least": 1024}
    assert figures["layers"][1] == {"name": "1", "type": "ReLU"} | total
    assert figures["total"] == total
    assert figures["hint"] == lines[7]


def test_a_row_whose_least_is_counted_elsewhere_is_explained() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(), nn.Linear(256, 64))
    audit = brim.audit(model, torch.ones(32, 64))
    dropout = audit.layers[2]
    assert dropout.least > dropout.brim  # the dropout's output, which the last layer keeps
    assert audit.least <= audit.brim
    note = "note: where a row's least is above the others, a value counts at another layer"
    assert note in str(audit)
    assert note not in str(brim.audit(nn.Sequential(make(), nn.ReLU()), image(**GRADIENT)))


def test_equal_rows_of_repeated_blocks_are_one_line() -> None:
    def block() -> nn.Module:
        return nn.Sequential(make(), nn.GELU())

    model = nn.Sequential(*(block() for _ in range(4)), nn.GELU())
    audit = brim.audit(model, image(**GRADIENT))
    assert len(audit.layers) == 9
    lines = str(audit).splitlines()
    assert lines[2].split()[:6] == ["0-3.1", "×", "4", "GELU", "128.00", "KiB"]
    assert lines[3].split()[:2] == ["4", "GELU"]
    assert lines[4] == "… 4 layers keep nothing"
    # Each column begins at the same character.
    assert len({line.index("KiB") for line in (lines[2], lines[6])}) == 1


@pytest.mark.parametrize("recompute", [None, "cheap"])
def test_the_hint_names_what_is_not_yet_done(recompute: str | None) -> None:
    model = nn.Sequential(
        make(), nn.BatchNorm2d(C), nn.ReLU(), nn.Conv2d(C, C, 1), nn.Conv2d(C, C, 1)
    )
    x = image(**GRADIENT)
    expected = 'hint: brim.convert(model, recompute="cheap") keeps'
    assert brim.audit(model, x).hint.startswith(expected)
    brim.convert(model, recompute=recompute)
    assert brim.audit(model, x).hint.startswith(expected) == (recompute is None)


def test_the_hint_on_frozen_batch_norms_was_measured() -> None:
    model = frozen(nn.Conv2d(C, C, 1), nn.BatchNorm2d(C), nn.ReLU())
    model[0].requires_grad_(True)
    hint = brim.audit(model, image()).hint
    expected = "after .eval() on them brim.convert(model) keeps 1.6% of torch.nn's instead of 5"
    assert expected in hint.splitlines()[0]  # it saves more than the conversion alone
    assert hint.splitlines()[1].startswith('hint: brim.convert(model, recompute="cheap") keeps')
    assert model[1].training
    assert ".eval()" not in brim.audit(model.eval(), image()).hint


def test_the_hint_names_a_class_that_is_not_recognised() -> None:
    class Soft(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.erfinv(torch.tanh(x) * 0.5)

    model = nn.Sequential(make(), Soft(), make(), Soft())
    audit = brim.audit(model, image(**GRADIENT))
    line = next(line for line in audit.hint.splitlines() if "Soft" in line)
    rows = [layer for layer in audit.layers if layer.type == "Soft"]
    kept = brim.format_bytes(sum(min(row.brim, row.cheap) for row in rows))
    least = brim.format_bytes(sum(row.least for row in rows))
    assert line == (
        f"hint: 2 × Soft ({__name__}) keep {kept}, at the least {least}: "
        "brim does not recognise this class"
    )


def test_the_hint_of_a_model_that_keeps_nothing() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    assert brim.audit(model, x).hint == ""
    assert brim.audit(frozen(model), x).hint.startswith("hint: no parameter needs a gradient")


def test_assert_saved_measures_the_model_as_it_is() -> None:
    x = image(**GRADIENT)
    model = frozen(nn.ReLU(), nn.Conv2d(C, C, 1))
    assert brim.assert_saved(model, x, at_most="32KiB") == 32768
    with pytest.raises(AssertionError) as caught:
        brim.assert_saved(model, x, at_most=32767)
    message = str(caught.value)
    assert message.startswith("the model keeps 32768 bytes for backward, at most 32767 are allowed")
    assert message.splitlines()[-1].split() == ["0", "ReLU", "32.00", "KiB"]
    brim.convert(model)
    assert brim.assert_saved(model, x, at_most="1KiB") == 1024


def test_assert_saved_passes_keyword_arguments_on() -> None:
    z = torch.ones(())
    kept = brim.assert_saved(Everything(), image(), scale=2.0, more={"z": [z]}, at_most="1GiB")
    assert kept > 0


def test_a_limit_is_anything_that_is_a_whole_number() -> None:
    layer, x = nn.ReLU(), image(**GRADIENT) * 1
    assert brim.assert_saved(layer, x, at_most=np.int64(4 * ELEMENTS)) == 4 * ELEMENTS
    with pytest.raises(AssertionError, match=f"at most {ELEMENTS} are allowed"):
        brim.assert_saved(layer, x, at_most=np.int32(ELEMENTS))
    assert brim.assert_saved(nn.Identity(), x, at_most="0") == 0
    with pytest.raises(AssertionError, match="at most 0 are allowed"):
        brim.assert_saved(layer, x, at_most="0")


@pytest.mark.parametrize("at_most", ["lots", "50%", -1, np.int64(-1)])
def test_a_wrong_limit_is_an_error(at_most: Any) -> None:
    with pytest.raises(ValueError, match=rf"at_most must be .*, got .?{at_most}"):
        brim.assert_saved(nn.ReLU(), image(), at_most=at_most)


@pytest.mark.parametrize("at_most", [True, 1.5, None, np.float32(1.0), [1]])
def test_a_limit_of_a_wrong_type_is_an_error(at_most: Any) -> None:
    with pytest.raises(TypeError, match="at_most must be an int"):
        brim.assert_saved(nn.ReLU(), image(), at_most=at_most)


def test_nothing_is_a_limit_too() -> None:
    assert brim.assert_saved(nn.AvgPool2d(2).to("cpu"), image(), at_most=0) == 0
    with pytest.raises(AssertionError):
        brim.assert_saved(nn.Sequential(nn.ReLU()), image(**GRADIENT), at_most=0)


@pytest.mark.parametrize("function", [brim.audit, lambda m: brim.assert_saved(m, at_most=1)])
def test_only_modules(function: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got 3"):
        function(3)


PROGRAM = """
import torch

def model():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3))

words = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.ReLU())  # no function

def nothing():
    return 3

def sized(width):
    return torch.nn.Linear(width, width)
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "audited_program.py"
    path.write_text(PROGRAM)
    return str(path)


def test_on_the_command_line(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["audit", f"{program}:model", "--input", "2,3,10,10", "--device", "cpu"]
    assert main([*words, "--train-only", "0.*", "--eval"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["1", "ReLU", "4.00", "KiB", *("128", "B") * 3]
    assert main([*words, "--freeze", "*", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"]["torch_nn"] == 0
    assert main(["audit", f"{program}:words", "--input", "2,3:int64", "--device", "cpu"]) == 0
    assert "ReLU" in capsys.readouterr().out


def test_a_page_says_where_the_classes_are(program: str, tmp_path: Path) -> None:
    page = tmp_path / "kept.html"
    words = ["audit", f"{program}:model", "--input", "2,3,10,10", "--device", "cpu"]
    assert main([*words, "--html", str(page)]) == 0
    assert re.search(r"ReLU in activation\.py:\d+", page.read_text())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nothing"], "must return a torch.nn.Module, got 3"),
        (["model", "--input", "2,x"], "must be a shape such as"),
        (["model", "--input", "2:no_type"], "must be a shape such as"),
        (["model", "--freeze", "head.*"], "'head.*' matches no parameter"),
        (["missing"], "was not found"),
        (["sized"], "sized takes (width), but is called as sized(): missing"),
        (["model", "--input", "2,4,10,10"], "the model fails with --input 2,4,10,10: Given"),
        (["model", "--input", "2,3,9,9", "--input", "1"], "too many positional arguments"),
        (["model", "--input", f"{10**10},{10**10}"], f"--input {10**10},{10**10}: Storage size"),
        (["model", "--html", "page.txt"], "must end in .html or .htm, got page.txt"),
    ],
)
def test_a_wrong_command_line_ends_with_a_sentence(
    program: str, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *rest = words
    shape = [] if "--input" in rest else ["--input", "2,3,10,10"]
    assert main(["audit", f"{program}:{name}", *shape, *rest, "--device", "cpu"]) == 2
    errors = capsys.readouterr().err
    assert text in errors
    assert len(errors.splitlines()) == 1


# -- Lazy layers ----------------------------------------------------------------------------------


def test_lazy_layers_get_their_sizes_on_a_copy() -> None:
    def net(of: str) -> nn.Sequential:
        torch.manual_seed(0)
        sizes = {"": [(C,), (C,), (C,)], "Lazy": [(), (), ()]}[of]
        return nn.Sequential(
            getattr(nn, of + "Conv2d")(*sizes[0], C, 3),
            getattr(nn, of + "BatchNorm2d")(*sizes[1]),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            getattr(nn, of + "Linear")(*sizes[2], 2),
        )

    whole, lazy, x = net(""), net("Lazy"), image()
    state = torch.get_rng_state()
    found = brim.audit(lazy, x)
    kept = brim.assert_saved(lazy, x, at_most="1MiB")
    assert torch.equal(torch.get_rng_state(), state)
    assert found == brim.audit(whole, x)
    assert kept == found.torch_nn
    assert type(lazy[0]) is nn.LazyConv2d
    assert all(isinstance(p, nn.parameter.UninitializedParameter) for p in lazy.parameters())
