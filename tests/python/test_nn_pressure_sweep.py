"""`recompute="auto"`: in every kind of step every allocation may fail, and the bits stay."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import brim

from .test_nn_auto import DEVICES, _without_onednn, drop_all, equal, peak_of  # noqa: F401
from .test_nn_blocks import Layer, _nothing_learned  # noqa: F401
from .test_nn_frameworks import _one_rank  # noqa: F401


def small(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(8, dropout), Layer(8, dropout), nn.LayerNorm(8), nn.Linear(8, 8))
    brim.convert(model, recompute="auto")
    return model.train()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def accumulated(model: nn.Module, x: Tensor) -> list[Tensor]:
    for part in x.chunk(2):
        model(part).square().mean().backward()
    return gradients(model)


def scaled(model: nn.Module, x: Tensor) -> list[Tensor]:
    scaler = torch.amp.GradScaler(x.device.type, init_scale=8.0)
    with torch.autocast(x.device.type, torch.bfloat16):
        loss = model(x).float().square().mean()
    scaler.scale(loss).backward()
    return gradients(model)


def retained(model: nn.Module, x: Tensor) -> list[Tensor]:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


def several_calls(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    losses = [y.square().mean(), y.sin().sum()]
    losses[0].backward(retain_graph=True)
    losses[1].backward()
    return gradients(model)


def twice_differentiated(model: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(model(leaf).sin().sum(), leaf, create_graph=True)
    first.square().sum().backward()
    assert leaf.grad is not None
    return [leaf.grad, *gradients(model)]


def changed_in_place(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model[0](x) * 1.0
    y.mul_(2)
    y[:, ::2].add_(1)
    model[3](model[2](model[1](y))).relu_().square().mean().backward()
    return gradients(model)


def viewed_and_hooked(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model[0](x)
    y.register_hook(lambda grad: grad * 2)
    y = model[1](y.transpose(0, 1)[1:].contiguous().transpose(0, 1))
    with model[2].register_forward_hook(lambda _, __, output: output * 3):
        model[3](model[2](y)).square().mean().backward()
    return gradients(model)


def replicated(model: nn.Module, x: Tensor) -> list[Tensor]:
    parallel = nn.parallel.DistributedDataParallel(model)
    parallel(x).square().mean().backward()
    return [grad.clone() for grad in gradients(model)]


def in_threads(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Two graphs at once, of copies of the model; torch's random numbers are each thread's own."""
    models = [model, copy.deepcopy(model)]
    errors: list[Exception] = []

    def run(net: nn.Module) -> None:
        try:
            net.eval()(x).square().mean().backward()  # random numbers would depend on the order
        except torch.OutOfMemoryError as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(net,)) for net in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [grad for net in models for grad in gradients(net)]


KINDS: dict[str, Callable[[Any, Tensor], list[Tensor]]] = {
    each.__name__: each
    for each in (
        accumulated,
        scaled,
        retained,
        several_calls,
        twice_differentiated,
        changed_in_place,
        viewed_and_hooked,
        replicated,
        in_threads,
    )
}


@pytest.mark.slow
@DEVICES
@pytest.mark.usefixtures("_without_onednn", "_one_rank")
@pytest.mark.parametrize("kind", KINDS)
def test_every_allocation_may_fail_in_every_kind_of_step(kind: str, device: str) -> None:
    if device != "cpu" and kind == "replicated":
        pytest.skip("its group is that of the CPU")
    model, x = small().to(device), torch.randn(2, 6, 8, device=device)

    def run() -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        return KINDS[kind](model, x)

    expected = run()
    with brim.testing.inject_oom(at=1 << 40, device=device) as counting:
        run()
    served = refused = 0
    for at in range(1, counting.allocations + 1):
        brim.nn.reset_pressure()
        with brim.testing.inject_oom(at=at, device=device):
            try:
                found = run()
            except torch.OutOfMemoryError:
                refused += 1
                gc.collect()  # the failed graph
                assert kind == "in_threads" or brim.nn.pressure().requests == 0
            else:
                assert equal(found, expected)
                served += 1
    assert served > refused


# -- Logits ----------------------------------------------------------------------------------------


def language_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 2048))
    brim.convert(model, recompute="auto")
    return model


def loss_of(model: nn.Module, x: Tensor, holds: list[Tensor] | None = None) -> Tensor:
    with brim.saving("auto"):
        logits = model(x)
        if holds is not None:
            holds.append(logits)
        return F.cross_entropy(logits, torch.arange(len(x)))


def test_logits_that_nobody_else_holds_become_their_gradient() -> None:
    model, x = language_model(), torch.randn(128, 8)
    bytes_of_logits = 4 * 128 * 2048
    loss = loss_of(model, x)
    drop_all()
    loss.backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    brim.nn.reset_pressure()  # or the next step would not keep the logits
    peaks = {}
    for is_held in (False, True):
        model.zero_grad(set_to_none=True)
        held: list[Tensor] = []
        loss = loss_of(model, x, held if is_held else None)
        before = [each.detach().clone() for each in held]
        peaks[is_held] = peak_of(loss.backward)
        assert equal([each.detach() for each in held], before)
        assert equal(gradients(model), expected)
        del loss
    assert peaks[True] - peaks[False] > bytes_of_logits // 2


