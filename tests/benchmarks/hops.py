"""Count the functions and files between the hook that reads a bad layer and the exception.

Run it as ``python -m tests.benchmarks.hops``; ``-v`` lists them in order.
"""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import anynan

PACKAGE = Path(anynan.__file__).parent


class _Bad(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - 10).log()


def hops(*, replay: bool) -> list[tuple[str, str]]:
    """List the functions of anynan that one bad forward pass enters, each once.

    Args:
        replay: Whether the step is run again.
    """
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), _Bad())
    found: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(PACKAGE):
            return
        file, function = path.relative_to(PACKAGE).as_posix(), frame.f_code.co_qualname
        # Counted from the bad layer's own hook, without what a module runs as it loads.
        starts = function == "ForwardHook.__call__" and frame.f_locals["self"].path == "1"
        if (found or starts) and not function.startswith("<"):
            found.setdefault((file, function.partition(".<locals>")[0]))

    with anynan.torch.track(model, replay=replay):
        sys.setprofile(note)
        try:
            model(torch.ones(2, 3))
        except anynan.NonFiniteError:
            sys.setprofile(None)
        finally:
            sys.setprofile(None)
    return list(found)


def main() -> None:
    """Print both counts."""
    for replay in (False, True):
        seen = hops(replay=replay)
        own = [file for file, _ in seen if file.startswith("torch/")]
        print(
            f"replay={replay}: {len(seen)} functions in {len({file for file, _ in seen})} files, "
            f"of them {len(own)} in {len(set(own))} files of the PyTorch adapter"
        )
        if "-v" in sys.argv:
            for file, function in seen:
                print(f"  {file:32} {function}")


if __name__ == "__main__":
    main()
