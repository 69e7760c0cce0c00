"""brim.audit: what is counted."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  as everyone calls it
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import brim
from brim.compat import memsave_torch

from .audit_cases import ELEMENTS, GRADIENT, C, H, N, by_name, frozen, image, make


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


@pytest.mark.parametrize("layer", [nn.Conv2d(3, 4, 3), nn.Flatten()])
def test_a_shape_for_an_input_is_told_of(layer: nn.Module) -> None:
    text = r"^pass a tensor, not a shape: torch.rand\(\(2, 3, 8, 8\)\), got \(2, 3, 8, 8\)$"
    with pytest.raises(TypeError, match=text):
        brim.audit(layer, (2, 3, 8, 8))
    with pytest.raises(TypeError, match=text):
        brim.assert_saved(layer, (2, 3, 8, 8), at_most=0)


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


# -- Watching changes nothing ----------------------------------------------------------------------


class Attends(nn.Module):
    """The layer behind the attention asks it, through a copy; sums of two types under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.LayerNorm(32), nn.LayerNorm(32)
        self.first, self.last = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down, self.act = nn.Linear(32, 128), nn.Linear(128, 32), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        parts = self.first(self.norm(x)).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts).permute(0, 2, 3, 1).reshape(x.shape)
        x = x + self.last(mixed)
        return x + self.down(self.act(self.up(self.other(x))))


def language_model(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64}
    config = getattr(transformers, f"{name}Config")(**sizes, pad_token_id=0)
    return getattr(transformers, f"{name}ForCausalLM")(config)  # type: ignore[no-any-return]


def kept_by(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """By what a call leaves in memory, without hooks."""
    for _ in range(2):  # the first call allocates for good
        gc.collect()
        with brim.PeakMeter("cpu") as meter:
            result = model(*args, **kwargs)
            outputs = [result] if isinstance(result, Tensor) else [result.loss]
            del result
            gc.collect()
            left = meter.left - sum(each.nbytes for each in outputs)
        del outputs
    return left


@pytest.mark.parametrize("level", [None, "cheap"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_block_with_attention_keeps_what_the_audit_says(
    level: str | None, autocast: bool
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Attends(), Attends()), torch.randn(4, 16, 32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        audit = brim.audit(model, x, progress=False)
        brim.convert(model, recompute=level)
        found = kept_by(model, x)
    said = audit.brim if level is None else audit.cheap
    assert found == pytest.approx(said, rel=0.01)


@pytest.mark.parametrize("name", ["GPTNeoX", "Phi", "Olmo2"])
def test_a_language_model_keeps_what_the_audit_says(name: str) -> None:
    torch.manual_seed(0)
    ids = torch.randint(5, 100, (2, 32))
    model = language_model(name).train()
    said = brim.audit(model, input_ids=ids, labels=ids, progress=False).cheap
    brim.convert(model, recompute="cheap")
    assert kept_by(model, input_ids=ids, labels=ids) == pytest.approx(said, rel=0.02)


def test_hooks_that_hold_tensors_elsewhere_still_count_inside_an_audit() -> None:
    """Those of a checkpoint: what they hold is not asked for."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attends()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    model, x = nn.Sequential(Checkpointed(), Attends()), torch.randn(4, 16, 32)
    said = brim.audit(model, x, progress=False).cheap
    brim.convert(model, recompute="cheap")
    result = model(x)
    result.sum().backward()
    with torch.autograd.graph.save_on_cpu():  # around an audit
        assert brim.audit(model, x, progress=False).brim > said
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_without_values_keeps_what_one_with_values_would(device: str) -> None:
    def network() -> nn.Module:
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), layer)

    real, x = network(), torch.rand(4, 16, 64)
    with torch.device("meta"):
        meta = network()
    found = brim.audit(meta, x, device=device)
    assert {type(p) for p in meta.parameters()} == {nn.Parameter}
    assert {p.device.type for p in meta.parameters()} == {"meta"}
    assert type(x) is torch.Tensor
    assert found.layers == brim.audit(real, x, device=device).layers
    assert found.layers == brim.audit(meta, x.to("meta"), device=device).layers
    assert type(real(x)) is torch.Tensor


def test_a_device_goes_to_a_forward_that_takes_one() -> None:
    class Moves(nn.Module):
        def forward(self, x: torch.Tensor, device: str = "meta") -> torch.Tensor:
            return x.to(device).exp()

    x = torch.ones(4, requires_grad=True)
    assert brim.audit(Moves(), x, device="cpu").torch_nn == 16
    assert brim.audit(nn.ReLU(), x, device="cpu").torch_nn == 16
