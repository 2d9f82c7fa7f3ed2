"""Which layers a program has, and which of its values leave them."""

import sys
from collections.abc import Iterator

from anynan._base.walks import walk
from anynan._readings.readings import ProbePoint
from anynan.events import Phase
from anynan.jax.graphs.bodies import lanes
from anynan.jax.graphs.graph import Graph, Node
from anynan.jax.graphs.stacks import LAYER
from anynan.jax.read.probes import CHECKED, LOSS, checkable, single


class Layers:
    """Find the layer of every operation of a program."""

    def __init__(self, graph: Graph, roots: frozenset[str]) -> None:
        self.graph = graph
        roots = roots | linen_names() | {LAYER}
        methods = linen_methods()
        named = [_clean(node.place.names, methods) for node in graph.nodes]
        if any(names[:1] == (LAYER,) for names in named):
            named = [names if names[:1] == (LAYER,) else () for names in named]
        first = {names[0] for names in named if names and names[0] in roots}
        # One model alone needs no name in front of its layers.
        alone = first if len(first) == 1 else set()
        # What a loop has no need to repeat is taken out of it, and loses the scopes around it.
        known = {names[1:] for names in named if names and names[0] in alone}
        named = [(*alone, *names) if names and names in known else names for names in named]
        self._around: dict[str, tuple[str, ...]] = {}
        self.paths: list[str | None] = [self._path(names, alone) for names in named]
        self.calls = self._count()

    def _path(self, names: tuple[str, ...], alone: set[str]) -> str | None:
        """Join scopes to a path, and remember which layers are around it, inner ones first."""
        if not names:
            return None
        model = names[0] in alone
        names = names[1:] if model else names
        path = ".".join(names)
        if path not in self._around:
            # Scopes without a model around them have no layer that is the model itself.
            least = -1 if model else 0
            outer = [".".join(names[:count]) for count in range(len(names), least, -1)]
            self._around[path] = tuple(dict.fromkeys(outer))
        return path

    def around(self, path: str | None) -> tuple[str, ...]:
        """Give a layer and those around it, inner ones first."""
        return () if path is None else self._around[path]

    def names(self) -> list[str]:
        """List every layer path, outer layers before inner ones."""
        found: dict[str, None] = {}
        for path in self.paths:
            for outer in reversed(self.around(path)):
                found.setdefault(outer)
        return list(found)

    def of(self, node: Node) -> str | None:
        """Give the layer of an operation."""
        return self.paths[node.index]

    def phase(self, node: Node) -> Phase:
        """Give the phase an operation runs in."""
        if node.backward:
            return "backward"
        if node.after:
            return "optimizer"
        return "loss" if self.of(node) is None else "forward"

    def _count(self) -> list[dict[str, int]]:
        """Count the calls of each layer: a layer that was left and is entered again."""
        calls: dict[str, int] = {}
        before: set[str] = set()
        values = self.graph.values
        found: list[dict[str, int]] = []
        for node, path in zip(self.graph.nodes, self.paths, strict=True):
            now = set(self.around(path))
            # An array of constants stands anywhere.
            if not node.backward and not all(values[i].known for i in node.ins):
                for layer in now - before:
                    calls[layer] = calls.get(layer, -1) + 1
                before = now
            found.append({layer: max(calls.get(layer, 0), 0) for layer in now})
        return found

    def call(self, node: Node, layer: str | None) -> int:
        """Give which call of a layer an operation belongs to."""
        return 0 if layer is None else self.calls[node.index].get(layer, 0)

    def outputs(self) -> Iterator[ProbePoint]:
        """Walk the values that leave a layer in the forward pass, in order."""
        for node in self.graph.nodes:
            path = self.of(node)
            if node.backward or node.after or path is None:
                continue
            outs = [i for i in node.outs if i is not None and self._float(i)]
            for index in outs:
                if self.graph.placed(index):  # whoever works with it is asked
                    continue
                goes = self._goes(index)
                for layer in self.around(path):
                    if any(not inside(other, layer) for other in goes):
                        yield ProbePoint(index, layer, "forward", "output", self.call(node, layer))

    def checked(self) -> list[ProbePoint]:
        """List what the user's own code asked to be checked, and losses by their mark."""
        found = []
        for node in self.graph.nodes:
            name = node.eqn.params.get("name") if node.name == "name" else None
            if name == CHECKED:
                path = self.of(node)
                call = self.call(node, path)
                found.append(ProbePoint(node.ins[0], path, "value", "checked value", call))
            elif name == LOSS and not node.backward and self._float(node.ins[0]):
                found.append(ProbePoint(node.ins[0], None, "loss", "loss"))
        return found

    def choices(self) -> Iterator[ProbePoint]:
        """Walk where a NaN leaves no trace: what is chosen from, a loss that nobody takes."""
        loss: int | None = None
        for node in self.graph.nodes:
            (out, *more), differentiated = node.outs or (None,), node.place.differentiated
            if differentiated and node.backward and loss is not None:
                yield ProbePoint(loss, None, "loss", "loss")
                loss = None
            elif differentiated and not (more or out is None or any(self.graph.readers(out))):
                loss = out if self._float(out) and single(self.graph.values[out].aval) else loss
            ended = any(lanes(eqn) for eqn in node.chain)  # such lanes may compute anything
            if node.name in ("argmax", "argmin") and not (node.backward or ended):
                path, tensor = self.of(node), f"what {node.name} took"
                if self._float(node.ins[0]):
                    call = self.call(node, path)
                    yield ProbePoint(node.ins[0], path, "forward", tensor, call)

    def _goes(self, index: int) -> set[str | None]:
        """Give the layers in which a forward value is read."""
        found: set[str | None] = set()
        for reader in self.graph.readers(index):
            if reader is None or not reader.backward:
                found.add(None if reader is None else self.of(reader))
        return found

    def arriving(self) -> Iterator[ProbePoint]:
        """Walk the gradients that come into a layer by its output, in order."""
        seen: set[tuple[int, str]] = set()
        for node in self.graph.nodes:
            path = self.of(node)
            if not node.backward or path is None:
                continue
            for index in node.ins:
                if not self._float(index):
                    continue
                nodes, _ = self.graph.origins(index)
                makers = [self.of(maker) for maker in nodes if maker.place.backward]
                for layer in self.around(path) if makers else ():
                    if (index, layer) not in seen and all(not inside(m, layer) for m in makers):
                        seen.add((index, layer))
                        yield ProbePoint(index, layer, "backward", "grad", self.call(node, layer))

    def _float(self, index: int) -> bool:
        return checkable(self.graph.values[index].aval)


def inside(path: str | None, layer: str) -> bool:
    """Tell whether a path is a layer or inside it."""
    return path is not None and (path == layer or not layer or path.startswith(layer + "."))


def _clean(names: tuple[str, ...], methods: frozenset[str]) -> tuple[str, ...]:
    """Leave out the method that linen adds to a module's name, as in ``encoder.decode``."""
    found = []
    for name in names:
        base, _, method = name.rpartition(".")
        found.append(base if base and method in methods else name)
    return tuple(found)


def _linen() -> list[type]:
    linen = sys.modules.get("flax.linen")
    return list(walk([] if linen is None else [linen.Module], lambda kind: kind.__subclasses__()))


def linen_names() -> frozenset[str]:
    """Give the class names of linen modules: what a model without a name is called."""
    return frozenset(kind.__name__ for kind in _linen())


def linen_methods() -> frozenset[str]:
    """Give the names of the methods of linen modules."""
    return frozenset(name for kind in _linen() for name in vars(kind) if not name.startswith("__"))
