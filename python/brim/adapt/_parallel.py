"""Models that are spread over ranks, which wait for each other in forward or backward."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from brim._state.undoing import Undoing, set_attribute


def parallel_modules(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Those of them, or inside of them, whose ranks wait for each other."""
    inner = {part: None for module in modules for part in module.modules()}
    return [part for part in inner if _ranks_of(part) > 1]


def sharded(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether parameters are shards of which other ranks have the rest."""
    return any(not isinstance(m, DistributedDataParallel) for m in parallel_modules(modules))


def refuse_waiting(parallel: list[torch.nn.Module], ranks: bool, between: bool) -> None:
    """Raise where ranks would wait for each other for ever.

    Args:
        parallel: from `parallel_modules`.
        ranks: whether the ranks agree on the parts.
        between: whether the gradients are reduced after the parts.
    """
    for module in parallel:
        is_ddp = isinstance(module, DistributedDataParallel)
        waits = (
            f"model is or has {'a DistributedDataParallel' if is_ddp else 'sharded layers (FSDP)'},"
            " whose ranks wait for each other in every part"
        )
        if not ranks:
            raise ValueError(f"{waits}: pass ranks=True")
        if between and not is_ddp:
            raise ValueError(
                f"{waits}, and was not sharded yet when this Microbatches was made: make it "
                'afterwards, or pass collectives="inside"'
            )
        if is_ddp and module.static_graph:
            raise ValueError(
                "model is or has a DistributedDataParallel with static_graph=True, which torch "
                "cannot run in parts (its no_sync fails too): make it without static_graph"
            )


def without_collectives(undo: Undoing, model: torch.nn.Module | None, is_first: bool) -> None:
    """Until the block ends, no rank waits in a part for one that fails.

    Args:
        undo: the block.
        model: has the `DistributedDataParallel` modules that are not to reduce gradients.
        is_first: watch all layers; later calls, in which it would take time, are alike.
    """
    if model is None:
        return
    parallel = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    for module in parallel:
        module.require_forward_param_sync = False  # else its first forward waits
        set_attribute(undo, module, "require_backward_grad_sync", False)
    for layer in model.modules() if is_first else [model]:
        hook = _refuse_other_parallel(parallel)
        undo.callback(functools.partial(_remove, layer, hook))
        layer.register_forward_pre_hook(hook)


def refuse_other_parameters(leaves: list[torch.Tensor]) -> None:
    """Raise where parameters have gradients that are not reduced over the ranks."""
    for leaf in leaves:
        if isinstance(leaf, torch.nn.Parameter):
            raise ValueError(
                f"loss_fn uses a parameter of shape {list(leaf.shape)} that model= does not "
                "have: its gradient would differ between the ranks. Pass a model that has it, "
                "as torch.nn.ModuleList([first, second])"
            )


def has_other_ranks() -> bool:
    """Whether this process is one of several."""
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def _remove(layer: torch.nn.Module, hook: Callable[..., None]) -> None:
    for key, each in list(layer._forward_pre_hooks.items()):
        if each is hook:
            del layer._forward_pre_hooks[key]


def _refuse_other_parallel(known: list[DistributedDataParallel]) -> Callable[..., None]:
    """A hook against a DistributedDataParallel that is around `model=` or a layer of it."""

    def hook(layer: torch.nn.Module, _: object) -> None:
        if torch.compiler.is_compiling():
            return
        active = DistributedDataParallel._active_ddp_module
        if active is not None and all(active is not each for each in known):
            raise ValueError(
                "loss_fn calls a DistributedDataParallel around model= or a layer of it "
                f"({type(layer).__name__}), so that both would reduce the gradients: pass the "
                "DistributedDataParallel as model=, or as the layer of model= that it is around"
            )

    return hook


def _ranks_of(module: torch.nn.Module) -> int:
    """How many ranks a module waits for itself, without those inside of it."""
    if isinstance(module, DistributedDataParallel):
        return int(module.process_group.size())
    # Classes of modules that nobody has imported have no instances.
    older: Any = sys.modules.get("torch.distributed.fsdp")
    if older is not None and isinstance(module, older.FullyShardedDataParallel):
        return int(module.process_group.size())
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    if tensors is None:
        return 1
    return max(
        (
            int(each.device_mesh.size())
            for each in module._parameters.values()
            if isinstance(each, tensors.DTensor)
        ),
        default=1,
    )
