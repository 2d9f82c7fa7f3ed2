"""haiku and jraph: transformed functions, state, graphs."""

import haiku as hk
import jax
import jax.numpy as jnp
import jraph
import optax

from tests.wild.jax_programs.program import Expected, Loop, program

KEY = jax.random.key(0)


@program("haiku_cnn", norm=Expected(("divide",), "divide_by_zero"))
def cnn(bug: str) -> Loop:
    def forward(x):
        x = hk.BatchNorm(True, True, 0.9)(hk.Conv2D(8, 3)(x), True)
        x = hk.nets.MLP([16, 8], name="mlp")(hk.Flatten()(jax.nn.relu(x)))
        if bug == "norm":
            x = x / jnp.linalg.norm(x * 0.0, axis=-1, keepdims=True)  # fault: norm
        return hk.Linear(3, name="out")(x)

    net, optimizer = hk.transform_with_state(forward), optax.sgd(0.01, 0.9, nesterov=True)

    def step(params, state, velocity, rng, x, y):
        def loss(params):
            out, new = net.apply(params, state, rng, x)
            return optax.softmax_cross_entropy_with_integer_labels(out, y).mean(), new

        (value, new), slopes = jax.value_and_grad(loss, has_aux=True)(params)
        update, velocity = optimizer.update(slopes, velocity, params)
        return optax.apply_updates(params, update), new, velocity, value

    def start():
        x = jax.random.normal(KEY, (4, 6, 6, 1))
        params, state = net.init(KEY, x)
        return params, state, optimizer.init(params), KEY, x, jnp.array([0, 1, 2, 1])

    return Loop(
        step,
        start,
        lambda args, out: (*out[:3], *args[3:]),
        0,
        pick=("mlp/~/linear_1", "w"),
    )


def graph() -> jraph.GraphsTuple:
    one = jraph.GraphsTuple(
        nodes=jax.random.normal(KEY, (4, 3)),
        edges=jax.random.normal(KEY, (5, 2)),
        senders=jnp.array([0, 1, 2, 3, 0]),
        receivers=jnp.array([1, 2, 1, 0, 2]),
        n_node=jnp.array([4]),
        n_edge=jnp.array([5]),
        globals=jnp.ones((1, 1)),
    )
    return jraph.pad_with_graphs(one, 8, 8, 2)


def mean_of_edges(data, segments, count):
    total = jraph.segment_sum(data, segments, count)
    return total / jraph.segment_sum(jnp.ones_like(data), segments, count)  # fault: alone


@program("jraph_network", alone=Expected(("divide",), "divide_by_zero"))
def network(bug: str) -> Loop:
    def forward(graph):
        net = jraph.GraphNetwork(
            jraph.concatenated_args(lambda x: jax.nn.relu(hk.Linear(4, name="edge")(x))),
            jraph.concatenated_args(lambda x: jax.nn.relu(hk.Linear(4, name="node")(x))),
            jraph.concatenated_args(lambda x: hk.Linear(2, name="glob")(x)),
            aggregate_edges_for_nodes_fn=mean_of_edges if bug == "alone" else jraph.segment_mean,
        )
        return net(graph)

    net, optimizer = hk.without_apply_rng(hk.transform(forward)), optax.adam(1e-2)

    def step(params, state, graph):
        def loss(params):
            mask = jraph.get_graph_padding_mask(graph)
            out = net.apply(params, graph).globals
            return jnp.where(mask[:, None], out**2, 0.0).mean()

        value, slopes = jax.value_and_grad(loss)(params)
        update, state = optimizer.update(slopes, state)
        return optax.apply_updates(params, update), state, value

    def start():
        params = net.init(KEY, graph())
        return params, optimizer.init(params), graph()

    return Loop(step, start, lambda args, out: (out[0], out[1], args[2]), 0, pick=("node", "w"))
