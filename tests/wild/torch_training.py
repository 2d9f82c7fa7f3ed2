"""Train a program for two steps without and with `anynan`, then with faults in it."""

import copy
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import anynan
import anynan.torch
from tests.wild.rows import LEVELS, YES, Fault, Row, wanted
from tests.wild.torch_faults import (
    CAUSES,
    KINDS,
    NAN_WEIGHT,
    OPERATIONS,
    SCALE,
    Oracle,
    Truth,
    alike,
    called_leaves,
    owners,
    places,
    put,
)
from tests.wild.torch_silence import events_of, listening, silence
from tests.wild.torch_state import Footprint, differing, seed

STEPS = 2
TRIES = 4  # layers a fault is tried in, until one does harm

# A program: the model, and what gives the loss of step i.
Program = tuple[nn.Module, Callable[[nn.Module, int], Tensor]]
Build = Callable[[], Program]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def copies(build: Build) -> Build:
    """Build a program once, and give a copy each time: what is drawn at random takes long."""
    seed(0)
    first, loss = build()

    def again() -> Program:
        return copy.deepcopy(first), loss

    try:
        again()
    except Exception:
        return build
    return again


class Training:
    def __init__(self, build: Build) -> None:
        seed(0)
        self.model, self._loss = build()
        self.model.train()
        learning = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(learning, lr=1e-3)

    def loss(self, number: int) -> Tensor:
        seed(number + 1)
        return self._loss(self.model, number)

    def step(self, number: int) -> Tensor:
        loss = self.loss(number)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@dataclass
class Seen:
    """What a clean training computed, said and left."""

    values: dict[str, list[Any]]
    warnings: list[str]
    events: list[Any] = field(default_factory=list)
    left: str = YES


def trained(build: Build, level: Any) -> Seen:
    program = Training(build)
    model = program.model
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    footprint = Footprint(model, program.optimizer)
    values: dict[str, list[Any]] = {"losses": [], "gradients": []}
    seen = Seen(values, [])
    tracker = None
    with listening() as seen.warnings:
        if level is not None:
            tracker = anynan.torch.track(
                model, level=level, advanced=anynan.Advanced(across_ranks=False)
            )
        for number in range(STEPS):
            values["losses"].append(program.step(number))
            values["gradients"] += [
                None if weight.grad is None else weight.grad.clone() for weight in learning
            ]
        if tracker is not None:
            tracker.flush()
            seen.events = list(tracker.events)
            tracker.remove()
            alive = weakref.ref(tracker)
            tracker = None
            seen.left = footprint.left(alive)
    values["weights"] = [weight.detach() for weight in model.parameters()]
    values["buffers"] = [buffer.detach() for buffer in model.buffers()]
    values["random state"] = [torch.get_rng_state()]
    return seen


def clean(row: Row, build: Build, untracked: Seen) -> None:
    try:
        tracked = trained(build, row.level)
    except anynan.AnomalyError as error:
        row.silent = "alarm: " + "; ".join(events_of([error.event]))
        return
    except Exception as error:
        row.error = f"{type(error).__name__}: {error}\n{traceback.format_exc()[-1200:]}"
        return
    differs = differing(untracked.values, tracked.values)
    row.identical = f"no: {', '.join(differs)}" if differs else YES
    if differs and differing(untracked.values, trained(build, None).values):
        row.identical = ""  # it does not repeat itself
    row.silent = silence(untracked.warnings, tracked.warnings, tracked.events)
    row.clean = tracked.left


def truth_of(build: Build, kind: str, place: str) -> Truth:
    """See what a fault does, without `anynan`."""
    program = Training(build)
    first = 0
    if kind == NAN_WEIGHT:
        program.step(0)
        first = 1
    put(kind, program.model.get_submodule(place))
    oracle = Oracle(program.model, operations=kind == SCALE)
    return oracle.look(lambda: program.loss(first))


