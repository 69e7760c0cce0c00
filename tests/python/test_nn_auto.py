"""`recompute="auto"`: what can be computed again is kept until an allocation cannot be served."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import brim
from brim.nn._gated import rerun

from .nn_families import FAMILIES, TEXT, imported, tokens
from .nn_product_models import MODELS, Residual
from .patience import FOR_EVER
from .test_nn_frameworks import _one_rank, with_lora  # noqa: F401


@pytest.fixture(autouse=True)
def _nothing_learned() -> Iterator[None]:
    brim.nn.reset_pressure()
    yield
    gc.collect()
    assert brim.nn.pressure().values == 0  # every graph is gone, and its values with it
    brim.nn.reset_pressure()


def drop_all() -> None:
    """As if memory were exhausted now."""
    with brim.budget(1, "cpu"), pytest.raises(torch.OutOfMemoryError):
        torch.empty(1)


def built(name: str) -> tuple[nn.Module, Tensor]:
    make, shape, _ = MODELS[name]
    torch.manual_seed(0)
    return make().train(), torch.randn(shape)


def deep(blocks: int = 6, width: int = 32) -> tuple[nn.Module, Tensor]:
    """Most of its memory is what it keeps for backward."""
    torch.manual_seed(0)
    parts = [
        Residual(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )
        for _ in range(blocks)
    ]
    return nn.Sequential(*parts).train(), torch.randn(512, width)


class Checkpointed(nn.Module):
    """A model whose parts run under a checkpoint each."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Any:
        for part in self.inner.children():
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x


def converted(model: nn.Module, recompute: str | None = "auto") -> nn.Module:
    ours = copy.deepcopy(model)
    brim.convert(ours, recompute=recompute)
    return ours


