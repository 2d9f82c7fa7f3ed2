"""numpyro, blackjax, diffrax, optimistix: densities, samplers, solvers."""

from functools import partial

import blackjax
import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro
import optax
import optimistix
from numpyro import distributions as dist
from numpyro.infer import NUTS, SVI, Trace_ELBO, autoguide
from numpyro.infer.util import log_density

from tests.wild.jax_programs.program import Expected, Loop, program

KEY = jax.random.key(0)
X, Y = jax.random.normal(KEY, (8, 3)), jnp.ones(8)


def model(x, y=None, bug=""):
    w = numpyro.sample("w", dist.Normal(jnp.zeros(3), 1.0))
    s = numpyro.sample("s", dist.HalfCauchy(1.0))
    mu = x @ w
    if bug == "log":
        mu = jnp.log(mu)  # fault: log
    numpyro.sample("y", dist.StudentT(4.0, mu, s), obs=y)


@program("numpyro_density", log=Expected(("log",), "log_of_negative"))
def density(bug: str) -> Loop:
    def step(params, x, y):
        return log_density(partial(model, bug=bug), (x, y), {}, params)[0]

    return Loop(step, lambda: ({"w": jnp.array([0.1, 0.2, 0.3]), "s": jnp.float32(1)}, X, Y))


@program("numpyro_variational", log=Expected(("log",), "log_of_negative"))
def variational(bug: str) -> Loop:
    faulty = partial(model, bug=bug)
    guide = autoguide.AutoNormal(model)
    svi = SVI(faulty, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
    clean = SVI(model, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
    state = clean.init(KEY, X, Y)
    svi.constrain_fn = clean.constrain_fn  # numpyro refuses to begin with the fault

    return Loop(svi.update, lambda: (state, X, Y), lambda args, out: (out[0], *args[1:]))


@program("numpyro_nuts")
def numpyro_nuts(bug: str) -> Loop:
    kernel = NUTS(model, max_tree_depth=3)
    first = kernel.init(KEY, 0, None, (X, Y), {})
    return Loop(
        lambda state: kernel.sample(state, (X, Y), {}), lambda: (first,), lambda args, out: (out,)
    )


def sampled(algorithm) -> Loop:
    state = algorithm.init({"w": jnp.ones(3), "log_s": jnp.float32(0)})
    return Loop(
        algorithm.step,
        lambda: (KEY, state),
        lambda args, out: (jax.random.fold_in(args[0], 1), out[0]),
    )


def log_posterior(place):
    return log_density(model, (X, Y), {}, {"w": place["w"], "s": jnp.exp(place["log_s"])})[0]


@program("blackjax_nuts")
def nuts(bug: str) -> Loop:
    return sampled(blackjax.nuts(log_posterior, 0.01, jnp.ones(4), max_num_doublings=3))


class Slope(eqx.Module):
    mlp: eqx.nn.MLP
    bug: str = eqx.field(static=True)

    def __call__(self, t, y, args):
        slope = self.mlp(y)
        if self.bug == "start":
            slope = slope / (t - t)  # fault: start
        return slope


class Ode(eqx.Module):
    slope: Slope

    def __call__(self, ts, y0):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(self.slope),
            diffrax.Tsit5(),
            t0=ts[0],
            t1=ts[-1],
            dt0=ts[1] - ts[0],
            y0=y0,
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
            saveat=diffrax.SaveAt(ts=ts),
            max_steps=16,
            throw=False,
        ).ys


@program("diffrax_neural_ode", start=Expected(("divide",), "divide_by_zero", "slope"))
def neural_ode(bug: str) -> Loop:
    optimizer = optax.adam(1e-2)

    @eqx.filter_jit
    def step(model, state, ts, ys):
        def loss(model):
            return ((jax.vmap(model, (None, 0))(ts, ys[:, 0]) - ys) ** 2).mean()

        value, slopes = eqx.filter_value_and_grad(loss)(model)
        update, state = optimizer.update(slopes, state)
        return eqx.apply_updates(model, update), state, value

    def start():
        model = Ode(Slope(eqx.nn.MLP(2, 2, 8, 2, jnp.tanh, key=KEY), bug))
        state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        return model, state, jnp.linspace(0, 1, 5), jax.random.normal(KEY, (3, 5, 2))

    return Loop(
        step,
        start,
        lambda args, out: (out[0], out[1], *args[2:]),
        0,
        jitted=True,
        pick=("mlp", "layers", "weight"),
    )


@program("diffrax_fixed_steps", decay=Expected(("divide",), "divide_by_zero"))
def fixed_steps(bug: str) -> Loop:
    def field(t, y, rate):
        if bug == "decay":
            return -rate * y / (y - y)  # fault: decay
        return -rate * y

    def step(y0, rate):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(field), diffrax.Heun(), 0.0, 1.0, 0.25, y0, rate, max_steps=8
        ).ys

    return Loop(step, lambda: (jnp.arange(1.0, 4.0), jnp.float32(0.5)))


@program("optimistix_newton", log=Expected(("log",), "log_of_negative"))
def newton(bug: str) -> Loop:
    def residual(y, goal):
        r = (y - goal) * jnp.array([1.0, 2.0, 3.0])
        if bug == "log":
            return jnp.log(r)  # fault: log
        return r + 0.1 * y**3

    def step(y0, goal):
        solver = optimistix.Newton(1e-5, 1e-5)
        return optimistix.root_find(residual, solver, y0, goal, max_steps=20, throw=False).value

    return Loop(step, lambda: (jnp.ones(3), jnp.arange(3.0)))


@program("optimistix_least_squares", ratio=Expected(("divide",), "divide_by_zero"))
def least_squares(bug: str) -> Loop:
    def residual(y, data):
        xs, ys = data
        if bug == "ratio":
            ys = ys / (xs - xs)  # fault: ratio
        return y[0] * jnp.exp(-y[1] * xs) - ys

    def step(y0, data):
        solver = optimistix.LevenbergMarquardt(1e-4, 1e-4)
        return optimistix.least_squares(residual, solver, y0, data, max_steps=20, throw=False).value

    xs = jnp.linspace(0.1, 1, 6)
    return Loop(step, lambda: (jnp.ones(2), (xs, 2 * jnp.exp(-0.5 * xs))))
