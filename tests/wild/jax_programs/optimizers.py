"""optax: optimizers on a small loss, several in one step."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.wild.jax_programs.program import Loop, program

X = jax.random.normal(jax.random.key(0), (6, 4))
OPTIMIZERS = {
    "moments": {
        "adabelief": lambda: optax.adabelief(1e-3),
        "adamax": lambda: optax.adamax(1e-3),
        "adan": lambda: optax.adan(1e-3),
        "amsgrad": lambda: optax.amsgrad(1e-3),
        "lamb": lambda: optax.lamb(1e-3),
        "nadam": lambda: optax.nadam(1e-3),
        "novograd": lambda: optax.novograd(1e-3),
        "prodigy": lambda: optax.contrib.prodigy(1e-1),
        "radam": lambda: optax.radam(1e-3),
        "yogi": lambda: optax.yogi(1e-3),
    },
    "others": {
        "adadelta": lambda: optax.adadelta(1e-1),
        "adafactor": lambda: optax.adafactor(1e-3),
        "adagrad": lambda: optax.adagrad(1e-2),
        "fromage": lambda: optax.fromage(1e-2),
        "lars": lambda: optax.lars(1e-3),
        "lion": lambda: optax.lion(1e-3),
        "muon": lambda: optax.contrib.muon(1e-3),
        "optimistic": lambda: optax.optimistic_gradient_descent(1e-2),
        "rprop": lambda: optax.rprop(1e-3),
        "sgd": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
        "sm3": lambda: optax.sm3(1e-2),
    },
    "wrapped": {
        "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
        "lbfgs": optax.lbfgs,
        "masked": lambda: optax.masked(optax.adam(1e-2), {"w": True, "b": False}),
        "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
        "multi_transform": lambda: optax.multi_transform(
            {"moved": optax.adam(1e-2), "still": optax.set_to_zero()},
            {"w": "moved", "b": "still"},
        ),
        "plateau": lambda: optax.chain(
            optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1)
        ),
        "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-3),
    },
}


def loss(params, x):
    return ((x @ params["w"] + params["b"] - 1) ** 2).mean()


def together(names: dict[str, Any]) -> Loop:
    made = {name: optax.with_extra_args_support(make()) for name, make in names.items()}

    def step(params, states, x):
        values = {}
        params, states = dict(params), dict(states)
        for name, optimizer in made.items():
            values[name], slopes = jax.value_and_grad(loss)(params[name], x)
            update, states[name] = optimizer.update(
                slopes,
                states[name],
                params[name],
                value=values[name],
                grad=slopes,
                value_fn=lambda p: loss(p, x),
            )
            params[name] = optax.apply_updates(params[name], update)
        return params, states, values

    def start():
        first = {"w": jax.random.normal(jax.random.key(1), (4, 4)) / 2, "b": jnp.zeros(4)}
        params = {name: jax.tree.map(jnp.copy, first) for name in made}
        return params, {name: made[name].init(params[name]) for name in made}, X

    return Loop(step, start, lambda args, out: (out[0], out[1], args[2]))


@program("optax_moments")
def moments(bug: str) -> Loop:
    return together(OPTIMIZERS["moments"])


@program("optax_others")
def others(bug: str) -> Loop:
    return together(OPTIMIZERS["others"])


@program("optax_wrapped")
def wrapped(bug: str) -> Loop:
    return together(OPTIMIZERS["wrapped"])
