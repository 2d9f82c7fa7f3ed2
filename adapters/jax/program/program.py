"""One traced form of a function: its operations, its readings, its compiled programs."""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
from jax import tree_util

from anynan._base.context import marker
from anynan._base.walks import walk
from anynan._readings.patterns import Patterns, choose
from anynan._readings.readings import ProbePoint
from anynan.events import CARRIED, STATE
from anynan.jax.graphs.bodies import JITS
from anynan.jax.graphs.graph import PASSING, Graph, Node
from anynan.jax.graphs.layers import Layers
from anynan.jax.graphs.operations import Operations
from anynan.jax.graphs.stacks import MARK
from anynan.jax.graphs.versions import settings, traces
from anynan.jax.program import signature
from anynan.jax.program.evaluator import CALLBACKS, Evaluator, placed, silent
from anynan.jax.program.objects import (
    Objects,
    objects_of,
    refuse_changed,
    refuse_shared,
    variables,
    without_writes,
)
from anynan.jax.program.scopes import merges, named
from anynan.jax.program.signature import Flat, Leaf, Slot
from anynan.jax.program.trace import ShutError, UntraceableError, UnwatchableError, under_way
from anynan.jax.read.probes import checkable
from anynan.jax.read.readings import Emission, Path, Plan, Probe


@dataclass(frozen=True)
class Settings:
    """Hold what a tracker's options mean for its programs."""

    names: tuple[str, ...] = ()
    layers: bool = True
    backward: bool = True
    gradients: bool = False
    ends: bool = False
    extra: tuple[str, ...] = ()
    parameters: bool = False
    donate: bool = True
    drops: bool = False
    raises: bool = False
    plain: bool = False
    forgets: bool = False  # whether what it writes into Keras's variables may be lost
    # Arguments that come back and only count up, as metrics do; -1 for the first result.
    tallies: frozenset[Hashable] = frozenset()

    def restores(self, donated: tuple[int, ...]) -> bool:
        """Tell whether a bad step gives the old state back."""
        # A donated state is lost when the step is over: so is a replay, if it does not come back.
        return self.drops or (self.raises and self.donate and bool(donated))


# What is read instead of a total that may lose a NaN, and what XLA's CPU kernels take in with it.
EXACT = {"sum": "code", "span": "ends"}
ELEMENTWISE = frozenset(
    {
        "abs", "add", "broadcast_in_dim", "convert_element_type", "copy", "div", "exp", "log",
        "integer_pow", "logistic", "mul", "neg", "reshape", "select_n", "sign", "sqrt", "square",
        "squeeze", "sub", "tanh", "transpose",
    }
)  # fmt: skip
# What gives the least or the largest number, to which an Inf at the other end is nothing.
ENDS = frozenset({"clamp", "max", "min", "reduce_max", "reduce_min"})
HANDS_ON = PASSING | {"concatenate", "convert_element_type", "scatter", "select_n", "sort"}
_WRITES = "it writes into Keras's variables: track the model with anynan.keras.track"
_UNTRACEABLE = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)


@dataclass(frozen=True, slots=True)
class Result:
    """Describe one array that comes out.

    Attributes:
        name: ``loss``, ``result['logits']``, or a weight's own name.
        source: Number of the argument leaf it has the place of, None if it is new.
        state: True for the new value of that leaf, False for its gradient.
    """

    name: str
    source: int | None = None
    state: bool = False


