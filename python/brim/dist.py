"""Agreement among the ranks of a torch.distributed job: what `ranks=` of the adaptive calls means.

The protocol and its messages are in the C++ core; here the process group is found. See
docs/explanation/ranks.md.
"""

from __future__ import annotations

import atexit
import weakref
from datetime import timedelta
from itertools import starmap
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from brim._arguments import flag, shown
from brim._C import Agreement, AgreementOptions, GroupChannel, GroupSum, RankError, Undoing

__all__ = ["RankError", "RankSetting"]

# The channels in use, by group. They end before the interpreter does: gloo has threads.
_channels: weakref.WeakKeyDictionary[Any, GroupChannel] = weakref.WeakKeyDictionary()


@atexit.register
def _close_channels() -> None:
    for channel in _channels.values():
        channel.close()


def _timeout(group: Any) -> timedelta:
    """How long the group's own collectives wait for a slow rank."""
    for kind in ("cpu", "cuda", "xpu"):
        try:
            timeout = group._get_backend(torch.device(kind)).options._timeout
        except (RuntimeError, AttributeError):  # the group has no backend for such a device
            continue
        if isinstance(timeout, timedelta):
            return timeout
    return timedelta(minutes=30)  # torch.distributed's default


def _channel(group: Any) -> GroupChannel:
    """The side channel of a group, made when it is first needed: on all of its ranks at once."""
    if group not in _channels:
        store = PrefixStore("brim", group.get_group_store())
        made: list[Any] = []

        def keep() -> None:
            if made and group not in _channels:
                _channels[group] = GroupChannel(made[0], store, group)

        # Ctrl-C while it waits for the other ranks must not lose what these are connected to then:
        # it is raised after a call, and this one puts the result where it is found.
        options = (PrefixStore("gloo", store), group.rank(), group.size(), _timeout(group))
        with Undoing() as undo:
            undo.callback(keep)
            made.extend(starmap(ProcessGroupGloo, [options]))
    return _channels[group]


def _group(ranks: Any) -> Any:
    """The process group that `ranks` names, or None where this process is the only one."""
    if ranks is True:
        if not dist.is_available() or not dist.is_initialized():
            return None
        ranks = dist.group.WORLD
    return None if ranks.size() == 1 else ranks


class RankSetting:
    """What the options about ranks of one function ask for; `brim.Options` describes them.

    Called ahead of every call, because a function is often decorated before the process group is
    there. By its name the ranks tell that all of them call the same function.

    Example:
        >>> agreement = RankSetting(True, "work", sync="settled")
        >>> agreement() is None  # there is no process group
        True
    """

    def __init__(
        self,
        ranks: Any,
        function: str = "",
        *,
        per_rank: bool = False,
        sync: Literal["always", "settled"] = "always",
        collectives: Literal["between", "inside"] = "between",
    ) -> None:
        """Only checks; the group may not be there yet."""
        if ranks is not True and not isinstance(ranks, dist.ProcessGroup):
            raise TypeError(f"ranks must be a bool or a process group, got {shown(ranks)}")
        self._ranks = ranks
        self._function = function
        self._options = AgreementOptions(flag("per_rank", per_rank), sync, collectives)
        self._group: Any = None
        self._agreement: Agreement | None = None
        self._sum: GroupSum | None = None

    def __call__(self) -> Agreement | None:
        """The agreement with the other ranks; None where there are none."""
        group = _group(self._ranks)
        if group is not self._group:
            agreement = total = None
            if group is not None:
                agreement = Agreement(_channel(group), self._options, self._function)
                total = GroupSum(group)
            self._agreement, self._sum, self._group = agreement, total, group
        return self._agreement

    @property
    def sum(self) -> GroupSum:
        """What sums over the group of the last call."""
        assert self._sum is not None
        return self._sum

    @property
    def group(self) -> Any:
        """The process group as of the last call; None where this process is the only one."""
        return self._group