def memory_mapped_again(logits: Tensor) -> Tensor:
    """As another process would have it, which got the logits through torch.multiprocessing."""
    storage = logits.detach().untyped_storage()
    other = torch.UntypedStorage._new_shared_filename_cpu(*storage._share_filename_cpu_())
    return torch.empty(0).set_(other)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(
    "reads",
    [
        lambda logits: logits.detach(),
        lambda logits: logits.t()[5:7],
        lambda logits: logits.detach().numpy(),
        lambda logits: logits.untyped_storage(),
        lambda logits: torch.utils.dlpack.to_dlpack(logits.detach()),
        memory_mapped_again,
    ],
    ids=["detached", "view", "numpy", "storage", "dlpack", "shared"],
)
def test_logits_that_others_still_read_stay(reads: Callable[[Tensor], Any], drops: bool) -> None:
    model, x = language_model(), torch.randn(16, 8)
    with brim.saving("auto"):
        logits = model(x)
        before = reads(logits.detach().clone())
        after = reads(logits)
        loss = F.cross_entropy(logits, torch.arange(len(x)))
    del logits
    if drops:
        drop_all()
    loss.backward()
    if not isinstance(after, (Tensor, torch.UntypedStorage)) and not hasattr(after, "shape"):
        before, after = (torch.utils.dlpack.from_dlpack(each) for each in (before, after))
    assert bytes(memoryview_of(before)) == bytes(memoryview_of(after))


def memoryview_of(values: Any) -> Any:
    if isinstance(values, torch.UntypedStorage):
        values = torch.empty(0).set_(values)
    return memoryview(
        values.detach().contiguous().numpy() if isinstance(values, Tensor) else values
    )


@pytest.mark.parametrize("drops", [False, True])
def test_gradients_of_several_losses_at_once(drops: bool) -> None:
    """A batch of gradients has no place in the memory of one."""
    model, x = language_model(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    brim.restore(plain)
    found = []
    for net in (plain, model):
        with brim.saving("auto" if net is model else None):
            loss = F.cross_entropy(net(x), torch.arange(4), reduction="none")
        if drops:
            drop_all()
        parameters = list(net.parameters())
        found.append(torch.autograd.grad(loss, parameters, torch.eye(4)[:3], is_grads_batched=True))
    for mine, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, theirs)


def test_logits_stay_for_another_backward() -> None:
    model, x = language_model(), torch.randn(32, 8)
    loss = loss_of(model, x)
    once = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    again = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    last = torch.autograd.grad(loss, list(model.parameters()))
    assert equal(list(once), list(again))
    assert equal(list(once), list(last))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.slow
def test_logits_after_a_backward_that_ran_out_of_memory() -> None:
    """The logits may have been written to: they are made again."""
    model, x = language_model(), torch.randn(32, 8)
    loss = loss_of(model, x)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    with brim.testing.inject_oom(at=1 << 40) as counting:
        loss_of(model, x).backward()
    for at in range(1, counting.allocations + 1):
        loss = loss_of(model, x)
        with brim.testing.inject_oom(at=at, count=50):
            try:
                torch.autograd.grad(loss, list(model.parameters()))
                continue
            except torch.OutOfMemoryError:
                pass
        try:
            found = torch.autograd.grad(loss, list(model.parameters()))
        except RuntimeError:  # parts of the graph are gone, as after any failure
            continue
        assert equal(list(found), list(expected))


# -- Casts of weights ------------------------------------------------------------------------------


def under_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float().square().mean()


def test_casts_of_weights_may_go() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    ours, x = copy.deepcopy(plain), torch.randn(4, 64)
    brim.convert(ours, recompute="auto")
    under_autocast(plain, x).backward()
    for drops in (False, True):
        ours.zero_grad(set_to_none=True)
        loss = under_autocast(ours, x)
        assert brim.nn.pressure().value_bytes >= 2 * 2 * 64 * 64
        if drops:
            drop_all()
            assert brim.nn.pressure().dropped_bytes >= 2 * 2 * 64 * 64
        loss.backward()
        assert equal(gradients(ours), gradients(plain))


@pytest.mark.parametrize("drops", [False, True])
def test_a_weight_that_changed_after_its_cast(drops: bool) -> None:
    """torch holds the cast, and so is the gradient without pressure; with it an error."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    ours, x = copy.deepcopy(plain), torch.randn(4, 64)
    brim.convert(ours, recompute="auto")
    losses = [under_autocast(net, x) for net in (plain, ours)]
    if drops:
        drop_all()
    with torch.no_grad():
        for net in (plain, ours):
            net[1].weight.mul_(2)
    losses[0].backward()
    if drops:
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            losses[1].backward()
    else:
        losses[1].backward()
        assert equal(gradients(ours), gradients(plain))


@pytest.mark.parametrize("drops", [False, True])
def test_second_derivatives_under_autocast(drops: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    ours, x = copy.deepcopy(plain), torch.randn(4, 64)
    brim.convert(ours, recompute="auto")
    found = []
    for net in (plain, ours):
        leaf = x.clone().requires_grad_()
        loss = under_autocast(net, leaf)
        if net is ours and drops:
            drop_all()
        (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
        first.square().sum().backward()
        found.append(gradients(net))
        del loss, first
    for mine, theirs in zip(found[1], found[0], strict=True):
        assert torch.equal(mine, theirs)
