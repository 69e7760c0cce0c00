"""What a module is, the same in every process: its layers, their configuration, their shapes."""

from __future__ import annotations

import hashlib
import weakref

import torch

_known: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()


def structure(module: torch.nn.Module) -> int:
    """A hash of a module's classes, `extra_repr`s and parameters, worked out once per module."""
    known = _known.get(module)
    if known is None:
        words = [
            f"{name}:{type(layer).__module__}.{type(layer).__qualname__}({_configuration(layer)})"
            for name, layer in module.named_modules()
        ]
        for name, tensor in module.named_parameters():
            words.append(f"{name}:{tensor.dtype}{list(tensor.shape)}")
        text = "\0".join(words).encode(errors="replace")
        digest = hashlib.blake2b(text, digest_size=8).digest()
        known = _known[module] = int.from_bytes(digest, "little", signed=True)
    return known


def _configuration(layer: torch.nn.Module) -> str:
    try:
        return layer.extra_repr()
    except Exception:  # it is for people, and a layer half made may not have what it prints
        return ""
