"""Programs on four devices of a CPU: pmap, shard_map, data that is laid out by its sharding."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.wild.jax_programs.program import Expected, Loop, descend, program

KEY = jax.random.key(0)


def weights() -> dict[str, jax.Array]:
    return {"w": jax.random.normal(KEY, (4, 4)) / 2, "b": jnp.zeros(4)}


def mesh() -> Mesh:
    return Mesh(jax.devices()[:4], ("d",))


def laid_out(value, *names):
    return jax.device_put(value, NamedSharding(mesh(), PartitionSpec(*names)))


def averaged(params, x, bug, axis):
    def loss(params):
        h = x @ params["w"] + params["b"]
        if bug == "shard":
            h = h / jnp.where(lax.axis_index(axis) == 2, 0.0, 1.0)  # fault: shard
        return (h**2).mean()

    value, slopes = jax.value_and_grad(loss)(params)
    return descend(params, lax.pmean(slopes, axis)), lax.pmean(value, axis)


@program("pmap", shard=Expected(("divide",), "divide_by_zero"))
def pmapped(bug: str) -> Loop:
    def start():
        copies = jax.tree.map(lambda x: jnp.stack([x] * 4), weights())
        return copies, jax.random.normal(KEY, (4, 6, 4))

    step = jax.pmap(partial(averaged, bug=bug, axis="d"), axis_name="d")
    return Loop(step, start, lambda args, out: (out[0], args[1]), 0, jitted=True, pick=("w",))


@program("shard_map", shard=Expected(("divide",), "divide_by_zero"))
def shard_mapped(bug: str) -> Loop:
    step = jax.shard_map(
        partial(averaged, bug=bug, axis="d"),
        mesh=mesh(),
        in_specs=(PartitionSpec(), PartitionSpec("d")),
        out_specs=(PartitionSpec(), PartitionSpec()),
    )

    def start():
        return weights(), laid_out(jax.random.normal(KEY, (8, 4)), "d")

    return Loop(step, start, lambda args, out: (out[0], args[1]), 0, pick=("w",))


@program("sharded_data", log=Expected(("log",), "log_of_zero"))
def sharded_data(bug: str) -> Loop:
    def step(params, x):
        def loss(params):
            h = lax.with_sharding_constraint(
                jax.nn.relu(x @ params["w"]), NamedSharding(mesh(), PartitionSpec("d"))
            )
            if bug == "log":
                h = jnp.log(h)  # fault: log
            return ((h @ params["w"].T) ** 2).mean()

        value, slopes = jax.value_and_grad(loss)(params)
        return descend(params, slopes), value

    def start():
        return laid_out(weights()), laid_out(jax.random.normal(KEY, (8, 4)), "d")

    return Loop(step, start, lambda args, out: (out[0], args[1]), 0, pick=("w",))
