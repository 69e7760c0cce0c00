"""Pictures of what brim measures and predicts, drawn by matplotlib (`pip install 'brim[plot]'`).

Each function draws into an Axes, writes a file, or returns a new Figure. None of them uses pyplot,
so nothing pops up, and a program's own figures stay as they are. The `plot` methods of reports,
models, audits, estimates and records call these.

Example:
    >>> import brim, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    >>> brim.audit(model, torch.ones(4, 8)).plot("kept.png")  # doctest: +SKIP
"""

from __future__ import annotations

from brim.plot._attempts import attempts
from brim.plot._audit import audit
from brim.plot._canvas import check_available
from brim.plot._estimate import estimate
from brim.plot._explanation_page import explanation_page as explanation_page
from brim.plot._memory_model import memory_model
from brim.plot._plan import plan
from brim.plot._pressure import pressure
from brim.plot.pages import audit_page as audit_page
from brim.plot.pages import estimate_page as estimate_page

__all__ = ["attempts", "audit", "check_available", "estimate", "memory_model", "plan", "pressure"]
