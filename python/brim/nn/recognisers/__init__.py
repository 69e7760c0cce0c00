"""The table of modules that `convert` recognises by what they compute.

A recogniser looks at a module's attributes and at the names in its code, so it needs no library to
be installed and finds hand-written modules too. Before a class is changed for the first time, its
results and gradients are compared with brim's on small inputs: a library that changed is left as it
is. CONTRIBUTING.md says how to add one.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from brim.nn._compiled import in_compiled_code
from brim.nn._derived import MAKERS, Kind, Options, Recipe, derived, original_of
from brim.nn.recognisers._recogniser import Recogniser, undisturbed
from brim.nn.recognisers.activation import activation
from brim.nn.recognisers.conv1d import conv1d
from brim.nn.recognisers.gated_mlp import gated_mlp
from brim.nn.recognisers.norm import norm
from brim.nn.recognisers.rms_norm import rms_norm

__all__ = ["Recognised", "recognise"]

RECOGNISERS: Mapping[str, Recogniser] = {
    "activation": activation,
    "conv1d": conv1d,
    "gated_mlp": gated_mlp,
    "norm": norm,
    "rms_norm": rms_norm,
}


class Recognised(NamedTuple):
    """What a module was recognised as.

    Attributes:
        what: its name in reports.
        kind: the class that it gets; None if its results differ from what brim computes.
    """

    what: str
    kind: Kind | None


def recognise(module: torch.nn.Module) -> Recognised | None:
    """What a module computes, if it is in the table.

    Example:
        >>> class Swish(torch.nn.Module):
        ...     def forward(self, x): return torch.nn.functional.silu(x)
        >>> recognise(Swish()).what
        'silu'
        >>> recognise(torch.nn.Sequential())
    """
    unlike = None
    if type(module).__module__.startswith("torch.nn."):  # brim has a layer for it, or saves nothing
        return None
    for name, recogniser in RECOGNISERS.items():
        for options in recogniser.candidates(module):
            what = recogniser.what.format(*options)
            if _agrees(module, name, options):
                return Recognised(what, derived(type(module), Recipe(name, options)))
            if not recogniser.by_results:
                unlike = Recognised(what, None)
    return unlike


_verdicts: WeakKeyDictionary[Kind, dict[Any, bool]] = WeakKeyDictionary()


def _agrees(module: torch.nn.Module, name: str, options: Options) -> bool:
    """Compare once for each class and the attributes on which its results may depend."""
    known = _verdicts.setdefault(type(module), {})
    key = (name, options, _settings(module))
    if key not in known:
        recogniser = RECOGNISERS[name]
        ours = recogniser.forward(type(module), options)
        known[key] = undisturbed(lambda: recogniser.agrees(module, ours, options))
    return known[key]


def _settings(module: torch.nn.Module) -> frozenset[tuple[str, Any]]:
    """The attributes of its own: numbers, functions, flags."""
    settings = []
    for name, value in vars(module).items():
        if name not in _OF_ALL_MODULES:
            setting = getattr(value, "__func__", value)  # of a bound method
            settings.append((name, setting if isinstance(setting, Hashable) else type(setting)))
    return frozenset(settings)


_OF_ALL_MODULES = frozenset(vars(torch.nn.Module()))


def _members(
    recogniser: Recogniser, kind: Kind, *options: Any
) -> tuple[tuple[Kind, ...], Mapping[str, Any]]:
    work, run = kind.forward, recogniser.forward(kind, options)

    @functools.wraps(work)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # torch.compile decides by itself what is kept.
        if in_compiled_code(self._brim_recompute) or len(args) + len(kwargs) != 1:
            return work(self, *args, **kwargs)
        return run(self, *args, *kwargs.values())

    def set_attribute(self: Any, name: str, value: Any) -> None:
        """After a change of what its results may depend on, the module is compared again."""
        is_setting = name in vars(self) and name not in _OF_ALL_MODULES
        kind.__setattr__(self, name, value)
        if is_setting and original_of(type(self)) is kind:
            self.__class__ = kind
            known = recognise(self)
            if known is not None and known.kind is not None:
                self.__class__ = known.kind

    return (kind,), {
        "forward": forward,
        "__setattr__": set_attribute,
        "_brim_recompute": None,
    }


for _name, _entry in RECOGNISERS.items():
    MAKERS[_name] = functools.partial(_members, _entry)
