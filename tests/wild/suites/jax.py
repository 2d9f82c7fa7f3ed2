"""Programs in JAX and its libraries: flax, equinox, haiku, jraph, optax, samplers, solvers."""

import gc
import importlib
import inspect
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

# Imported here, before the cases are forked; none of them starts JAX.
import equinox  # noqa: F401
import flax.linen  # noqa: F401
import haiku  # noqa: F401
import jax
import jax.numpy as jnp
import jraph  # noqa: F401
import numpy as np
import optax  # noqa: F401

import anynan
import anynan.jax
from tests.wild.jax_programs.program import PROGRAMS, Expected, Loop, Program
from tests.wild.jax_state import Footprint
from tests.wild.rows import LEVELS, YES, Fault, Row, placed, wanted

SUITE = "jax"
STEPS = 4
SAMPLE = ["conjugate_gradients", "private_gradients"]
MODULES = (
    "plain",
    "optimizers",
    "equinox",
    "haiku_jraph",
    "linen",
    "inference",
)


def cases() -> list[str]:
    for name in MODULES:
        importlib.import_module(f"tests.wild.jax_programs.{name}")
    return list(PROGRAMS)


def program(case: str) -> Program:
    for name in MODULES:
        if case not in PROGRAMS:
            importlib.import_module(f"tests.wild.jax_programs.{name}")
    return PROGRAMS[case]


@contextmanager
def compiled_quickly() -> Iterator[None]:
    """Have little optimised: nearly all of a case's time is the compiler's."""
    name = "jax_disable_most_optimizations"
    before = jax.config.values[name]
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


def host(tree: Any) -> list[np.ndarray]:
    """Copy the arrays of a tree to the host, as what is compared bit for bit."""
    arrays = []
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float):
            arrays.append(np.array(leaf))
    return arrays


def harmless(run: "Run", good: list[np.ndarray]) -> bool:
    """Tell whether what is not finite is not finite without the fault either.

    A pooling layer begins at -Inf, and a model's constants are among the results.
    """
    kinds = zip(run.results, good, strict=True)
    pairs = [(np.float64(a), np.float64(b)) for a, b in kinds if a.dtype.kind in "fV"]
    return all((np.isfinite(a) >= np.isfinite(b)).all() for a, b in pairs)


def difference(one: list[np.ndarray], other: list[np.ndarray]) -> str:
    """Say what differs, ``yes`` if nothing does."""
    kinds = [[(array.shape, array.dtype) for array in arrays] for arrays in (one, other)]
    if kinds[0] != kinds[1]:
        return "no: other shapes or types"
    off = [
        np.nanmax(np.abs(np.float64(a) - np.float64(b)))
        for a, b in zip(one, other, strict=True)
        if a.tobytes() != b.tobytes()
    ]
    return f"no: {len(off)} of {len(one)} arrays, by {max(off):.1e}" if off else YES


def spoil(args: tuple[Any, ...], loop: Loop, how: str) -> tuple[tuple[Any, ...], str]:
    """Put a NaN into a weight, or scale it; give the new arguments and the weight's path."""
    assert loop.weights is not None
    weights = args[loop.weights]
    found, tree = jax.tree_util.tree_flatten_with_path(weights)
    for number, (path, leaf) in enumerate(found):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        real = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)
        if real and leaf.size > 1 and all(word in name for word in loop.pick):
            first = (0,) * leaf.ndim
            bad = leaf.at[first].set(jnp.nan) if how == "nan weight" else leaf * 1e38
            leaves = [leaf for _, leaf in found]
            leaves[number] = jax.device_put(bad, leaf.sharding)
            changed = jax.tree.unflatten(tree, leaves)
            return (*args[: loop.weights], changed, *args[loop.weights + 1 :]), name
    msg = f"no weight has the words {loop.pick}"
    raise LookupError(msg)