class Program:
    """Hold what is known of a function for one kind of arguments."""

    def __init__(
        self, fn: Callable[..., Any], flat: Flat, settings: Settings,
        objects: Objects | None = None, inner: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        self.settings = settings
        # What it gives is its result and the state of its objects.
        self.stateful = objects is not None
        self.out = Flat([], (), None, 0)
        roots: set[str] = set()
        self.expected: list[dict[str, str]] = []
        token = marker.set(self._mark)
        try:
            held, before = None if objects is None else list(objects.held.values()), traces()
            with under_way(), named((fn, flat.arguments(flat.arrays), held), roots) as written:
                self.closed = jax.make_jaxpr(self._pure(fn, flat))(*flat.arrays)
                self.donated = self._donated()
                # Of what was traced before nothing is traced now, but the function of arrays.
                known = written or traces() > before + 1 or not self._bare()
                if inner is not None and not known and (roots or merges(inner)):
                    # A jitted function is traced once: before it was tracked, maybe, when its
                    # layers were not named.
                    self.closed = jax.make_jaxpr(self._pure(inner, flat))(*flat.arrays)
        except _UNTRACEABLE as error:
            name = getattr(fn, "__name__", type(fn).__name__)
            msg = (
                f"{name} cannot be traced, so it cannot be tracked: what it does depends on the "
                "numbers in an array; write jnp.where or lax.cond, mark the argument as static in "
                "a jax.jit of your own, or track the part that jax.jit can compile; "
                "anynan.track watches code that runs as it is"
            )
            raise UntraceableError(msg) from error
        finally:
            marker.reset(token)
        self.roots = frozenset(roots)
        try:
            self.graph = Graph(self.closed)
            self.layers = Layers(self.graph, self.roots)
            tree = flat.arguments(Slot.each(self.closed.in_avals))
            self.results = self._match(tree)
        except Exception as error:  # what fails here is ours: the function itself was traced
            raise UnwatchableError(f"{type(error).__name__} {error}".rstrip()) from error
        # What is spread over devices is not put side by side: that would move it.
        self.alone = all(not isinstance(x, jax.Array) or _alone(x) for x in flat.arrays)
        # The one device it runs on, None for several.
        self.device = _device(flat.arrays) if self.alone else None
        self._operations: Operations | None = None
        self.replays: dict[Any, Any] = {}
        # What a second run looked at, where loops are in loops.
        self.look: Any = None
        # What binds its callbacks in a second run, None where they are run as they are.
        self.catcher: Any = None
        self.chosen: set[str] | None = None
        # The results that are nothing but a NaN of the code's own.
        held = [self.graph.values[index] for index in self.graph.results]
        self.empty = [i for i, x in enumerate(held) if x.known and _is_nan(x.constant)]

    def without(self, paths: Mapping[Path, str]) -> "Program":
        """Give the same program with some equations left shut.

        Args:
            paths: Where they are, and why.
        """
        found = copy.copy(self)
        found.graph = Graph(self.closed, {**self.graph.shut, **paths})
        found.layers = Layers(found.graph, self.roots)
        found._operations, found.replays = None, {}
        return found

    def _mark(self, what: str | dict[str, str]) -> Any:
        """Write a scope, or the number of an expectation, into the name stack."""
        if isinstance(what, str):
            return jax.named_scope(what)
        self.expected.append(what)
        return jax.named_scope(f"{MARK}{len(self.expected) - 1}")

    def allowed(self, node: Node) -> dict[str, str]:
        """Give what is expected of an operation, with the reasons."""
        found: dict[str, str] = {}
        for number in node.place.marks:
            if number < len(self.expected):  # else from a trace before this one
                found.update(self.expected[number])
        return found

    def excused(self, index: int) -> dict[str, str]:
        """Give what is expected of a value by the operation that makes it."""
        writer = self.graph.values[index].writer
        return {} if writer is None else self.allowed(self.graph.nodes[writer])

    def _pure(self, fn: Callable[..., Any], flat: Flat) -> Callable[..., list[Any]]:
        def pure(*arrays: Any) -> list[Any]:
            args, kwargs = flat.arguments(arrays)
            held = variables(args, kwargs, split=self.stateful)
            with without_writes() as written:
                out = fn(*args, **kwargs)
            if written() and not self.settings.forgets:
                raise UnwatchableError(_WRITES)
            refuse_changed(held, variables(args, kwargs, split=self.stateful))
            refuse_shared(out[0] if self.stateful else out)
            self.out = signature.parted(out, plain=self.settings.plain)
            made, self.out = self.out.arrays, replace(self.out, arrays=[])
            return made

        return pure

    def joined(self, arrays: Any) -> Any:
        """Put results back into the form the function gave them."""
        return self.out.joined(arrays)

    # Names.

    def _match(self, tree: Any) -> list[Result]:
        """Find which results are arguments come back, and name all of them."""
        out = self.joined(Slot.each(self.closed.out_avals))
        found: dict[int, Result] = {}
        returned, pairs = self._come_back(tree, out)
        self.leaves: list[Leaf] = [
            replace(leaf, role="state") if leaf.argument in self.settings.tallies else leaf
            for leaf in signature.leaves_of(tree, self.settings.names, returned)
        ]
        for a, b in pairs:
            value = self.graph.values[self.graph.results[b]]
            grad = value.writer is not None and self.graph.nodes[value.writer].backward
            found[b] = Result(self.leaves[a].name, a, not grad)
        self.back = dict(sorted((b, a) for a, b in pairs if found[b].state))
        self._set_apart()
        for path, leaf in tree_util.tree_flatten_with_path(out)[0]:
            if isinstance(leaf, Slot) and leaf not in found:
                found[leaf] = Result("result" + signature.spelled(path))
        return [found.get(i, Result("result")) for i in range(len(self.closed.out_avals))]

    def _come_back(self, tree: Any, out: Any) -> tuple[set[Hashable], list[tuple[int, int]]]:
        """Find the arguments that come back among the results, and which leaf comes as which."""
        names, (args, kwargs) = self.settings.names, tree
        returned: set[Hashable] = set()
        pairs: list[tuple[int, int]] = []
        used: list[tuple[Any, ...]] = []
        places = signature.subtrees(out)
        for key, value in [*enumerate(args), *kwargs.items()]:
            bare = names[key] if isinstance(key, int) and key < len(names) else str(key)
            if isinstance(value, Slot) and not signature.is_kept(bare):
                continue  # one array alone is a weight by its name only
            for path, item in places:
                free = all(path[: len(each)] != each for each in used)
                back = self._paired(value, item) if free else []
                if back:
                    used.append(path)
                    returned.add(key)
                    pairs += back
                    break
        return returned, pairs

    def _paired(self, value: Any, item: Any) -> list[tuple[int, int]]:
        """Pair the leaves of an argument with those of a part of the results, if all fit."""
        sides = map(tree_util.tree_leaves, (value, item))
        mine, theirs = ([x for x in leaves if isinstance(x, Slot)] for leaves in sides)
        if len(mine) != len(theirs) or not _alike(tree_util.tree_structure(value), item):
            return []
        ins, outs = self.closed.in_avals, self.closed.out_avals
        pairs: list[tuple[int, int]] = list(zip(mine, theirs, strict=True))
        fits = (
            _fits((ins[a].shape, ins[a].dtype), (outs[b].shape, outs[b].dtype)) for a, b in pairs
        )
        return pairs if all(fits) else []

    def _set_apart(self) -> None:
        """Tell from the weights what a training step carries along, and no gradient reaches."""
        self.differentiated = any(node.backward for node in self.graph.nodes)
        untrained: set[int] = set()
        for i, index, leaf in self.weights() if self.differentiated else ():
            handed_on = self.graph.values[index].argument is not None
            if not handed_on and not self._trained(index, untrained):
                self.leaves[self.back[i]] = replace(leaf, role="buffer")

    def weights(self) -> Iterator[tuple[int, int, Leaf]]:
        """Walk the new weights that come back: which result, which value, in whose place."""
        for i, source in self.back.items():
            if self.leaves[source].role == "parameter":
                yield i, self.graph.results[i], self.leaves[source]

    def _trained(self, index: int, known: set[int]) -> bool:
        """Tell whether a gradient went into a value; what was seen without one is known."""
        graph = self.graph
        for i in walk([index], lambda i: [j for j in graph.made_of(i) if j not in known]):
            writer = graph.values[i].writer
            if writer is not None and graph.nodes[writer].backward:
                return True
            known.add(i)
        return False

    def _bare(self) -> bool:
        """Tell whether the function is one jit, with no shardings of its own."""
        eqns = self.closed.jaxpr.eqns
        return len(eqns) == 1 and eqns[0].primitive.name in JITS and not placed(eqns[0])

    def _donated(self) -> tuple[int, ...]:
        """Find the arguments that the user's own jit donates."""
        found = []
        for eqn in self.closed.jaxpr.eqns:
            for var, given in zip(eqn.invars, eqn.params.get("donated_invars", ()), strict=False):
                if given and var in self.closed.jaxpr.invars:
                    found.append(self.closed.jaxpr.invars.index(var))
        return tuple(found)

    def computes(self, argument: int, *, nan: bool) -> bool:
        """Tell whether something is computed of a bad argument.

        An Inf is at most compared where it is the best loss so far: what is less takes its place.
        """
        graph = self.graph

        def more(i: int) -> list[int]:
            readers = (x for x in graph.readers(i) if x is not None and (nan or x.name not in ENDS))
            outs = (j for node in readers for j in node.outs if j is not None)
            return [j for j in outs if nan or checkable(graph.values[j].aval)]

        writers = (graph.values[i].writer for i in walk(more(graph.arguments[argument]), more))
        made = (graph.nodes[i].name for i in writers if i is not None)
        return any(nan or name not in HANDS_ON for name in made)

    @property
    def restorable(self) -> dict[int, int]:
        """Give result -> argument, for the results that are a state come back.

        None where the dtype of one changes on the way, as weakly typed numbers do in a first
        step: the old state cannot stand in the place of the new.
        """
        ins, outs, found = self.closed.in_avals, self.closed.out_avals, self.back
        return found if all(ins[a].dtype == outs[i].dtype for i, a in found.items()) else {}

    # Readings.

    def pick(self, keep: Patterns, skip: Patterns, overrides: Iterable[str] = ()) -> None:
        """Choose the watched layers.

        Raises:
            ValueError: If a pattern matches no layer.
        """
        names = dict.fromkeys(self.layers.names())
        if keep is not None or skip is not None or overrides:
            names = choose(names, keep, skip, overrides)
        self.chosen = set(names)

    def watched(self, layer: str | None) -> bool:
        """Tell whether a layer is watched; what is outside of all is."""
        return layer is None or self.chosen is None or layer in self.chosen

    def inputs(self) -> list[ProbePoint]:
        """List what is read of the arguments."""
        found = []
        for i, leaf in enumerate(self.leaves):
            index = self.graph.arguments[i]
            if not checkable(self.graph.values[index].aval):
                continue
            if leaf.role == "input":
                found.append(ProbePoint(index, None, "input", leaf.name))
            elif self.settings.parameters and leaf.role in ("parameter", "buffer"):
                owner, kept = self.owner(leaf), leaf.role == "buffer"
                found.append(ProbePoint(index, owner, "parameter", leaf.short, 0, leaf.name, kept))
        return found

    def every_step(self) -> list[ProbePoint]:
        """List what is read of every step, in the order of execution."""
        settings = self.settings
        found = self.inputs() + self.points(backward=settings.gradients, layers=settings.layers)
        read = {point.value for point in found}
        return found + [point for point in self.choices() if point.value not in read]

    def choices(self) -> list[ProbePoint]:
        """List what is read for a NaN alone: behind it there is nothing that shows one."""
        points = () if self.settings.ends else self.layers.choices()
        return list({x.value: x for x in points if self.watched(x.layer)}.values())

    def points(self, *, backward: bool, layers: bool = True) -> list[ProbePoint]:
        """List what there is to read behind the inputs, in the order of execution."""
        values = self.graph.values
        outputs = self.layers.outputs() if layers else []
        arriving = self.layers.arriving() if backward and layers else []
        ranked = [(0, point) for point in outputs if self.watched(point.layer)]
        ranked += [(0, point) for point in self.layers.checked()]
        ranked += [(1, point) for point in arriving if self.watched(point.layer)]
        ranked += [(2, point) for point in self.gradients() if backward]
        keyed = [(values[point.value].writer or 0, rank, point) for rank, point in ranked]
        for i, index in enumerate(self.graph.results):
            value = values[index]
            # A result that only hands an argument on was read before it came in; what the code
            # itself writes there is meant.
            fresh = value.argument is None and not value.known and not self.graph.placed(index)
            if fresh and checkable(value.aval) and not self._tally(i):
                result = self._result(i, index)
                if backward or result.phase != "backward" or self.settings.backward:
                    nodes, _ = self.graph.origins(index)
                    last = max((node.index for node in nodes), default=0)
                    keyed.append((max(last, value.writer or 0), 3, result))
        return _numbered([point for *_, point in sorted(keyed, key=lambda each: each[:2])])

    def _tally(self, i: int) -> bool:
        """Tell whether a result only counts up what was read where it came from."""
        result, tallies = self.results[i], self.settings.tallies
        if result.source is None:
            return -1 in tallies and result.name.startswith("result[0]")
        return self.leaves[result.source].argument in tallies

    def _result(self, i: int, index: int) -> ProbePoint:
        result = self.results[i]
        value = self.graph.values[index]
        nodes, _ = self.graph.origins(index)
        if result.source is not None:
            leaf = self.leaves[result.source]
            layer = self.owner(leaf)
            if result.state:
                short = STATE if leaf.role == "state" else leaf.short
                carried = leaf.role == "buffer" or not self.differentiated
                short = CARRIED if leaf.role == "buffer" else short
                return ProbePoint(index, layer, "optimizer", short, 0, leaf.name, carried)
            return ProbePoint(index, layer, "backward", f"grad of {leaf.short}", 0, leaf.name)
        if any(node.backward for node in nodes) and all(node.backward for node in nodes):
            return ProbePoint(index, None, "backward", result.name)
        single = value.aval.size == 1
        label = "loss" if single and result.name == "result" else result.name
        return ProbePoint(index, None, "loss" if single else "forward", label)

    def owner(self, leaf: Leaf) -> str:
        """Give the layer that owns a weight: the longest known path in its name."""
        known = set(self.layers.names())
        name = leaf.name
        while name:
            name = name.rpartition(".")[0]
            if name in known:
                return name
        return leaf.name.rpartition(".")[0] if leaf.role != "state" else ""

    def gradients(self) -> Iterator[ProbePoint]:
        """Walk the gradients of the weights that an update works on."""
        for _, weight, leaf in self.weights():
            index = self.gradient_of(weight)
            if index is not None:
                tensor = f"grad of {leaf.short}"
                yield ProbePoint(index, self.owner(leaf), "backward", tensor, 0, leaf.name)

    def gradient_of(self, index: int) -> int | None:
        """Find the gradient behind a new weight: its own shape all the way.

        One that a loop adds up is what comes out of the loop, not what a round adds.
        """
        graph = self.graph
        shape = graph.values[index].aval.shape
        outside = {index: index}

        def more(i: int) -> list[int]:
            found = [j for j in graph.made_of(i) if graph.values[j].aval.shape == shape]
            for j in found:
                outside.setdefault(j, outside[i])
            return found

        for i in walk([index], more, near=True):
            value = graph.values[i]
            outside[i] = outside[i] if value.loops else i
            if value.writer is not None and graph.nodes[value.writer].backward:
                return outside[i]
        return None

    def spoilt(self, found: Mapping[int, Any]) -> list[int]:
        """List what tells of the first weight that an update spoilt."""
        graph = self.graph
        for _, index, leaf in self.weights():
            more = [graph.results[j] for j, _ in self.moments(leaf)]
            if any(j in found and found[j].word for j in (index, *more)):
                gradient = self.gradient_of(index)
                return [index, *([] if gradient is None else [gradient]), *more]
        return []

    def moments(self, leaf: Leaf) -> list[tuple[int, str]]:
        """List the results that are the optimizer's state for a weight, by short names."""
        found = []
        for i, source in self.back.items():
            other = self.leaves[source]
            if other.role == "state" and other.name.endswith("." + leaf.name):
                found.append((i, other.name.removesuffix("." + leaf.name).rpartition(".")[2]))
        return found

    # Programs.

    def operations(self) -> Operations:
        """Give the operations, found when they are first asked for."""
        if self._operations is None:
            self._operations = Operations(self.graph, self.layers)
        return self._operations

    def evaluate(
        self, plan: Plan, arrays: Any, consts: Any = None
    ) -> tuple[list[Any], list[Emission]]:
        """Evaluate the program under a plan.

        Raises:
            ShutError: If equations cannot be rebuilt: a program without them can be evaluated.
        """
        consts = self.closed.consts if consts is None else consts
        plan.callback = self.catcher
        for node in self.graph.nodes:
            caught = self.catcher is not None and node.name in CALLBACKS
            if caught or (plan.replaying and silent(node.eqn)):  # no loop prints a second time
                plan.open(node.path)
        outs, found = Evaluator(plan).run(self.closed.jaxpr, consts, arrays)
        if plan.shut:
            raise ShutError(plan.shut)
        return outs, found

    def want(
        self, plan: Plan, index: int, what: Any, at: tuple[int, ...] = (), number: int = 0
    ) -> None:
        """Ask for a reading of a value."""
        if what in EXACT and jax.default_backend() == "cpu" and self._loses(index):
            what = EXACT[what]
        value = self.graph.values[index]
        plan.add(value.path, value.var, Probe(index, what, at, number))

    def _loses(self, index: int) -> bool:
        """Tell whether a total of a value may lose a NaN: XLA's CPU kernels add up what max gives.

        From JAX 0.8 on, they do that in one pass with the elementwise operations before it, from
        4,096 numbers on, and their ``max`` and ``min`` give the other operand for a NaN.
        """
        graph = self.graph

        def name(i: int) -> str:
            writer = graph.values[i].writer
            return "" if writer is None else graph.nodes[writer].name

        def before(i: int) -> list[int]:
            return graph.made_of(i) if name(i) in ELEMENTWISE else []

        return any(name(i) in ("max", "min") for i in walk([index], before))


class Form(NamedTuple):
    """Hold a call taken apart.

    Attributes:
        fn: A function of arrays.
        inner: What it wraps.
        flat: Its arguments.
        objects: Those that change in place.
        key: What its program is made for.
    """

    fn: Callable[..., Any]
    inner: Callable[..., Any] | None
    flat: Flat
    objects: Objects | None
    key: Hashable

    def program(self, settings: Settings, arrays: list[Any] | None = None) -> Program:
        """Trace it; on other arrays, where they are given."""
        flat = self.flat if arrays is None else replace(self.flat, arrays=arrays)
        return Program(self.fn, flat, settings, self.objects, self.inner)


def form_of(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], static: set[Hashable],
    *, plain: bool,
) -> Form:  # fmt: skip
    """Take a call apart, as ``signature.flatten`` does, and what changes in place in it."""
    objects = objects_of(args, kwargs)
    made, inner = fn, None if inspect.isfunction(fn) else getattr(fn, "__wrapped__", None)
    if objects is not None:
        args, kwargs = objects.swapped(args, kwargs)
        made, inner = objects.pure(fn), None if inner is None else objects.pure(inner)
    flat = signature.flatten(args, kwargs, static, plain=plain)
    key = flat.key(), None if objects is None else objects.definition, settings()
    return Form(made, inner, flat, objects, signature.hashed(key))


