"""What `brim.explain` tells."""

from __future__ import annotations

from typing import Any

import torch

from brim import _C
from brim._estimate import Estimate
from brim._explain._remedies import Remedy
from brim._plots import draw
from brim._table import Part, Table, text_of


class Explanation:
    """Why memory ran out, who holds it, and what would help. All figures are bytes.

    Attributes:
        cause: "real need", "memory that grows", "fragmentation", "other processes",
            "library workspace" or "size limit"; None if nothing ran out.
        reason: the cause in one or two sentences.
        device: whose memory it is.
        requested: what was asked for in vain; 0 if that is not known.
        in_use: what tensors of this process held then.
        limit: what the device has, within open budgets.
        others: what other processes hold, and this one outside of tensors.
        grown: what earlier calls have left, if memory grows.
        held: the holders, largest first: `kind`, `where`, `bytes`, `count` and `grows`.
        need: what the call needs in all, where it could be replayed; else None.
        remedies: what would help, best first, each a `Remedy`; empty where nothing was replayed.
        estimate: the replayed call as an `Estimate`, with places and kinds; else None.

    Example:
        >>> import brim, torch
        >>> def work(n):
        ...     return torch.zeros(n, 1024).exp().sum()
        >>> told = brim.explain(work, 64, device="cpu", capacity="1MiB")
        >>> told.cause, told.need
        (None, 524288)
    """

    def __init__(
        self,
        device: torch.device,
        shortage: _C.Shortage | None,
        held: list[_C.Holder],
        estimate: Estimate | None = None,
        need: int | None = None,
        remedies: list[Remedy] | None = None,
        limit: int = 0,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.device = device
        self.cause: str | None = None if shortage is None else shortage.cause
        self.reason = "" if shortage is None else shortage.reason
        self.requested = 0 if shortage is None else shortage.requested
        self.in_use = 0 if shortage is None else shortage.in_use
        self.limit = limit if shortage is None else shortage.limit
        self.others = 0 if shortage is None else shortage.others
        self.grown = 0 if shortage is None else shortage.grown
        self.held = held
        self.estimate = estimate
        self.need = need
        self.remedies = remedies or []
        self.notes = notes

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes of the holders by kind, largest first."""
        sums: dict[str, int] = {}
        for one in self.held:
            kind = one.kind.name.replace("_", " ")
            sums[kind] = sums.get(kind, 0) + one.bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain Python, for JSON."""
        names = "cause reason requested in_use limit others grown need by_kind"
        return {
            "device": str(self.device),
            **{name: getattr(self, name) for name in names.split()},
            "held": [
                {
                    "kind": one.kind.name,
                    "where": one.where,
                    "bytes": one.bytes,
                    "count": one.count,
                    "grows": one.grows,
                }
                for one in self.held
            ],
            "remedies": [one._asdict() for one in self.remedies],
            "estimate": self.estimate and self.estimate.to_dict(),
            "notes": list(self.notes),
        }

    def to_html(self) -> str:
        """A page for the browser: the cause, a bar of what is held, remedies, and memory over time.

        Example:
            >>> import brim, torch
            >>> told = brim.explain(torch.exp, torch.ones(8), device="cpu", capacity="1GiB")
            >>> told.to_html().startswith("<!doctype html>")
            True
        """
        page: str = draw("explanation_page", self)
        return page

    def __repr__(self) -> str:
        """Tables for people."""
        return text_of(self._parts())

    def _head(self) -> list[Part]:
        size = _C.format_bytes
        lines: list[Part] = []
        if self.cause is not None:
            lines += [f"cause: {self.cause}", self.reason]
            if self.requested:
                lines.append(
                    f"asked for {size(self.requested)} with {size(self.in_use)} in use, "
                    f"of {size(self.limit)} on {self.device}"
                )
        if self.need is not None:
            fits = "fits" if self.need <= self.limit else "does not fit"
            lines.append(
                f"two calls in a row need {size(self.need)}: that {fits} {size(self.limit)}"
            )
        return lines

    def _parts(self) -> list[Part]:
        size = _C.format_bytes
        lines = self._head()
        if self.held:
            lines += ["", _C.holders_text(self.held)]
        if self.estimate is not None and self.estimate.largest:
            rows = [
                [one.place, one.kind.name.replace("_", " "), size(one.bytes)]
                for one in self.estimate.largest
            ]
            lines += ["", Table(["largest at the replayed peak", "kind", "bytes"], rows, left=2)]
        if self.remedies:
            lines += ["", Table(*self._remedies(), left=2)]
        if self.notes:
            lines += ["", *(f"- {note}" for note in self.notes)]
        return lines

    def _remedies(self) -> tuple[list[str], list[list[str]]]:
        """The head and the rows of a table."""
        size = _C.format_bytes
        rows = [
            [
                one.name,
                one.code,
                size(one.peak),
                ("-" if one.saves >= 0 else "+") + size(abs(one.saves)),
                "yes" if one.fits else "no",
                "" if one.extra_work is None else f"{one.extra_work:+.0%}",
                one.note,
            ]
            for one in self.remedies
        ]
        return ["what would help", "how", "needs", "saves", "fits", "work", "note"], rows
