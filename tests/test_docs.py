"""What the documentation says about plans is what the engine does."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from torch import nn

import elbowroom
from tests.support.models import BUILDERS

ROOT = Path(__file__).parent.parent
LIBRARY = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")


def rows_under(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its two first lines."""
    section = LIBRARY.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("cells", rows_under("Segments"), ids=" ".join)
def test_segments(cells):
    interval, stride, strip = cells
    controls = elbowroom.Controls(
        gradient_checkpointing=True,
        gradient_checkpointing_interval=int(interval.split()[0]),
        gradient_checkpointing_segment_stride=None if stride == "–" else int(stride),
    )
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(2, 2) for _ in range(6))})
    assert f"`{elbowroom.schedule(model, controls, blocks=['blocks.*']).strip()}`" == strip


@pytest.mark.parametrize("cells", rows_under("Attention, feed-forward, and the rest"), ids=" ".join)
def test_treatments(cells):
    checkpointing, options, cell = cells
    controls = {name: ast.literal_eval(value) for name, value in re.findall(r"(\w+)=([^`]+)`", options)}
    controls["gradient_checkpointing"] = {"on": True, "off": False}[checkpointing]
    for family in BUILDERS:
        plan = elbowroom.schedule(BUILDERS[family](), elbowroom.Controls(**controls))
        assert {f"`{elbowroom.Plan((block,)).strip()}`" for block in plan.blocks} == {cell}, family


def test_the_plan_made_by_hand(capsys):
    (program,) = [code for code in re.findall(r"```python\n(.*?)```", LIBRARY, re.DOTALL) if "BlockPlan(" in code]
    exec(program, {})
    assert capsys.readouterr().out.strip() == program.rsplit("# ", 1)[1].strip()
