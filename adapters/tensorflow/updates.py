"""What happens around an optimizer's update of tracked weights."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from anynan._arrays.summary import Summary
from anynan.tensorflow import probes, readings
from anynan.tensorflow.frames import here, tensors
from anynan.tensorflow.traces import SCOPE, Block
from anynan.tensorflow.variables import raw, read

if TYPE_CHECKING:
    from anynan.tensorflow.session import Session


def _fine(session: "Session", graph: Any, checked: list[Any]) -> Any:
    """Tell, as a tensor, whether gradients are finite; what was read is not read again."""
    state = session.state()
    frame = state.gradients
    known: dict[int, int] = {}
    rows = None if frame is None or frame.graph is not graph else frame.rows
    if frame is not None and rows is not None:
        known = {id(x): i for i, x in enumerate(frame.tensors)}
    places = [known[id(x)] for x in checked if id(x) in known]
    changed = [x for x in checked if id(x) not in known]
    found = [] if not changed else [readings.all_fine(session.look(changed, xla=state.xla))]
    if places:
        found.append(readings.all_fine(tf.gather(rows, places)))
    return tf.reduce_all(found)


def writes(session: "Session", block: Block) -> bool:
    """Tell whether the graph that a block is read in updates a tracked weight."""
    if block.updates is None:
        found = (graph for graph, trace in session.traces.items() if block in trace.blocks)
        graph = next(found, None)
        block.updates = graph is not None and (
            bool(session.trace(graph).updates) or _assigns(session, graph)
        )
    return block.updates


def _assigns(session: "Session", graph: Any) -> bool:
    handles = {id(weight.handle) for weight in session.weights.trainable()}
    return any(
        id(outer) in handles and node.type.startswith("Assign")
        for outer, inner in graph.captures
        for node in inner.consumers()
    )


def state_of(session: "Session", weight: Any) -> dict[str, Summary]:
    """Measure what the optimizers keep for a weight, under their own names."""
    found = {}
    for optimizer in session.optimizers:
        mine = next((v for v in optimizer._trainable_variables if raw(v) is weight), None)
        if mine is None:
            continue
        prefix = f"{mine.path.replace('/', '_')}_"
        for variable in optimizer.variables:
            name = variable.path.rpartition("/")[2]
            held = raw(variable)
            if name.startswith(prefix) and held is not None:
                found[name.removeprefix(prefix)] = probes.measure(read(held))
    return found


def apply(
    session: "Session", run: Callable[..., Any], optimizer: Any, grads: Any, variables: Any
) -> Any:
    """Update the weights; where bad gradients are not wanted, under a condition."""
    state, graph = session.state(), here()
    known = optimizer._trainable_variables if variables is None else list(variables)
    if not any(session.weights.name(v) for v in known):
        return run(grads, variables)
    grads = list(grads)
    session.optimizers.add(optimizer)
    if graph is None:
        rows = session.tracker.judge.rows()
        if state.replaying or rows.skip:
            return None
        out = run(grads, known)
        state.updated = True
        if state.open and not state.depth and not state.held:
            session.end_step()
        return out
    scope = tf.get_current_name_scope()
    base = f"{scope}/{optimizer.name}" if scope else optimizer.name
    session.trace(graph).updates.add(base)
    spread = tf.distribute.get_strategy().num_replicas_in_sync > 1
    # A loss scaler drops bad updates itself, and replicas may not meet inside of a condition.
    if not session.gated or state.scaling or spread or state.replaying:
        return run(grads, known)
    if not optimizer.built:
        optimizer.build(known)
    checked = [x for grad in grads for _, x in tensors(grad, "")]
    if not checked:
        return run(grads, known)
    with tf.name_scope(SCOPE):
        fine = _fine(session, graph, checked)
    state.gradients = None

    def update() -> Any:
        run(grads, known)
        return tf.constant(True)

    tf.cond(fine, update, lambda: tf.constant(False))
    return None
