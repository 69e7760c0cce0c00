"""Classes that `convert` makes: a module's own class with another forward.

A made class derives from the module's own and has its name, so that isinstance, state_dict, hooks
and what other libraries look up by the name of a class stay as they are. It remembers that class,
and copies and pickles are made of it again.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

import torch

__all__ = [
    "Recipe",
    "code_of",
    "derived",
    "is_made",
    "original_of",
    "recipe_of",
    "refuse_script",
]

Kind: TypeAlias = "type[torch.nn.Module]"
Forward: TypeAlias = "Callable[..., Any]"
Options: TypeAlias = "tuple[Any, ...]"  # hashable; pickles contain them


class Recipe(NamedTuple):
    """How a class was made; part of the pickles of its instances.

    Attributes:
        maker: a key of `MAKERS`.
        options: the rest of the arguments of that function.
    """

    maker: str
    options: Options = ()


MAKERS: dict[str, Callable[..., tuple[tuple[Kind, ...], Mapping[str, Any]]]] = {}
"""Functions of a class and options that give the bases and the members of the class to make."""


def derived(kind: Kind, recipe: Recipe) -> Kind:
    """The class made of `kind` by a recipe, always the same one.

    Raises:
        TypeError: if no class can be derived from it.
    """
    for known in kind.__subclasses__():  # a table of ours would keep both alive
        if known.__dict__.get("_brim_recipe") == recipe:
            return known
    bases, members = MAKERS[recipe.maker](kind, *recipe.options)

    def reduce(self: Any, protocol: Any) -> Any:
        usual = super(made, self).__reduce_ex__(protocol)
        if type(self) is not made:  # another tool has derived its own from ours
            return usual
        call, args, *rest = usual
        args = tuple(kind if arg is type(self) else arg for arg in args)
        return (_again, (call, args, recipe, _fingerprint(kind)), *rest)

    def show(self: Any) -> str:
        text: str = super(made, self).__repr__()
        name = self._get_name()  # which libraries look up, so it stays
        return f"{name}<brim>{text.removeprefix(name)}" if text.startswith(name) else text

    shown = ("__module__", "__qualname__", "__doc__")
    made: Any = type(
        kind.__name__,
        bases,
        {name: getattr(kind, name) for name in shown}
        | {"_brim_original": kind, "_brim_recipe": recipe}
        | {"__reduce_ex__": reduce, "__repr__": show, "__prepare_scriptable__": refuse_script}
        | dict(members),
    )
    return made  # type: ignore[no-any-return]


def refuse_script(module: torch.nn.Module) -> Any:
    """What torch.jit.script calls first for a module of brim."""
    raise RuntimeError(
        f"torch.jit.script cannot compile this {type(module).__name__} of brim: call "
        "brim.restore(model) before, or use torch.jit.trace"
    )


def original_of(kind: Kind) -> Kind | None:
    """The class that a made one derives from; None for all others."""
    made: Kind | None = kind.__dict__.get("_brim_original")
    return made


def is_made(kind: Kind) -> bool:
    """Whether a class is a made one or derives from one, as the classes that FSDP makes."""
    return hasattr(kind, "_brim_original")


def recipe_of(kind: Kind) -> Recipe | None:
    """The recipe of a made class; None for all others."""
    recipe: Recipe | None = kind.__dict__.get("_brim_recipe")
    return recipe


def _again(call: Callable[..., Any], args: tuple[Any, ...], recipe: Recipe, code: str) -> Any:
    """For copies and pickles: an instance of the module's own class, changed as it was.

    Left as it is if its library has changed since.
    """
    instance = call(*args)
    kind = type(instance)
    if recipe.maker in MAKERS and _fingerprint(kind) == code:
        instance.__class__ = derived(kind, recipe)
    return instance


def _fingerprint(kind: Kind) -> str:
    """Identifies the code of a class's forward."""
    code = code_of(kind.forward)
    parts = () if code is None else (code.co_code, code.co_names, code.co_varnames)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def code_of(function: Any) -> CodeType | None:
    """The code of a function behind its decorators; None if it has none."""
    return getattr(inspect.unwrap(function), "__code__", None)