def chosen(
    build: Build, case: str, kind: str, model: nn.Module, leaves: list[str]
) -> tuple[Fault, Truth]:
    """Find a layer where a fault does harm."""
    fault = Fault(kind, "", left_out="no layer for it")
    for place in places(case, kind, model, leaves)[:TRIES]:
        try:
            truth = truth_of(build, kind, place)
        except Exception as error:
            fault = Fault(kind, place, left_out=f"breaks the program: {error}"[:200])
            continue
        if truth.harm:
            return Fault(kind, place), truth
        fault = Fault(kind, place, left_out="does no harm")
    return fault, Truth()


def faulty(build: Build, level: Any, fault: Fault, truth: Truth) -> None:
    program = Training(build)
    model = program.model
    module = model.get_submodule(fault.place)
    if fault.kind != NAN_WEIGHT:
        put(fault.kind, module)
    with listening():
        tracker = anynan.torch.track(
            model, level=level, advanced=anynan.Advanced(across_ranks=False)
        )
        try:
            for number in range(STEPS):
                program.step(number)
                if fault.kind == NAN_WEIGHT and number == 0:
                    put(NAN_WEIGHT, module)
        except anynan.AnomalyError as error:
            judge(fault, truth, model, error.event)
            str(error)  # the report itself must not fail
        except Exception as error:
            fault.said = f"raised {type(error).__name__}: {error}"[:300]
        finally:
            tracker.remove()


def judge(fault: Fault, truth: Truth, model: nn.Module, event: Any) -> None:
    """Compare what is said with what is known."""
    operation, cause = event.operation, event.cause.tag if event.cause else ""
    fault.detected = True
    fault.said = "; ".join(events_of([event]))
    if fault.kind == NAN_WEIGHT:
        weight = model.get_submodule(fault.place).weight
        fault.layer = event.parameter in set(owners(model, weight))
        fault.cause = cause in CAUSES[NAN_WEIGHT]
        return
    if fault.kind == SCALE:
        layers = {layer for _, layer in truth.origins}
        made = {name for name, _ in truth.origins} | set(truth.backward)
        if layers and event.phase != "backward":
            fault.layer = any(alike(model, event.layer, layer) for layer in layers)
        # Of a tracked model's loss, that it was made outside is all there is to say.
        if operation is not None or event.layer is not None or not truth.outside:
            fault.operation = operation is not None and any(name in operation.raw for name in made)
        fault.cause = cause not in {"", "unknown"}
        return
    fault.layer = alike(model, event.layer, fault.place)
    fault.operation = operation is not None and operation.name == OPERATIONS[fault.kind]
    source = operation.source if operation is not None else None
    fault.line = source is not None and source.file.endswith("torch_faults.py")
    fault.cause = cause in CAUSES[fault.kind]


def suite_of(
    name: str, programs: Mapping[str, Build]
) -> tuple[Callable[[], list[str]], Callable[[str], Iterator[Row]]]:
    """Give ``cases`` and ``run`` of a suite that builds its programs by name."""
    return lambda: list(programs), lambda case: rows(name, case, programs[case])


def rows(suite: str, case: str, build: Build) -> Iterator[Row]:
    try:
        build = copies(build)
        untracked = trained(build, None)
        program = Training(build)
        model, leaves = program.model, called_leaves(program.model, lambda: program.loss(0))
        faults = [chosen(build, case, kind, model, leaves) for kind in KINDS]
    except Exception as error:
        yield Row(suite, case, skipped=f"{type(error).__name__}: {error}"[:200])
        return
    for level in LEVELS:
        row = Row(suite, case, level)
        clean(row, build, untracked)
        for found, truth in faults:
            if not wanted(case, level, found.kind):
                continue
            fault = Fault(found.kind, found.place, left_out=found.left_out)
            if level == "step" and not fault.left_out and not truth.shown:
                fault.left_out = "does no harm to what the model returns, the loss or a gradient"
            row.faults.append(fault)
            if not fault.left_out:
                faulty(build, level, fault, truth)
        yield row
