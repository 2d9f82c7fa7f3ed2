"""One thread, and nothing left tracked from one test to the next."""

import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from anynan.torch.update.updates import watching
from tests.torch_adapter import forked


def _detach_all() -> None:
    for each in watching():
        adapter, each.tracker.judge.adapter = each.tracker.judge.adapter, None
        if adapter is not None:
            adapter.detach()


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _detach_all()  # what tests elsewhere left
    yield
    _detach_all()
    torch.set_num_threads(threads)


@pytest.fixture
def quiet_lightning() -> Iterator[None]:
    """Leave out what Lightning tells of each training."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., forked.Ran]:
    """Run a program under ``anynan run``."""
    return functools.partial(forked.run, tmp_path)
