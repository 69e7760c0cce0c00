"""The suite itself: it runs in any environment, with a GPU and without one."""

from __future__ import annotations

import pytest

from .torchrun import environment


@pytest.mark.parametrize("plugin", ["benchmark", "randomly"])
def test_plugins_that_would_change_or_end_the_run_are_left_out(
    plugin: str, pytestconfig: pytest.Config
) -> None:
    assert pytestconfig.pluginmanager.is_blocked(plugin)


def test_several_ranks_do_not_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert environment(ranks=1)["CUDA_VISIBLE_DEVICES"] == "3"
    assert environment(ranks=2)["CUDA_VISIBLE_DEVICES"] == ""
