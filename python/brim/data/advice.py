"""What samplers warn of: samples that are left out, and use that does not do what is meant."""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from brim._warn import warn


def left_out_message(
    indices: torch.Tensor | Sequence[int], samples: int, reason: str, what: str = "samples"
) -> str:
    """Count the samples that are in no batch, and name the first few."""
    first = ", ".join(str(int(index)) for index in indices[:5])
    more = ", …" if len(indices) > 5 else ""
    return f"{len(indices)} of {samples} {what} are left out, {reason}: {first}{more}"


def tell_of_misuse(sampler: Any, caller: FrameType) -> None:
    """Warn when an iteration begins: as `sampler=` of a loader, or in an epoch that was before."""
    kind = type(sampler).__name__
    loader = caller.f_back.f_globals.get("__name__") if caller.f_back else ""
    # Of sampler= a DataLoader makes one of torch's BatchSamplers.
    if caller.f_code is BatchSampler.__iter__.__code__ and loader == DataLoader.__module__:
        warn(
            f"a DataLoader got a {kind} as sampler=, and takes each batch for one sample: pass it "
            "as batch_sampler="
        )
    if not sampler.shuffle or sampler._epoch_was_set:
        return
    again = f"{kind} {{}}begins epoch {sampler.epoch} again, with the same batches: "
    if sampler._counts_epochs and _begins_again(sampler._of_next()):
        sampler._epoch_was_set = True  # as far as it matters here
        warn(
            again.format("") + "on several ranks an epoch counts when its last batch has reached "
            "a loop. Call set_epoch(epoch) before each epoch if loops end earlier"
        )
    seeded = sampler._seed is not None and not sampler._seed_is_default
    latest = sampler._latest
    if seeded and latest is not None and latest.state_dict(None)["finished"]:
        sampler._epoch_was_set = True
        warn(
            again.format("has a seed and ")
            + "call set_epoch(epoch) before each epoch, or once if you mean it"
        )


def _begins_again(opened: list[Any]) -> bool:
    """Whether loops over the coming epoch have ended early.

    Not if it was one look: at one batch, or beside a loop that still runs.
    """
    begun = [each for each in opened if each.used() > 0]
    return len(begun) > 1 or any(each.used() > 1 and not each.run.held() for each in begun)
