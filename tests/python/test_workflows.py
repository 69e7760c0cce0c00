"""The workflows: they run what `dev` has, on what pyproject.toml allows, with pinned actions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
DEV = (ROOT / "dev").read_text()

pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="a source distribution has none")


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_commands_that_exist(workflow: Path) -> None:
    text = workflow.read_text()
    commands = re.findall(r"\./dev ([a-z]+)((?: --[a-z]+)*)", text)
    assert commands
    for command, options in commands:
        assert f"\ncmd_{command}() {{" in DEV, command
        own = DEV.partition(f"\ncmd_{command}() {{")[2].partition("\n}\n")[0]
        for option in options.split():
            assert option in own, f"{command} {option}"
    for variable in re.findall(r"BRIM_[A-Z]+", text):
        assert variable in DEV
    for file in re.findall(r"[\w/]+\.txt", text):
        assert (ROOT / file).is_file(), file
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(text)["jobs"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned(workflow: Path) -> None:
    for action in re.findall(r"uses: *(.*)", workflow.read_text()):
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


def test_wheels_are_made_for_all_that_is_supported() -> None:
    text = (ROOT / ".github" / "workflows" / "wheels.yml").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    oldest, beyond = re.findall(r'"torch>=2\.(\d+),<2\.(\d+)"', project)[0]
    minors = [f"2.{minor}.0" for minor in range(int(oldest), int(beyond))]
    assert f"torch: [{', '.join(minors)}]" in text
    first = re.findall(r'requires-python = ">=3\.(\d+)"', project)[0]
    assert f"python: [cp3{first}," in text
