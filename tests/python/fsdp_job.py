"""One rank of FSDP2 with a Llama; test_nn_frameworks.py starts two and looks at what they write.

Run as `fsdp_job.py FOLDER`: trains the model as it is, and converted before and after it is
sharded, with products that run again, also for values that are dropped, and writes losses and
parameters to FOLDER/RANK.pt.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

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
    if convert in ("before", "auto"):
        brim.convert(net, recompute="auto" if convert == "auto" else "cheap")
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
        for convert in ("never", "before", "after", "auto")
    }
    torch.save(results, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