class Run:
    """A program, tracked at a level or not: compiled once, run as it is and with spoilt weights."""

    def __init__(self, made: Program, level: str | None, bug: str = "") -> None:
        self.loop, self.level = made.build(bug), level
        self.step = self.loop.step if self.loop.jitted else jax.jit(self.loop.step)
        self.footprint = Footprint()
        self.tracker: Any = None if level is None else anynan.jax.track(self.step, level=level)
        self.left = YES
        self.place = ""

    def go(self, spoilt: str = "") -> anynan.Event | None:
        """Take the steps from the start; give the event that ended them."""
        self.results: list[np.ndarray] = []
        step = self.tracker or self.step
        with warnings.catch_warnings(record=True) as self.warnings:
            warnings.simplefilter("always")
            try:
                with compiled_quickly():
                    args = self.loop.start()
                for number in range(STEPS):
                    if number == 1 and spoilt:
                        args, self.place = spoil(args, self.loop, spoilt)
                    out = step(*args)
                    self.results += host(out)
                    args = self.loop.advance(args, out)
                self.results += host(args)
            except anynan.NonFiniteError as error:
                return error.event
        return None

    def end(self) -> str:
        """Remove the tracker, and say what is left of it."""
        self.tracker.remove()
        alive = weakref.ref(self.tracker)
        self.tracker = None
        gc.collect()
        return self.footprint.left(alive)


def lines(made: Program, bug: str) -> set[int]:
    """Find the lines that a fault was put in."""
    source = inspect.getsource(inspect.getmodule(made.build))
    return {n for n, text in enumerate(source.splitlines(), 1) if text.endswith(f"# fault: {bug}")}


def judged(
    made: Program, bug: str, expected: Expected, level: str, good: list[np.ndarray]
) -> Fault:
    """Run the program with a fault and compare what is said with what was put in."""
    fault = Fault(bug, f"# fault: {bug}")
    event = Run(made, level, bug).go()
    if event is None:
        plain = Run(made, None, bug)
        plain.go()
        if harmless(plain, good):
            fault.left_out = "finite without anynan: the compiler took it out"
        return fault
    fault.detected, fault.said = True, placed(event)
    operation = event.operation
    if expected.layer is not None:
        fault.layer = event.layer == expected.layer
    if expected.operation:
        fault.operation = operation is not None and operation.name in expected.operation
    if expected.line:
        source = operation.source if operation is not None else None
        fault.line = source is not None and source.line in lines(made, bug)
    if expected.cause is not None:
        fault.cause = event.cause is not None and event.cause.tag == expected.cause
    return fault


def spoilt(tracked: Run, plain: Run, how: str, good: list[np.ndarray]) -> Fault:
    """Spoil a weight after the first step."""
    event = tracked.go(how)
    fault = Fault(how, tracked.place)
    if event is None:
        plain.go(how)
        if harmless(plain, good):
            fault.left_out = "finite without anynan"
        return fault
    fault.detected, fault.said = True, placed(event)
    if how == "nan weight":
        told = f"{event.layer or ''}.{event.parameter}"
        words = tracked.place.replace("~", "").removesuffix("/value").split("/")
        fault.layer = all(word in told for word in (words[-2:] if event.layer else words[-1:]))
        tag = event.cause.tag if event.cause is not None else ""
        fault.cause = tag in ("bad_parameter", "weight_written")
    return fault


def run(case: str) -> Iterator[Row]:
    """Run one program at each level."""
    made = program(case)
    try:
        plain = Run(made, None)
        plain.go()
    except Exception as error:
        yield Row(SUITE, case, skipped=f"{type(error).__name__}: {error}"[:200])
        return
    results, heard = plain.results, {str(warning.message) for warning in plain.warnings}
    for level in LEVELS:
        row = Row(SUITE, case, level, silent=YES)
        tracked = Run(made, level)
        event = tracked.go()
        row.identical = difference(results, tracked.results)
        new = {str(warning.message) for warning in tracked.warnings} - heard
        # -Inf that is placed by a mask and returned is a suspect, which says nothing.
        bad = [event for event in tracked.tracker.events if event.severity == "bad"]
        if event is not None or bad:
            row.silent = f"alarm: {placed(event or bad[0])}"
        elif new:
            row.silent = f"warning: {min(new)}"
        if plain.loop.weights is not None:
            ways = ("nan weight", "scaled weight") if level == "layer" else ()
            row.faults = [spoilt(tracked, plain, how, results) for how in ways]
        row.clean = tracked.end()
        # Each fault is a program of its own to compile, with every operation's readings at last:
        # one is compiled as users have it, at the level that they have.
        for number, bug in enumerate(made.faults):
            if level != "layer" and (number or not wanted(case, level, bug)):
                continue
            with nullcontext() if level == "layer" and not number else compiled_quickly():
                row.faults.append(judged(made, bug, made.faults[bug], level, results))
        yield row
