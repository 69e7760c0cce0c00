"""The layers in graphs: used twice, by several threads, by several processes."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import brim

from .nn_cases import Case, pair
from .nn_steps import ALL, IMAGES, same, small_net, step
from .patience import FOR_EVER

# -- Graphs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ALL)
def test_backward_twice(case: Case) -> None:
    """Fails as torch's own does, and works with retain_graph."""
    layer, _ = pair(case, torch.float32)
    x = case.input(torch.float32).requires_grad_()
    torch.manual_seed(0)
    loss = layer(x * 1).sum()
    wanted = [x, *layer.parameters()]
    first = torch.autograd.grad(loss, wanted, retain_graph=True)
    second = torch.autograd.grad(loss, wanted)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    if case.layer.startswith(("Avg", "Adaptive")):
        return  # nothing was kept, so nothing is missing
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, wanted)


def test_one_layer_used_twice_in_a_graph() -> None:
    for case in (Case("Linear", (5, 4), (4, 4)), Case("Conv2d", (2, 3, 6, 6), (3, 3, 3, 1, 1))):
        ours, torchs = pair(case, torch.float32)
        x = case.input(torch.float32)
        mine = step(ours, x, lambda x: ours(F.relu(ours(x))) + ours(x))  # noqa: B023
        assert same(mine, step(torchs, x, lambda x: torchs(F.relu(torchs(x))) + torchs(x)))  # noqa: B023


def test_an_output_used_by_several_consumers() -> None:
    results = []
    for of in (brim.nn, nn):
        torch.manual_seed(0)
        first, second, relu = of.Conv2d(3, 3, 3), of.Conv2d(3, 3, 3), of.ReLU()
        x = torch.linspace(-1, 1, 147).reshape(1, 3, 7, 7).requires_grad_()
        y = relu(x)
        out = (first(y) * second(y)).sum() + y.square().sum()
        parameters = [*first.parameters(), *second.parameters()]
        results.append([out.detach(), *torch.autograd.grad(out, [x, *parameters])])
    assert same(*results)


def test_some_outputs_without_a_gradient() -> None:
    pool = brim.nn.MaxPool2d(2, return_indices=True)
    x = torch.randn(1, 2, 4, 4, requires_grad=True)
    y, indices = pool(x)
    assert not indices.requires_grad
    assert y.requires_grad
    unpooled = nn.MaxUnpool2d(2)(y, indices)
    unpooled.sum().backward()
    assert int((x.grad != 0).sum()) == 8


def test_gradient_accumulation_over_batches() -> None:
    ours, torchs = small_net(), small_net(nn)
    for net in (ours, torchs):
        torch.manual_seed(0)
        for n in range(4):
            x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(n))
            (net(x).square().mean() / 4).backward()
    assert same([p.grad for p in ours.parameters()], [p.grad for p in torchs.parameters()])


def test_freezing_between_forward_and_backward() -> None:
    """What needs none at backward gets none, as in torch; the rest is as if nothing were."""
    results = []
    for of in (brim.nn, nn):
        torch.manual_seed(0)
        layer = of.Linear(3, 2)
        x = torch.ones(4, 3, requires_grad=True)
        y = layer(x)
        layer.requires_grad_(False)
        y.sum().backward()
        assert layer.weight.grad is None
        x_grad = x.grad.clone()
        layer.requires_grad_(True)
        layer(x).sum().backward()
        results.append([x_grad, x.grad, layer.weight.grad, layer.bias.grad])
    assert same(*results)


def test_two_threads_at_once() -> None:
    ours = small_net().eval()
    expected = step(copy.deepcopy(ours), IMAGES)
    x = IMAGES
    failures: list[str] = []

    def work() -> None:
        net = copy.deepcopy(ours)
        for _ in range(20):
            if not same(step(net, x), expected):
                failures.append("differs")

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_two_threads_share_one_graph() -> None:
    net = small_net().eval()
    x = IMAGES.clone().requires_grad_()
    loss = net(x).sum()
    expected = torch.autograd.grad(loss, x, retain_graph=True)[0]
    found: list[torch.Tensor] = []

    def work() -> None:
        found.append(torch.autograd.grad(loss, x, retain_graph=True)[0])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(each, expected) for each in found)


# -- Several processes ----------------------------------------------------------------------------

TRAIN = """
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import brim

rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)


def train(convert):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2),
        nn.GELU(), nn.Flatten(), nn.Linear(16, 2),
    )
    if convert:
        assert len(brim.convert(net).replaced) == 7
    net[0].requires_grad_(False)
    net = DistributedDataParallel(net)
    for step in range(3):
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        net.zero_grad()
        net(x).square().mean().backward()
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    return [parameter.detach().clone() for parameter in net.parameters()]


ours, torchs = train(True), train(False)
assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))
print([parameter.double().sum().item().hex() for parameter in ours], flush=True)
dist.barrier()
os._exit(0)  # gloo's threads can outlive the interpreter, which then ends by std::terminate
"""


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_distributed_data_parallel(world: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(world), tmp_path / "store"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    printed = []
    for process in processes:
        out, errors = process.communicate(timeout=FOR_EVER)
        assert process.returncode == 0, errors
        printed.append(out)
    assert len(set(printed)) == 1, "the ranks agree"
