"""`pytest --brim-oom=N`: allocations fail while tests run, which must then end cleanly.

A package of its own, not a module of `brim`: pytest imports the plugins of everything that is
installed, and `import brim` imports torch. Both are imported here once the option is given.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Generator
from typing import Any

import pytest
from _pytest.runner import runtestprotocol  # as all plugins that run a test more than once

_FOR_GOOD = 2**63 - 1
_FAILURES = "brim_oom_failures"  # an attribute of reports, which xdist hands on


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `--help`, under "brim"."""
    group = parser.getgroup("brim", "brim: out of memory on demand")
    group.addoption(
        "--brim-oom",
        metavar="N",
        help="Allocation N of each test fails, counted from 1. The test passes if it passes all "
        "the same or ends with torch.OutOfMemoryError. `all`: run each test again and again, with "
        "N = 1, 2, 3, ... until it makes fewer than N allocations.",
    )
    group.addoption(
        "--brim-oom-for",
        metavar="COUNT",
        help="How many allocations fail in a row, 1 by default; `ever` for all from N on.",
    )
    group.addoption(
        "--brim-oom-device", metavar="DEVICE", help="Whose allocations: cpu (default) or cuda."
    )
    group.addoption(
        "--brim-oom-rank",
        metavar="RANK",
        help="Only in the process of this rank (torch.distributed's, else the variable RANK).",
    )
    group.addoption(
        "--brim-oom-leaks",
        action="store_true",
        help="A test also fails if tensors hold more bytes after it than after a run of it in "
        "which nothing failed.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Check the options, and begin if there are any."""
    given = {
        name: config.getoption(f"brim_oom{name}")
        for name in ("", "_for", "_device", "_rank", "_leaks")
    }
    if given[""] is None:
        for name in given:
            if given[name]:
                raise pytest.UsageError(f"{_option(name)} does nothing without --brim-oom=N")
        return
    at = 0 if given[""] == "all" else _number("", given[""], 1, "or `all`")
    count = 1
    if given["_for"] is not None:
        ever = given["_for"] == "ever"
        count = _FOR_GOOD if ever else _number("_for", given["_for"], 1, "or `ever`")
    rank = None if given["_rank"] is None else _number("_rank", given["_rank"], 0, "")
    if rank is not None and at == 0:
        raise pytest.UsageError(
            "--brim-oom=all cannot be used with --brim-oom-rank: the other ranks would not know "
            "how often a test runs; give --brim-oom a number"
        )
    device = given["_device"] or "cpu"
    if device not in ("cpu", "cuda"):
        raise pytest.UsageError(f"--brim-oom-device must be cpu or cuda, got {device!r}")
    try:
        torch = importlib.import_module("torch")
        importlib.import_module("brim")
    except ImportError as error:
        raise pytest.UsageError(f"--brim-oom needs torch and brim: {error}") from error
    if device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--brim-oom-device is cuda, and torch has no CUDA device here")
    faults = _Faults(at, count, device, rank, leaks=given["_leaks"])
    config.pluginmanager.register(faults, "brim-oom")


def _option(name: str) -> str:
    return f"--brim-oom{name}".replace("_", "-")


def _number(name: str, text: str, least: int, other: str) -> int:
    if not (text.isascii() and text.isdigit() and least <= int(text) <= _FOR_GOOD):
        allowed = f"an integer from {least} {other}".strip()
        raise pytest.UsageError(f"{_option(name)} must be {allowed}, got {text!r}")
    return int(text)


class _Faults:
    """Runs tests with failures, once or for one allocation after the other.

    Args:
        at: the allocation that fails; 0 for each in turn.
        count: how many fail in a row.
        device: whose allocations.
        rank: in which process; in all if None.
        leaks: whether bytes that a test leaves are a failure of it.
    """

    def __init__(self, at: int, count: int, device: str, rank: int | None, leaks: bool) -> None:
        self._each, self._count, self._device = at == 0, count, device
        self._first, self._rank, self._leaks = max(at, 1), rank, leaks
        self._at = 0  # of the present run; 0 for none
        self._injected = 0  # failures in the present run

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run a test as often as it takes, and report the last run, which may be the failed one."""
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._run(item, nextitem):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
        at, total, held = self._first, 0, 0
        if self._leaks:
            reports = self._once(item, nextitem, 0)
            if not _ran(reports):
                return reports
            held = self._held()
        while True:
            reports = self._once(item, nextitem, at)
            total += self._injected
            left = self._held() - held if self._leaks and self._injected else 0
            for report in reports:
                if report.when != "call":
                    continue
                setattr(report, _FAILURES, total)
                if left > 0 and report.passed:
                    report.outcome, report.longrepr = "failed", f"left {left} bytes"
                if report.failed and self._injected:
                    more = "" if self._injected == 1 else f" and {self._injected - 1} more"
                    report.sections.append(("brim", f"allocation {at} of the test failed{more}"))
            if not (self._each and self._injected and _ran(reports)):
                return reports
            at += 1

    def _once(
        self, item: pytest.Item, nextitem: pytest.Item | None, at: int
    ) -> list[pytest.TestReport]:
        self._at, self._injected = at, 0
        return runtestprotocol(item, log=False, nextitem=nextitem)

    @pytest.hookimpl(hookwrapper=True, trylast=True)  # around nothing but the test itself
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, None]:
        """Open the injector."""
        if self._at == 0 or not self._is_its_rank():
            yield
            return
        import brim

        with brim.testing.inject_oom(self._at, self._count, self._device) as injector:
            yield
        self._injected = injector.failures

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
        """A test that ends with torch.OutOfMemoryError has ended as it should."""
        outcome = yield
        if call.when != "call" or call.excinfo is None or not self._injected:
            return
        import torch

        report = outcome.get_result()
        if report.failed and isinstance(call.excinfo.value, torch.OutOfMemoryError):
            report.outcome, report.longrepr = "passed", None
            call.excinfo = None  # whoever keeps the call would keep the test's tensors

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """How many failures were injected."""
        reports = [each for found in terminalreporter.stats.values() for each in found]
        failures = [n for n in (getattr(each, _FAILURES, 0) for each in reports) if n]
        terminalreporter.write_line(
            f"brim: {sum(failures)} allocations failed on purpose, in {len(failures)} tests"
        )

    def _is_its_rank(self) -> bool:
        if self._rank is None:
            return True
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank() == self._rank
        return os.environ.get("RANK", "0") == str(self._rank)

    def _held(self) -> int:
        """Bytes that tensors hold, once nothing of a test is left that pytest or torch keeps."""
        import torch

        import brim

        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            sys.__dict__.pop(name, None)
        # After a backward pass that failed, autograd keeps what was ready until the next one.
        with torch.enable_grad():
            torch.autograd.backward(torch.zeros(1, device=self._device, requires_grad=True))
        gc.collect()
        return brim.memory_stats(self._device).allocated


def _ran(reports: list[pytest.TestReport]) -> bool:
    """Whether the test ran and did not fail; it may have ended itself as one to skip."""
    return any(each.when == "call" for each in reports) and not any(each.failed for each in reports)
