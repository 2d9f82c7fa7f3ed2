"""Notebooks: what a cell that goes bad shows, in a shell of IPython's own."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("IPython")
pytest.importorskip("torch")

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import anynan

CELL = """import torch, anynan
class Log(torch.nn.Module):
    def forward(self, x):
        return torch.log(x)
model = torch.nn.Sequential(Log(), torch.nn.Tanh())
bad = -torch.ones(3)"""


@pytest.fixture
def shell() -> Iterator[Any]:
    shell = InteractiveShell.instance(colors="nocolor")
    shell.run_cell("%load_ext anynan")
    shell.run_cell(CELL, store_history=True)
    yield shell
    shell.run_cell("%unload_ext anynan")
    InteractiveShell.clear_instance()


def said(shell: Any, cell: str) -> str:
    with capture_output() as captured:
        shell.run_cell(cell, store_history=True)
    return str(captured.stdout + captured.stderr)


def test_a_cell_that_goes_bad_is_named(shell: Any) -> None:
    text = said(shell, "%%anynan\nmodel(bad)")
    assert re.search(r"op +log +Cell In\[\d+\], line 4 in forward\n +return torch.log\(x\)", text)
    assert "torch/nn/modules" not in text
    assert "anynan: Sequential: 1 bad in 1 step" in text


def test_all_cells_are_watched_from_on_to_off(shell: Any) -> None:
    assert said(shell, "%anynan on warn") == ""
    assert "NaN first appeared" in said(shell, "model(bad)")
    assert "anynan: Sequential: 1 bad in 1 step" in said(shell, "%anynan")
    assert "1 bad" in said(shell, "%anynan off")
    assert "first appeared" not in said(shell, "model(bad)")
    assert "'of' is unknown" in said(shell, "%anynan of")


def test_a_cell_that_tracks_may_be_run_again(shell: Any) -> None:
    cell = "tracker = anynan.torch.track(model, action='record')"
    assert said(shell, cell) + said(shell, cell) == ""
    assert said(shell, "model(bad); print(len(tracker.events))") == "1\n"
    formats = shell.display_formatter.format
    data, _ = formats(shell.user_ns["tracker"].events[0])
    assert data["text/html"].startswith("<pre ")
    assert "<b>NaN first appeared in the forward pass of step 0</b>" in data["text/html"]
    assert "<script" not in data["text/html"]
    assert "1 bad in 1 step" in formats(shell.user_ns["tracker"])[0]["text/html"]
    anynan.untrack(shell.user_ns["model"])