def step(
    model: nn.Module,
    x: Tensor,
    between: Callable[[], object] = lambda: None,
    autocast: bool = False,
) -> list[Tensor]:
    """The loss and the gradients, with something between forward and backward."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    leaf = x.detach().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        loss = model(leaf).float().square().mean()
    between()
    loss.backward()
    assert leaf.grad is not None
    return [loss.detach(), leaf.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def peak_of(work: Callable[[], object]) -> int:
    gc.collect()
    with brim.PeakMeter("cpu") as meter:
        work()
    return meter.peak


# -- The same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_plain_layers_whatever_was_dropped(
    name: str, autocast: bool
) -> None:
    model, x = built(name)
    expected = step(converted(model, None), x, autocast=autocast)
    ours = converted(model)
    assert equal(step(ours, x, autocast=autocast), expected)
    assert brim.nn.pressure().recomputed == 0
    assert equal(step(ours, x, drop_all, autocast), expected)
    assert brim.nn.pressure().recomputed > 0


@pytest.fixture
def _without_onednn() -> Iterator[None]:
    """If it is refused memory, torch takes another kernel, which rounds differently."""
    was_on = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags warns of TF32
    yield
    torch._C._set_mkldnn_enabled(was_on)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])


@DEVICES
@pytest.mark.usefixtures("_without_onednn")
@pytest.mark.parametrize("name", ["mlp", "bottleneck"])
def test_every_allocation_is_served_while_something_can_be_dropped(name: str, device: str) -> None:
    model, x = built(name)
    ours, x = converted(model).to(device), x.to(device)
    expected = step(ours, x)
    with brim.testing.inject_oom(at=1 << 40, device=device) as counting:
        step(ours, x)
    served = 0
    for at in range(1, counting.allocations + 1):
        brim.nn.reset_pressure()
        with brim.testing.inject_oom(at=at, device=device) as injector:
            try:
                assert equal(step(ours, x), expected)
                served += 1
            except torch.OutOfMemoryError:
                assert brim.nn.pressure().requests == 0  # there was nothing to drop
        assert injector.failures == 1
        brim.nn.reset_pressure()
        assert equal(step(ours, x), expected)  # also after a failure
    assert served > counting.allocations // 3


@pytest.mark.slow
@pytest.mark.usefixtures("_without_onednn")
@pytest.mark.parametrize("name", FAMILIES)
def test_models_of_libraries_under_random_failures(name: str) -> None:
    make, loss_of = FAMILIES[name]
    torch.manual_seed(0)
    model = make().train()
    plain, ours = converted(model, None), converted(model)

    def gradients(net: nn.Module, failing: random.Random | None) -> list[Tensor]:
        net.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        loss = loss_of(net, 0)
        if failing is None:
            loss.backward()
        else:
            drop_all() if failing.random() < 0.3 else None
            with brim.testing.inject_oom(
                at=failing.randrange(1, 60), count=failing.randrange(1, 4)
            ):
                loss.backward()
        return [loss.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]

    expected = gradients(plain, None)
    numbers = random.Random(0)
    for _ in range(6):
        with contextlib.suppress(torch.OutOfMemoryError):
            assert equal(gradients(ours, numbers), expected)


# -- Budgets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_a_step_fits_a_budget_below_its_peak_and_settles(share: float) -> None:
    model, x = deep()
    ours = converted(model)
    expected = step(ours, x)
    ours.zero_grad(set_to_none=True)
    whole = peak_of(lambda: step(ours, x))
    del expected[1:]
    ours.zero_grad(set_to_none=True)
    gc.collect()
    limit = brim.memory_stats("cpu").allocated + int(share * whole)
    requests = []
    for _ in range(5):
        with brim.budget(limit, "cpu"):
            found = step(ours, x)
        assert torch.equal(found[0], expected[0])
        del found
        ours.zero_grad(set_to_none=True)
        requests.append(brim.nn.pressure().requests)
    assert requests[0] > 0  # memory was short in the first step
    assert requests[-1] == requests[2]  # and in none after the third
    assert brim.nn.pressure().foreseen > 0


def test_without_pressure_nothing_is_dropped_and_no_more_is_held_than_torch_holds() -> None:
    model, x = deep()
    ours = converted(model)
    step(model, x), step(ours, x)
    model.zero_grad(set_to_none=True)
    theirs = peak_of(lambda: step(model, x))
    ours.zero_grad(set_to_none=True)
    assert peak_of(lambda: step(ours, x)) <= 1.02 * theirs
    found = brim.nn.pressure()
    assert (found.requests, found.dropped, found.foreseen, found.recomputed) == (0, 0, 0, 0)


@pytest.mark.slow
def test_lengths_that_vary_recompute_where_they_are_long() -> None:
    model, _ = deep()
    ours = converted(model)
    x = torch.randn(1024, 32)
    step(ours, x)
    ours.zero_grad(set_to_none=True)
    whole = peak_of(lambda: step(ours, x))
    ours.zero_grad(set_to_none=True)
    gc.collect()
    limit = brim.memory_stats("cpu").allocated + int(0.6 * whole)
    lengths = random.Random(0)
    for _ in range(40):
        rows = lengths.randrange(8, 1025)
        part = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))
        before = brim.nn.pressure()
        with brim.budget(limit, "cpu"):
            found = [each.clone() for each in step(ours, part)[:1]]
        after = brim.nn.pressure()
        if rows < 512:
            assert after.recomputed == before.recomputed
        assert equal(found, step(model, part)[:1])
        model.zero_grad(set_to_none=True)
        ours.zero_grad(set_to_none=True)
    assert brim.nn.pressure().recomputed > 0


def test_more_is_kept_again_when_there_is_room() -> None:
    model, x = deep(3)
    ours = converted(model)
    step(ours, x)
    ours.zero_grad(set_to_none=True)
    whole = peak_of(lambda: step(ours, x))
    ours.zero_grad(set_to_none=True)
    gc.collect()
    limit = brim.memory_stats("cpu").allocated + int(1.1 * whole)
    in_the_way: Tensor | None = torch.empty(int(0.5 * whole), dtype=torch.uint8)

    def foreseen() -> int:
        before = brim.nn.pressure().foreseen
        with brim.budget(limit, "cpu"):
            step(ours, x)
        ours.zero_grad(set_to_none=True)
        return brim.nn.pressure().foreseen - before

    for _ in range(3):
        most = foreseen()
    assert most > 0
    del in_the_way
    assert min(foreseen() for _ in range(40)) < most


# -- Exact, or not dropped -------------------------------------------------------------------------


def test_a_weight_that_changed_raises_instead_of_giving_another_gradient() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    brim.convert(model, recompute="auto")

    def change() -> None:
        drop_all()
        with torch.no_grad():
            model[1].bias.add_(1.0)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model, torch.randn(64, 8), change)


def test_statistics_of_batch_norm_in_eval_mode_may_change() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8).eval(), nn.ReLU(), nn.Conv2d(8, 4, 3)
    )
    ours = converted(model)
    x = torch.randn(4, 3, 8, 8)

    def change() -> None:
        drop_all()
        with torch.no_grad():
            ours[1].train()(torch.randn(4, 8, 8, 8))
        ours[1].eval()

    assert equal(step(ours, x, change), step(model, x))


def test_a_value_that_was_overwritten_is_computed_again() -> None:
    norm, last = brim.nn.LayerNorm(16), brim.nn.Linear(16, 4)
    for layer in (norm, last):
        brim.convert(layer, recompute="auto")
    x = torch.randn(32, 16, requires_grad=True)

    def gradient(overwrites: bool) -> Tensor:
        last.zero_grad()
        middle = norm(x)
        loss = last(middle).square().sum()
        if overwrites:
            with torch.no_grad():
                middle.zero_()
        loss.backward()
        assert last.weight.grad is not None
        return last.weight.grad.clone()

    assert torch.equal(gradient(True), gradient(False))


def test_what_the_program_holds_is_not_dropped() -> None:
    norm, last = brim.nn.LayerNorm(256), brim.nn.Linear(256, 4)
    for layer in (norm, last):
        brim.convert(layer, recompute="auto")
    middle = norm(torch.randn(512, 256, requires_grad=True))
    loss = last(middle).sum()
    drop_all()
    assert brim.nn.pressure().dropped == 0
    del middle
    drop_all()
    assert brim.nn.pressure().dropped == 1
    loss.backward()


def test_backward_twice_and_second_derivatives() -> None:
    model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 3)).double()
    ours = converted(model)
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)

    def second(net: nn.Module, drops: bool) -> list[Tensor]:
        loss = net(x).square().sum()
        if drops:
            drop_all()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        return list(
            torch.autograd.grad(first.square().sum(), [x, *net.parameters()], allow_unused=True)
        )

    for drops in (False, True):
        for mine, theirs in zip(second(ours, drops), second(model, False), strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert torch.equal(mine, theirs)
    loss = ours(x).square().sum()
    drop_all()
    once = torch.autograd.grad(loss, list(ours.parameters()), retain_graph=True)
    again = torch.autograd.grad(loss, list(ours.parameters()))
    assert equal(list(once), list(again))


def test_saved_tensor_hooks_see_all_that_is_kept() -> None:
    model, x = deep(2)

    def packed(net: nn.Module) -> int:
        seen: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            seen.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            net(x.detach().requires_grad_()).sum().backward()
        return sum(seen)

    assert packed(converted(model)) >= packed(converted(model, None))
    assert brim.nn.pressure().values == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_of_a_checkpoint(reentrant: bool) -> None:
    model, x = deep(3)
    expected = step(model, x)
    assert equal(step(Checkpointed(converted(model), reentrant), x, drop_all), expected)


def test_two_threads_share_a_budget() -> None:
    model, x = deep(4)
    ours = [converted(model) for _ in range(2)]
    expected = step(ours[0], x)[0]
    for each in ours:
        each.zero_grad(set_to_none=True)
    whole = peak_of(lambda: step(ours[0], x))
    ours[0].zero_grad(set_to_none=True)
    gc.collect()
    limit = brim.memory_stats("cpu").allocated + int(1.6 * whole)
    wrong: list[object] = []

    def train(net: nn.Module) -> None:
        for _ in range(6):
            try:
                torch.manual_seed(1)
                loss = net(x.detach().requires_grad_()).float().square().mean()
                if not torch.equal(loss.detach(), expected):
                    wrong.append(loss)
                loss.backward()
                del loss
                net.zero_grad(set_to_none=True)
            except torch.OutOfMemoryError:
                net.zero_grad(set_to_none=True)  # the other thread holds the room
            except Exception as error:
                wrong.append(error)

    with brim.budget(limit, "cpu"):
        threads = [threading.Thread(target=train, args=(each,)) for each in ours]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert not wrong


# -- With the rest of brim -------------------------------------------------------------------------


def test_the_report_tells_what_was_given_up() -> None:
    model, x = deep(2)
    report = brim.convert(model, recompute="auto")
    assert str(report.pressure) == "memory was never short: nothing was given up"
    step(model, x, drop_all)
    found = report.pressure
    assert found.requests >= 1
    assert found.dropped > 0
    assert found.blocks == 2
    assert f"giving up {found.dropped} values" in str(found)


def test_the_time_that_this_took_is_told_and_counts_once() -> None:
    """A chain of functions that wait: to compute its last value again takes those before it."""
    clock = brim._C.ClockByHand()

    def slow(x: Tensor) -> Tensor:
        clock.advance(0.004)
        return torch.tanh(x)

    x = torch.randn(8, requires_grad=True)
    with clock:
        for _ in range(3):
            x = rerun(slow, x, recompute=2)
        drop_all()
        x.sum().backward()
    found = brim.nn.pressure()
    assert found.recomputed == 2  # the first two functions; runs after that are the derivatives'
    assert found.seconds == pytest.approx(0.008)
    assert "in 0.008 s" in str(found)


@pytest.mark.parametrize("share", [0.35, 0.6])
def test_a_recorded_step_shows_what_was_given_up_and_had_again(share: float) -> None:
    model, x = deep()
    ours = converted(model)
    whole = peak_of(lambda: step(ours, x))
    ours.zero_grad(set_to_none=True)
    begin = brim.memory_stats("cpu").allocated
    with brim.budget(begin + int(share * whole), "cpu") as budget:
        for turn in range(4):
            before = brim.nn.pressure()
            record = brim.nn.record_pressure(step, ours, x, device="cpu")
            after, moments = brim.nn.pressure(), record.moments
            assert record.limit == budget.limit
            assert max(moment.held for moment in moments) <= budget.limit
            dropped = sum(moment.dropped for moment in moments)
            assert dropped == after.dropped_bytes - before.dropped_bytes
            assert turn in (1, 2) or (dropped > 0) == (turn == 0)  # it settles within three steps
            kept_not = after.foreseen_bytes - before.foreseen_bytes
            assert sum(moment.again for moment in moments) == dropped + kept_not
            assert moments[-1].given_up == 0
            assert moments[-1].held == brim.memory_stats("cpu").allocated
            most = max(moment.held + moment.given_up for moment in moments)
            assert 0.95 * whole < most - begin < (1.02 if turn == 0 else 1.2) * whole
            ours.zero_grad(set_to_none=True)
    free = brim.nn.record_pressure(step, ours, x, device="cpu").moments
    assert not any(moment.given_up or moment.dropped or moment.again for moment in free)


def test_one_recording_at_a_time() -> None:
    def inner() -> None:
        with pytest.raises(RuntimeError, match="are recorded already"):
            brim.nn.record_pressure(torch.ones, 1, device="cpu")

    assert brim.nn.record_pressure(inner, device="cpu").moments
    with pytest.raises(ValueError, match="of the step"):
        brim.nn.record_pressure(lambda: int("of the step"), device="cpu")
    assert len(brim.nn.record_pressure(torch.ones, 1, device="cpu").moments) == 3


def test_convert_changes_the_level_of_a_model_and_restore_takes_it_back() -> None:
    model, x = deep(2)
    brim.convert(model, recompute="cheap")
    report = brim.convert(model, recompute="auto")
    assert {each.reason for each in report.changed} == {'recompute is "auto" now, it was "cheap"'}
    brim.convert(model, recompute="products")
    assert brim.nn.pressure().values == 0
    brim.convert(model, recompute="auto")
    held = model(x)
    assert brim.nn.pressure().values > 0
    del held
    brim.restore(model)
    step(model, x)
    assert brim.nn.pressure().values == 0


def test_a_region_can_be_automatic() -> None:
    model, x = deep(2)
    expected = step(model, x)

    class InRegion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Any:
            with brim.saving("auto"):
                return self.inner(x)

    assert equal(step(InRegion(), x, drop_all), expected)
    assert brim.nn.pressure().recomputed > 0


@pytest.mark.parametrize("other", ["Cheap", "all", True, 2])
def test_an_unknown_level_is_refused(other: Any) -> None:
    with pytest.raises(ValueError, match='recompute must be None, "cheap", "products" or "auto"'):
        brim.convert(nn.ReLU(), recompute=other)


def test_accumulated_gradients_and_a_scaler() -> None:
    model, x = deep(3)
    ours = converted(model)

    def train(net: nn.Module, between: Callable[[], object]) -> list[Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for part in x.chunk(4):
            loss = net(part).square().mean()
            between()
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return [p.detach().clone() for p in net.parameters()]

    assert equal(train(ours, drop_all), train(model, lambda: None))


@pytest.mark.usefixtures("_one_rank")
def test_under_distributed_data_parallel() -> None:
    model, x = deep(3)
    theirs, ours = (
        nn.parallel.DistributedDataParallel(each)
        for each in (copy.deepcopy(model), converted(model))
    )
    assert equal(step(ours, x, drop_all), step(theirs, x))


@pytest.mark.slow
@pytest.mark.parametrize("first", ["convert", "peft"])
def test_with_adapters_of_peft(first: str) -> None:
    make, loss_of = TEXT["llama"]
    found = []
    for level in (None, "auto"):
        torch.manual_seed(0)
        net = make()
        if first == "convert":
            brim.convert(net, recompute=level)
        net = with_lora(net).train()
        if first == "peft":
            brim.convert(net, recompute=level)
        torch.manual_seed(1)
        loss = loss_of(net, 0)
        if level == "auto":
            drop_all()
        loss.backward()
        found.append([p.grad for p in net.parameters() if p.grad is not None])
        del loss
    assert brim.nn.pressure().recomputed > 0
    assert equal(*found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_transformers_under_a_budget(tmp_path: Any) -> None:
    transformers = imported("transformers")
    losses = []
    for level in (None, "auto"):
        torch.manual_seed(0)
        net = TEXT["llama"][0]()
        brim.convert(net, recompute=level)
        rows = [{"input_ids": row, "labels": row} for row in tokens(0, rows=8, length=64)]
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path / str(level)),
            max_steps=4,
            per_device_train_batch_size=4,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
        )
        trainer = transformers.Trainer(model=net, args=args, train_dataset=rows)
        if level is None:
            peak = peak_of(trainer.train)
        else:
            with brim.budget(brim.memory_stats("cpu").allocated + int(0.8 * peak), "cpu"):
                trainer.train()
        losses.append([each["loss"] for each in trainer.state.log_history if "loss" in each])
        del trainer, net
        gc.collect()
    assert losses[0] == losses[1]
    assert brim.nn.pressure().recomputed > 0


def test_a_loop_that_holds_a_graph_for_ever_does_not_grow() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    brim.convert(model, recompute="auto")
    held = model(torch.randn(2, 4))
    for _ in range(200):
        model(torch.randn(2, 4)).sum().backward()
    assert brim.nn.pressure().values == 1
    del held


_FORKS = """
import os, threading, torch, brim
with brim.budget("1GiB", "cpu"):  # its lock is the first that a fork takes
    pass
model = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 4))
brim.convert(model, recompute="auto")
x = torch.randn(2, 4)
done = False
def work():
    while not done:
        model(x)
threads = [threading.Thread(target=work) for _ in range(2)]
for each in threads:
    each.start()
for _ in range(40):
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
done = True
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_fork_beside_a_forward_does_not_hang() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", _FORKS], check=True, timeout=FOR_EVER)


_HELD_BY_ONEDNN = """
import torch, brim
held = [torch.randn(64, 64 + i).to_mkldnn() for i in range(50)]
model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
brim.convert(model, recompute="auto")
before = brim.memory_stats("cpu").allocated
model(torch.randn(4, 8)).sum().backward()
model.zero_grad()
del held
assert brim.memory_stats("cpu").allocated == before
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
@pytest.mark.filterwarnings("ignore")
def test_what_onednn_held_before_the_first_layer_can_be_freed_after_it() -> None:
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _HELD_BY_ONEDNN], check=True, timeout=FOR_EVER
    )


def test_a_value_that_backward_works_with_does_not_count_as_freed() -> None:
    norm, last = brim.nn.LayerNorm(64), brim.nn.Linear(64, 4, bias=False)
    for layer in (norm, last):
        brim.convert(layer, recompute="auto")
    for at in range(1, 16):
        brim.nn.reset_pressure()
        loss = last(norm(torch.randn(128, 64, requires_grad=True))).sum()
        with brim.testing.inject_oom(at=at), contextlib.suppress(torch.OutOfMemoryError):
            loss.backward()
            found = brim.nn.pressure()
            assert found.dropped == found.recomputed
        del loss


def test_logits_go_before_what_takes_more_to_compute_again() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 16), nn.Linear(16, 512))
    brim.convert(model, recompute="auto")
    hidden, logits = (4 * 256 * width for width in (128, 512))
    with brim.saving("auto"):
        loss = nn.functional.cross_entropy(model(torch.randn(256, 64)), torch.arange(256))
    with brim.budget(brim.memory_stats("cpu").allocated, "cpu"):
        torch.empty(hidden + 4, dtype=torch.uint8)
    # The output of GELU, which is no product, and the logits; not its input, of 64 features.
    assert brim.nn.pressure().dropped_bytes == hidden + logits
    loss.backward()


def test_two_models_in_turn_settle() -> None:
    first, x = deep()
    second = nn.Sequential(
        *(
            nn.Sequential(
                *(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)),
                *(nn.Linear(32, 192), nn.SiLU(), nn.Linear(192, 32)),
            )
            for _ in range(6)
        )
    )
    models = [converted(first), converted(second)]
    whole = peak_of(lambda: step(models[0], x))
    models[0].zero_grad(set_to_none=True)
    gc.collect()
    requests = []
    with brim.budget(brim.memory_stats("cpu").allocated + int(0.6 * whole), "cpu"):
        for _ in range(5):
            before = brim.nn.pressure().requests
            for each in models:
                step(each, x)
                each.zero_grad(set_to_none=True)
            requests.append(brim.nn.pressure().requests - before)
    assert requests[0] > 0
    assert requests[-1] == 0


def test_a_loop_settles_that_holds_what_its_backward_does_not_need() -> None:
    body, x = deep()
    ours, aside = converted(body), nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 4))
    brim.convert(aside, recompute="auto")
    whole = peak_of(lambda: step(ours, x))
    ours.zero_grad(set_to_none=True)
    gc.collect()
    held: Tensor | None = None
    requests = []
    with brim.budget(brim.memory_stats("cpu").allocated + int(0.6 * whole), "cpu"):
        for _ in range(6):
            before = brim.nn.pressure().requests
            middle = ours(x)
            held = aside(middle)
            middle.square().mean().backward()
            ours.zero_grad(set_to_none=True)
            requests.append(brim.nn.pressure().requests - before)
    assert held is not None
    assert requests[0] > 0
    assert requests[-1] == 0
