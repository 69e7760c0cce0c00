"""Models of transformers, timm, torchvision and diffusers: converted, trained, and worked with."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn

import brim

from .nn_families import FAMILIES, TEXT, Family, imported, tokens
from .torchrun import torchrun

STEPS = 20
FAST = ("llama", "gpt2", "timm convnext")


def steps_of(family: Family, steps: int, autocast: bool, **options: Any) -> Iterator[Any]:
    """The loss of each step, then the state; before them what the first forward keeps."""
    make, loss_of = family
    torch.manual_seed(0)
    net = make().train()
    if options:
        brim.convert(net, **options)
    update = torch.optim.AdamW(net.parameters(), lr=1e-3)
    torch.manual_seed(1)
    for step in range(steps):
        with (
            brim.PeakMeter("cpu") as meter,
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            loss = loss_of(net, step)
        if step == 0:
            yield meter.left
        yield loss.item()
        update.zero_grad()
        loss.backward()
        update.step()
    yield {name: value.clone() for name, value in net.state_dict().items()}


def check_steps(name: str, steps: int, autocast: bool = False) -> None:
    family = FAMILIES[name]
    kept, *losses, state = steps_of(family, steps, autocast)
    assert losses[0] != losses[-1]
    for recompute in (None, "cheap"):
        ours_kept, *ours, ours_state = steps_of(family, steps, autocast, recompute=recompute)
        assert ours_kept <= kept
        low = autocast or any(value.dtype.itemsize == 2 for value in state.values())
        torch.testing.assert_close(
            torch.tensor(ours), torch.tensor(losses), rtol=2e-2 if low else 1e-4, atol=1e-5
        )
        if not low:
            torch.testing.assert_close(ours_state, state, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("name", FAST)
def test_a_few_steps(name: str, held: int) -> None:
    check_steps(name, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_twenty_steps(name: str, autocast: bool, held: int) -> None:
    check_steps(name, STEPS, autocast)


@pytest.mark.parametrize("name", FAST)
def test_restore_undoes_everything(name: str) -> None:
    make, loss_of = FAMILIES[name]
    torch.manual_seed(0)
    net = make().eval()
    before = {each: (type(module), set(vars(module))) for each, module in net.named_modules()}
    expected = loss_of(net, 0)
    brim.convert(net, recompute="cheap")
    brim.restore(net)
    after = {each: (type(module), set(vars(module))) for each, module in net.named_modules()}
    assert after == before
    assert torch.equal(loss_of(net, 0), expected)


# -- peft ------------------------------------------------------------------------------------------


def with_lora(net: nn.Module, **options: Any) -> nn.Module:
    peft = imported("peft")
    config = peft.LoraConfig(
        r=4,
        lora_dropout=0.1,
        target_modules=["q_proj", "v_proj", "down_proj"],
        task_type="CAUSAL_LM",
        init_lora_weights="gaussian",
        **options,
    )
    made: nn.Module = peft.get_peft_model(net, config)
    return made


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("first", ["convert", "peft"])
def test_peft(dora: bool, first: str, held: int) -> None:
    make, loss_of = TEXT["llama"]
    results = []
    for convert in (False, True):
        torch.manual_seed(0)
        net = make()
        if convert and first == "convert":
            brim.convert(net, recompute="cheap")
        net = with_lora(net, use_dora=dora).train()
        if convert and first == "peft":
            brim.convert(net, recompute="cheap")
        torch.manual_seed(1)
        with brim.PeakMeter("cpu") as meter:
            loss = loss_of(net, 0)
        kept = meter.left
        loss.backward()
        results.append((kept, loss, {n: p.grad for n, p in net.named_parameters()}))
    (kept, loss, grads), (ours_kept, ours_loss, ours_grads) = results
    assert ours_kept < kept
    torch.testing.assert_close(ours_loss, loss)
    torch.testing.assert_close(ours_grads, grads, rtol=1e-4, atol=1e-6)


def test_peft_merges_into_a_converted_model() -> None:
    torch.manual_seed(0)
    net = TEXT["llama"][0]()
    brim.convert(net)
    net = with_lora(net).eval()
    expected = net(input_ids=tokens(0)).logits
    merged = net.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=tokens(0)).logits, expected, rtol=1e-4, atol=1e-5)


# -- transformers ----------------------------------------------------------------------------------


def test_generate() -> None:
    torch.manual_seed(0)
    net = TEXT["llama"][0]().eval()
    expected = net.generate(tokens(0), max_new_tokens=5, do_sample=False)
    brim.convert(net, recompute="cheap")
    assert torch.equal(net.generate(tokens(0), max_new_tokens=5, do_sample=False), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    make, loss_of = TEXT["llama"]
    results = []
    for convert in (False, True):
        torch.manual_seed(0)
        net: Any = make().train()
        net.gradient_checkpointing_enable({"use_reentrant": reentrant})
        net.enable_input_require_grads()
        if convert:
            brim.convert(net, recompute="cheap")
        loss_of(net, 0).backward()
        results.append([parameter.grad for parameter in net.parameters()])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trainer(tmp_path: Any) -> None:
    transformers = imported("transformers")
    losses = []
    for convert in (False, True):
        torch.manual_seed(0)
        net = TEXT["llama"][0]()
        if convert:
            brim.convert(net, recompute="cheap")
        ids = [{"input_ids": row, "labels": row} for row in tokens(0, rows=8)]
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path / str(convert)),
            max_steps=4,
            per_device_train_batch_size=2,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="steps",
            save_steps=4,
        )
        trainer = transformers.Trainer(model=net, args=args, train_dataset=ids)
        trainer.train()
        losses.append([each["loss"] for each in trainer.state.log_history if "loss" in each])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    again = type(TEXT["llama"][0]()).from_pretrained(str(tmp_path / "True" / "checkpoint-4"))
    torch.testing.assert_close(again.state_dict(), net.state_dict())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what torch.compile warns of in these models is not ours
@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "bert", "t5", "resnet", "timm convnext", "efficientnet"]
)
def test_compile(name: str) -> None:
    make, loss_of = FAMILIES[name]
    results = []
    for convert in (False, True):
        torch.manual_seed(0)
        net = make().train()
        if convert:
            brim.convert(net, recompute="cheap")
        torch._dynamo.reset()
        compiled = torch.compile(net, backend="aot_eager")
        for step in range(2):
            net.zero_grad()
            torch.manual_seed(1)
            loss = loss_of(compiled, step)
            loss.backward()
        results.append([loss, *(parameter.grad for parameter in net.parameters())])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


@pytest.fixture
def _one_rank() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", ["convert", "shard"])
def test_units_of_fsdp(first: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    make, loss_of = TEXT["llama"]
    mesh = init_device_mesh("cpu", (1,))
    results = []
    for convert in (False, True):
        torch.manual_seed(0)
        net: Any = make().train()
        if convert and first == "convert":
            brim.convert(net, recompute="cheap")
        for layer in net.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        if convert and first == "shard":
            brim.convert(net, recompute="cheap")
        for _ in range(2):
            loss_of(net, 0).backward()
        results.append([parameter.grad.to_local() for parameter in net.parameters()])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_fsdp_and_ddp_on_two_ranks(tmp_path: Path) -> None:
    imported("transformers")
    torchrun(Path(__file__).with_name("fsdp_job.py"), tmp_path)
    for rank in range(2):
        results = torch.load(tmp_path / f"{rank}.pt")
        for kind in ("float32", "mixed"):
            losses, kept, parameters = results[kind, "never"]
            for convert in ("before", "after", "auto"):
                ours, ours_kept, ours_parameters = results[kind, convert]
                assert ours == pytest.approx(losses, rel=1e-6)
                torch.testing.assert_close(ours_parameters, parameters, rtol=1e-5, atol=1e-6)
                assert convert == "auto" or ours_kept < 0.6 * kept
        for kind in ("float32", "mixed", "ddp"):  # to the bit, whatever was dropped
            (losses, _, parameters), (ours, _, ours_parameters) = (
                results[kind, convert] for convert in ("kept", "auto")
            )
            assert ours == losses
            assert all(map(torch.equal, ours_parameters, parameters))
        assert results["ddp", "kept"][1] == 0 < results["ddp", "auto"][1]


def test_copies_of_a_model(tmp_path: Any) -> None:
    torch.manual_seed(0)
    net = TEXT["llama"][0]().eval()
    brim.convert(net)
    expected = net(input_ids=tokens(0)).logits
    torch.save(net, tmp_path / "net.pt")
    for other in (copy.deepcopy(net), torch.load(tmp_path / "net.pt", weights_only=False)):
        kinds = [type(module) for module in other.modules()]
        assert kinds == [type(module) for module in net.modules()]
        assert torch.equal(other(input_ids=tokens(0)).logits, expected)