def _numbered(points: list[ProbePoint]) -> list[ProbePoint]:
    """Number the outputs of a layer that has several."""
    places = [replace(point, value=None) for point in points]
    many, seen, found = Counter(places), Counter[ProbePoint](), []
    for point, place in zip(points, places, strict=True):
        named = f"{point.tensor}[{seen[place]}]" if many[place] > 1 else point.tensor
        seen[place] += 1
        found.append(replace(point, tensor=named))
    return found


def _device(arrays: list[Any]) -> Any:
    """Give the device of arrays that are each on one, None for several."""
    held = (x for x in arrays if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer))
    found = {device for x in held for device in x.devices()} or {jax.local_devices()[0]}
    return found.pop() if len(found) == 1 else None


def _alone(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer) or len(x.sharding.device_set) == 1


def _is_nan(x: Any) -> bool:
    return checkable(jax.typeof(x)) and jax.numpy.size(x) == 1 and bool(x != x)


def _fits(given: tuple[Any, Any], made: tuple[Any, Any]) -> bool:
    """Tell whether an array may be another come back: of its shape, and of its kind of numbers."""
    return given == made or (given[0] == made[0] and _float(given[1]) and _float(made[1]))


def _float(dtype: Any) -> bool:
    return bool(jax.numpy.issubdtype(dtype, jax.numpy.floating))


def _alike(structure: Any, item: Any) -> bool:
    return bool(tree_util.tree_structure(item) == structure)
