"""Programs in JAX and its libraries: flax, equinox, optax, diffrax."""

import gc
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import anynan
import anynan.jax
from tests.wild import jax_programs
from tests.wild.jax_programs import PROGRAMS, Loop, Program
from tests.wild.rows import LEVELS, YES, Fault, Row, alarm, marked, placed, wanted

SUITE = "jax"
STEPS = 4
SAMPLE = ["conjugate_gradients", "private_gradients"]


def cases() -> list[str]:
    return list(PROGRAMS)


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
    kinds = [[(array.shape, array.dtype) for array in arrays] for arrays in (one, other)]
    if kinds[0] != kinds[1]:
        return "no: other shapes or types"
    pairs = zip(one, other, strict=True)
    off = [
        np.nanmax(np.abs(np.float64(a) - np.float64(b)))
        for a, b in pairs
        if a.tobytes() != b.tobytes()
    ]
    return f"no: {len(off)} of {len(one)} arrays, by {max(off):.1e}" if off else YES


def state() -> dict[str, Any]:
    """Note what tracking may change while it lasts: the configuration, and calls of modules."""
    bases = (("equinox", "Module"), ("flax.nnx", "Module"), ("flax.linen", "Module"))
    classes = [getattr(sys.modules[name], base) for name, base in bases if name in sys.modules]
    for kind in classes:
        classes += [below for below in kind.__subclasses__() if below not in classes]
    # Transforms make a class of the same name each time: what is compared is the class itself.
    calls = {
        f"{kind.__qualname__}.__call__ {id(kind)}": vars(kind)["__call__"]
        for kind in classes
        if "__call__" in vars(kind)
    }
    return {f"jax.config.{name}": value for name, value in jax.config.values.items()} | calls


def spoil(args: tuple[Any, ...], loop: Loop, how: str) -> tuple[tuple[Any, ...], str]:
    """Put a NaN into a weight, or scale it; give the new arguments and the weight's path."""
    assert loop.weights is not None
    found, tree = jax.tree_util.tree_flatten_with_path(args[loop.weights])
    leaves = [leaf for _, leaf in found]
    for number, (path, leaf) in enumerate(found):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        real = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)
        if real and leaf.size > 1 and all(word in name for word in loop.pick):
            first = (0,) * leaf.ndim
            bad = leaf.at[first].set(jnp.nan) if how == "nan weight" else leaf * 1e38
            leaves[number] = jax.device_put(bad, leaf.sharding)
            changed = jax.tree.unflatten(tree, leaves)
            return (*args[: loop.weights], changed, *args[loop.weights + 1 :]), name
    msg = f"no weight has the words {loop.pick}"
    raise LookupError(msg)


class Run:
    """A program, tracked at a level or not: compiled once, run as it is and with spoilt weights."""

    def __init__(self, made: Program, level: str | None, bug: str = "") -> None:
        self.loop = made.build(bug)
        self.step = self.loop.step if self.loop.jitted else jax.jit(self.loop.step)
        self.before = state()
        self.tracker: Any = None if level is None else anynan.jax.track(self.step, level=level)
        self.place = ""

    def go(self, spoilt: str = "") -> anynan.Event | None:
        """Take the steps from the start; give the event that ended them."""
        self.results: list[np.ndarray] = []
        step = self.tracker or self.step
        with warnings.catch_warnings(record=True) as heard:
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
        self.heard = {str(warning.message) for warning in heard}
        return None

    def end(self) -> str:
        self.tracker.remove()
        alive = weakref.ref(self.tracker)
        self.tracker = None
        gc.collect()
        after = state()
        wrong = [name for name, was in self.before.items() if after.get(name, was) is not was]
        wrong += ["the tracker is still held"] * (alive() is not None)
        return f"no: {', '.join(wrong)}" if wrong else YES


def judged(made: Program, bug: str, level: str, good: list[np.ndarray]) -> Fault:
    """Run the program with a fault and compare what is said with what was put in."""
    fault, expected = Fault(bug, f"# fault: {bug}"), made.faults[bug]
    event = Run(made, level, bug).go()
    if event is None:
        plain = Run(made, None, bug)
        plain.go()
        if harmless(plain, good):
            fault.left_out = "finite without anynan: the compiler took it out"
        return fault
    lines = marked(str(jax_programs.__file__), bug)
    fault.judge(event, expected.operation, lines, expected.cause)
    if expected.layer is not None:
        fault.layer = event.layer == expected.layer
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
        words = tracked.place.removesuffix("/value").split("/")
        fault.layer = all(word in told for word in (words[-2:] if event.layer else words[-1:]))
        tag = event.cause.tag if event.cause is not None else ""
        fault.cause = tag in ("bad_parameter", "weight_written")
    return fault


def run(case: str) -> Iterator[Row]:
    made = PROGRAMS[case]
    try:
        plain = Run(made, None)
        plain.go()
    except Exception as error:
        yield Row(SUITE, case, skipped=f"{type(error).__name__}: {error}"[:200])
        return
    results = plain.results
    for level in LEVELS:
        row = Row(SUITE, case, level)
        tracked = Run(made, level)
        event = tracked.go()
        row.identical = difference(results, tracked.results)
        # -Inf that is placed by a mask and returned is a suspect, which says nothing.
        new = set() if event is not None else tracked.heard - plain.heard
        row.silent = alarm(event, tracked.tracker.events, new)
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
                row.faults.append(judged(made, bug, level, results))
        yield row
