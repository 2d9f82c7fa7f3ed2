"""Time a tracked training step beside what users would otherwise pick.

Every variant trains its own copy of the same model; the variants take turns step by step in
one process, and medians of their times are divided by the untracked median. Run it with
nothing else on the machine: ``make bench``.
"""

import argparse
import contextlib
import datetime as dt
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import anynan
from tests.benchmarks.gpt import LARGE, SMALL, Size, training

GOALS = {SMALL.name: "<= 1.15", LARGE.name: "<= 1.03"}


def plain(model: nn.Module, step: Callable[[], None]) -> Callable[[], None]:
    """Run without tracking."""
    return step


def tracked(model: nn.Module, step: Callable[[], None]) -> Callable[[], None]:
    """Run under the default tracker: every layer, forward and backward."""
    anynan.torch.track(model)
    return step


def forward_only(model: nn.Module, step: Callable[[], None]) -> Callable[[], None]:
    """Run under the tracker without its backward half."""
    anynan.torch.track(model, backward=False)
    return step


def tracked_step(model: nn.Module, step: Callable[[], None]) -> Callable[[], None]:
    """Run the step function under the tracker."""
    tracker: Callable[[], None] = anynan.torch.track(step)
    return tracker


def deferred(model: nn.Module, step: Callable[[], None]) -> Callable[[], None]:
    """Run with one read a step, as on an accelerator."""
    anynan.torch.track(model, read="step")
    return step


def anomaly(model: nn.Module, step: Callable[[], None]) -> Callable[[], None]:
    """Run under autograd's anomaly mode."""

    def run() -> None:
        with torch.autograd.detect_anomaly(check_nan=True):
            step()

    return run


def isnan_hooks(model: nn.Module, step: Callable[[], None]) -> Callable[[], None]:
    """Run with the hook people write: isnan and isinf on every output, forward only."""

    def hook(module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and (
            torch.isnan(output).any() or torch.isinf(output).any()
        ):
            raise RuntimeError(type(module).__name__)

    for module in model.modules():
        module.register_forward_hook(hook)
    return step


def transformers_debug(model: nn.Module, step: Callable[[], None]) -> Callable[[], None]:
    """Run under transformers' DebugUnderflowOverflow, forward only."""
    from transformers.debug_utils import DebugUnderflowOverflow

    DebugUnderflowOverflow(model)  # type: ignore[no-untyped-call]
    return step


VARIANTS: dict[str, Callable[[nn.Module, Callable[[], None]], Callable[[], None]]] = {
    "no tracking": plain,
    "anynan track(model)": tracked,
    "anynan track(step)": tracked_step,
    "anynan, backward=False": forward_only,
    'anynan, read="step"': deferred,
    "autograd.detect_anomaly": anomaly,
    "isnan/isinf forward hooks": isnan_hooks,
    "transformers DebugUnderflowOverflow": transformers_debug,
}


def measure(size: Size, rounds: int, device: str) -> dict[str, float]:
    """Return each variant's median time over the untracked median."""
    import warnings

    runs = {}
    for name, make in VARIANTS.items():
        model, step = training(size, device)
        with warnings.catch_warnings(), contextlib.redirect_stdout(None):
            warnings.simplefilter("ignore")
            runs[name] = make(model, step)
    times: dict[str, list[float]] = {name: [] for name in runs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(rounds + 3):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                if i >= 3:
                    times[name].append(time.perf_counter() - start)
    base = statistics.median(times["no tracking"])
    return {name: statistics.median(values) / base for name, values in times.items()}


def table(results: dict[str, dict[str, float]]) -> str:
    """Return the results as a Markdown table."""
    sizes = list(results)
    lines = [
        "| variant | " + " | ".join(sizes) + " |",
        "|---|" + "---|" * len(sizes),
        "| goal for anynan | " + " | ".join(GOALS[size] for size in sizes) + " |",
    ]
    lines += [
        f"| {name} | " + " | ".join(f"{results[size][name]:.2f}" for size in sizes) + " |"
        for name in VARIANTS
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure both sizes and print the table, or write it into the documentation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--write", type=Path, default=Path("docs/benchmarks.md"), help="page to write into"
    )
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    results = {
        SMALL.name: measure(SMALL, options.rounds * 5, options.device),
        LARGE.name: measure(LARGE, options.rounds, options.device),
    }
    text = (
        f"Measured {dt.datetime.now(dt.UTC):%Y-%m-%d} on {os.cpu_count()} cores "
        f"({platform.machine()}), {torch.get_num_threads()} threads, Python "
        f"{platform.python_version()}, PyTorch {torch.__version__}; medians of "
        f"{options.rounds * 5} and {options.rounds} interleaved steps.\n\n{table(results)}\n"
    )
    print(text)
    if options.write.exists():
        page = options.write.read_text()
        begin, end = "<!-- torch eager begin -->\n", "<!-- torch eager end -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        options.write.write_text(before + begin + text + end + after)


if __name__ == "__main__":
    main()
