"""One rank of FSDP2 and DDP with a Llama; test_nn_frameworks.py starts two of them.

Run as `fsdp_job.py FOLDER`: trains the model as it is, and converted before and after it is
sharded, with products that run again, also for values that are dropped, and writes losses and
parameters to FOLDER/RANK.pt. Then the same with DDP, with and without a budget.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import brim
from nn_families import TEXT, tokens

STEPS = 3


def drop_all() -> None:
    """As if memory were exhausted now."""
    try:
        with brim.budget(1, "cpu"):
            torch.empty(1)
    except torch.OutOfMemoryError:
        pass
    assert brim.nn.pressure().dropped > 0


def trained(
    convert: str, mesh: DeviceMesh, policy: MixedPrecisionPolicy
) -> tuple[list[float], int, list[Any]]:
    """The losses, what a forward kept, and this rank's part of the parameters."""
    torch.manual_seed(0)
    net: Any = TEXT["llama"][0]().train()
    if convert in ("before", "auto", "kept"):
        brim.convert(net, recompute="cheap" if convert == "before" else "auto")
    for layer in net.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    if convert == "after":
        brim.convert(net, recompute="products")
    update = torch.optim.AdamW(net.parameters(), lr=1e-3)
    losses = []
    loss: Any = None
    for step in range(STEPS):
        ids = tokens(step * dist.get_world_size() + dist.get_rank())
        loss = net(input_ids=ids, labels=ids, use_cache=False).loss
        losses.append(loss.item())
        if convert == "auto":
            drop_all()
        update.zero_grad()
        loss.backward()
        update.step()
    parameters = [each.detach().to_local().clone() for each in net.parameters()]
    loss = net(input_ids=ids, labels=ids, use_cache=False).loss
    dist.barrier()
    # What ends with the graph, since gloo's thread frees gathered buffers at any time.
    with brim.PeakMeter("cpu") as meter:
        del loss
    return losses, -meter.left, parameters


def replicated(room: int | None) -> tuple[list[float], int, list[Any]]:
    """With DDP, a scaler, and two batches for each update, with so many bytes for a step.

    The losses, the peak of a step and the parameters.
    """
    torch.manual_seed(0)
    net: Any = TEXT["llama"][0]().train()
    brim.convert(net, recompute="auto")
    parallel = DistributedDataParallel(net)
    update = torch.optim.SGD(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    losses = []
    limit = None if room is None else brim.memory_stats("cpu").allocated + room
    with contextlib.nullcontext() if limit is None else brim.budget(limit, "cpu"):
        for step in range(STEPS):
            with brim.PeakMeter("cpu") as meter:
                for part in range(2):
                    ids = tokens(4 * step + 2 * part + dist.get_rank())
                    with parallel.no_sync() if part == 0 else contextlib.nullcontext():
                        loss = parallel(input_ids=ids, labels=ids, use_cache=False).loss
                        losses.append(loss.item())
                        scaler.scale(loss).backward()
                scaler.step(update)
                scaler.update()
                update.zero_grad()
    return losses, meter.peak, [each.detach().clone() for each in net.parameters()]


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    brim.install_cpu_allocator()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results = {
        (kind, convert): trained(convert, mesh, policy)
        for kind, policy in {
            "float32": MixedPrecisionPolicy(),
            "mixed": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        }.items()
        for convert in ("never", "before", "after", "kept", "auto")
    }
    brim.nn.reset_pressure()
    losses, peak, parameters = replicated(None)
    results["ddp", "kept"] = losses, brim.nn.pressure().dropped, parameters
    losses, _, parameters = replicated(int(0.85 * peak))
    results["ddp", "auto"] = losses, brim.nn.pressure().dropped, parameters
    torch.save(results, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
