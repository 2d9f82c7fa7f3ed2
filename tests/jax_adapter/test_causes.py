"""Every cause that JAX can produce, produced for real, at its line.

A fault is a function of one weighted array; the line at fault ends in ``# bad``. The rows that
JAX cannot produce stand in ``NOT_IN_JAX``, each with its reason.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import anynan
from anynan._diagnosis.causes import RULES

FAULTS = {}


def fault(tag, operation, x, *, phase="loss", kind="nan", dtype=jnp.float32, name=""):
    """List a function among the faults."""

    def add(fn):
        FAULTS[name or fn.__name__] = (fn, tag, operation, x, phase, kind, dtype)
        return fn

    return add


@fault("log_of_zero", "log", [[0, 200]], kind="neginf")
def entropy(x):
    p = jax.nn.softmax(x, axis=-1)
    logs = jnp.log(p)  # bad
    return -(p * logs).sum()


@fault("log_of_negative", "log", [0.5, -0.3])
def log_of_negative(x):
    return jnp.log(x).sum()  # bad


@fault("logit_of_zero_or_one", "logit", [0.5, 1.0], kind="posinf")
def logit(x):
    return jax.scipy.special.logit(x).sum()  # bad


@fault("divide_by_zero", "divide", [[1, 2], [0, 0]])
def shares(x):
    return (x / x.sum(-1, keepdims=True)).sum()  # bad


@fault("cosine_of_zero_vector", "divide", [[1, 2], [0, 0]])
def normalize(x):
    lengths = jnp.linalg.norm(x, axis=-1, keepdims=True)
    cosine_similarity = x / lengths  # bad
    return cosine_similarity.sum()


@fault("epsilon_underflow", "divide", [[1, 2], [0, 0]], dtype=jnp.float16)
def lost_epsilon(x):
    return (x / (x.sum(-1, keepdims=True) + 1e-8)).sum()  # bad


@fault("inf_over_inf", "divide", [1, 2])
def placed_quotient(x):
    both = jnp.where(x > 0, jnp.inf, x)
    return (both / both).sum()  # bad


@fault("remainder_by_zero", "remainder", [1, 0])
def remainder(x):
    return jnp.remainder(x + 1, x).sum()  # bad


@fault("sqrt_of_negative", "sqrt", [1, -4])
def root(x):
    return jnp.sqrt(x).sum()  # bad


@fault("power_domain", "pow", [1, 0], kind="posinf")
def power(x):
    return (x**-0.5).sum()  # bad


@fault("inverse_trig_domain", "acos", [1, 1.5])
def angle(x):
    return jnp.arccos(x).sum()  # bad


@fault("lgamma_pole", "lgamma", [1, 0], kind="posinf")
def gamma(x):
    return jax.lax.lgamma(x).sum()  # bad


@fault("trig_of_inf", "sin", [1, 2])
def sine(x):
    return jnp.sin(jnp.where(x > 1, jnp.inf, x)).sum()  # bad


@fault("singular_matrix", "cholesky", [[1, 2], [2, 1]])
def factor(x):
    return jnp.linalg.cholesky(x).sum()  # bad


@fault("softmax_of_inf", "softmax", [1, 2])
def softmax_of_inf(x):
    scores = jnp.where(x > 1, jnp.inf, x)
    return jax.nn.softmax(scores)[0]  # bad


@fault("softmax_fully_masked", "softmax", [[1, 2], [3, 4]])
def masked(x):
    scores = jnp.where(x > 2, -jnp.inf, x)
    return jax.nn.softmax(scores, axis=-1).sum()  # bad


@fault("inf_minus_inf", "subtract", [1, 2])
def shifted(x):
    scores = jnp.where(x > 0, -jnp.inf, x)
    return (scores - scores.max()).sum()  # bad


@fault("zero_times_inf", "multiply", [1, 2])
def masked_by_multiplying(x):
    return (jnp.where(x > 1, jnp.inf, x) * jnp.array([1.0, 0.0])).sum()  # bad


@fault("normalisation_of_inf", "var", [1, 2])
def variance_of_inf(x):
    return jnp.var(jnp.where(x > 1, jnp.inf, x))  # bad


@fault("variance_of_one", "var", [1])
def variance(x):
    return jnp.var(x, ddof=1)  # bad


@fault("empty_mean", "mean", [1, 2])
def empty(x):
    return jnp.mean(x[2:])  # bad


@fault("exp_overflow", "exp", [1, 100], kind="posinf")
def grown(x):
    return jnp.exp(x).sum()  # bad


@fault("overflow_in_dtype", "matmul", [[300, 300], [300, 300]], kind="posinf", dtype=jnp.float16)
def scores(x):
    return (x @ x).sum()  # bad


@fault("where_gradient_trap", "sqrt", [1, 0], phase="backward")
def trap(x):
    return jnp.where(x > 0, jnp.sqrt(x), 0.0).sum()  # bad


@fault("norm_gradient_at_zero", "vector_norm", [0, 0], phase="backward")
def norm(x):
    return jnp.linalg.norm(x)  # bad


@fault("sqrt_gradient_at_zero", "sqrt", [1, 0], phase="backward", kind="posinf")
def root_of_zero(x):
    return jnp.sqrt(x).sum()  # bad


@fault("power_gradient_domain", "pow", [1, 0], phase="backward", kind="posinf")
def power_at_zero(x):
    return (x**0.3).sum()  # bad


@fault("inverse_trig_gradient_at_one", "acos", [0.5, 1], phase="backward", kind="neginf")
def angle_at_one(x):
    return jnp.arccos(x).sum()  # bad


@fault("atan2_origin_gradient", "atan2", [0, 0], phase="backward")
def direction(x):
    return jnp.arctan2(x[0], x[1])  # bad


@fault("eigen_gradient_degenerate", "eigh", [[1, 0], [0, 1]], phase="backward")
def eigenvectors(x):
    return jnp.linalg.eigh(x + x.T)[1].sum()  # bad


@fault("exp_gradient_overflow", "exp", [1, 80], phase="backward", kind="posinf")
def steep(x):
    y = jnp.exp(x)  # bad
    return ((y - jax.lax.stop_gradient(y)) * 1e10).sum()


@fault("log_gradient_at_zero", "xlogy", [0.5, 0], phase="backward")
def entropy_without_forward_inf(x):
    y = x + 0
    return -jax.scipy.special.xlogy(x, y).sum()  # bad


@fault("slope_overflow", "divide", [1, 1e-30], phase="backward", kind="neginf")
def slope(x):
    return (1 / x).sum()  # bad


@fault("singular_matrix_gradient", "qr", [[0, 0], [0, 0]], phase="backward")
def factors(x):
    return jnp.linalg.qr(x)[1].sum()  # bad


NOT_IN_JAX = {
    "product_gradient_at_zero": "the gradient of a product multiplies the other factors",
    "lgamma_gradient_at_pole": "the forward result is +Inf already, which is lgamma_pole",
    "logit_gradient_at_bound": "the forward result is Inf already, which is logit_of_zero_or_one",
    "optimizer_state_overflow": "an infinite second moment makes the update 0, so no weight goes "
    "bad of it",
    "optimizer_step_too_large": "an update is named at its operation, such as overflow_in_dtype",
    "weight_written": "a weight comes in as an argument: bad_parameter",
    "overwritten_input": "arrays of JAX cannot be written to",
    "uninitialised_memory": "every array of JAX is filled",
    "running_statistics_bad": "batch statistics are arrays like the weights: bad_parameter",
    "loss_scale_floor": "JAX has no loss scaler",
    "loss_scale_too_high": "JAX has no loss scaler",
    "target_class_masked": "a loss is made of primitives: the gather or the sum is named",
    "binary_cross_entropy_saturated": "a loss is made of primitives: its logarithm is named",
    "kl_div_domain": "a loss is made of primitives: its logarithm is named",
    "cdist_gradient_at_zero": "a distance is a square root of a sum: norm_gradient_at_zero",
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_cause_is_named_at_its_line(name):
    fn, tag, operation, x, phase, kind, dtype = FAULTS[name]
    step = jax.value_and_grad(lambda params, x: fn(x * params["w"]))
    with pytest.raises(anynan.NonFiniteError) as caught:
        anynan.jax.track(step)({"w": jnp.ones((), dtype)}, jnp.array(x, dtype))
    event = caught.value.event
    assert event.operation is not None, str(caught.value)
    found = (event.cause.tag, event.operation.name, event.phase, event.kind)
    assert found == (tag, operation, phase, kind), str(caught.value)
    assert event.cause.evidence
    lines, first = inspect.getsourcelines(fn)
    marked = [first + i for i, line in enumerate(lines) if line.rstrip().endswith("# bad")]
    assert (event.operation.source.file, [event.operation.source.line]) == (__file__, marked)


ELSEWHERE = {  # produced by the tests of this folder's other files
    "bad_input", "bad_parameter", "index_out_of_range", "optimizer_epsilon_underflow",
}  # fmt: skip


def caught(fn, *args, steps=1, **options):
    tracked = anynan.jax.track(fn, **options)
    with pytest.raises(anynan.AnomalyError) as error:
        for _ in range(steps):
            args = (*tracked(*args), *args[2:])
    return error.value.event.cause.tag


def test_a_bad_label():
    def loss(params, x, y):
        return ((x * params["w"] - y) ** 2).mean()

    with pytest.raises(anynan.NonFiniteError) as error:
        anynan.jax.track(loss)({"w": jnp.ones(2)}, jnp.ones(2), jnp.array([1, np.nan]))
    assert error.value.event.cause.tag == "bad_label"


def update(rate):
    optimizer = optax.sgd(rate)

    def step(params, opt_state, x):
        grads = jax.grad(lambda params: ((x * params["w"]) ** 2).sum())(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    params = {"w": jnp.ones(2)}
    return step, params, optimizer.init(params), jnp.ones(2)


def test_a_learning_rate_that_is_too_high():
    policy = anynan.Policy(large=1e6, bad=("large",))
    tag = caught(*update(2.0), steps=40, policy=policy)
    assert tag in ("exploding_gradient", "beyond_limit")


def train(rate=1e-2):
    optimizer = optax.adam(rate)

    def step(params, opt_state, x):
        grads = jax.grad(lambda params: (x * params["w"]).sum())(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    params = {"w": jnp.ones(2)}
    return step, params, optimizer.init(params)


def test_an_optimizer_state_that_came_in_bad():
    step, params, state = train()
    state = (state[0]._replace(mu={"w": jnp.full(2, jnp.nan)}), *state[1:])
    assert caught(step, params, state, jnp.ones(2)) == "optimizer_state_bad"


def test_a_gradient_that_vanishes_or_jumps():
    step, params, state = train()
    policy = anynan.Policy(vanishing=1e-6, bad=("vanishing",))
    assert caught(step, params, state, jnp.full(2, 1e-9), policy=policy) == "vanishing_gradient"
    tracked = anynan.jax.track(
        step, policy=anynan.Policy(spike=10, bad=("spike",)), action="record"
    )
    for size in (1, 1, 1, 1, 1, 1, 100):
        tracked(params, state, jnp.full(2, float(size)))
    (event,) = tracked.events
    assert (event.kind, event.cause.tag, event.step) == ("spike", "exploding_gradient", 6)


def test_a_divergence():
    tag = caught(*update(3e4), steps=40, stats=("absmax",))
    assert tag in ("learning_rate_divergence", "exploding_gradient")


def test_a_step_beyond_the_dtype():
    def step(params, opt_state, x):
        return {"w": params["w"] - x * 1e38}, opt_state

    params = {"w": jnp.ones(2)}
    assert caught(step, params, (), jnp.full(2, 10.0)) == "overflow_in_dtype"


def test_a_constant_of_the_code():
    def fn(x):
        return jnp.where(x > 0, jnp.inf, x).sum()

    with pytest.raises(anynan.NonFiniteError) as error:
        anynan.jax.track(fn)(jnp.ones(2))
    assert error.value.event.cause.tag == "written_constant"


def test_every_row_is_produced_or_has_its_reason():
    made = {tag for _, tag, *_ in FAULTS.values()} | ELSEWHERE | set(NOT_IN_JAX)
    made |= {
        "bad_label", "learning_rate_divergence", "exploding_gradient", "beyond_limit",
        "written_constant", "vanishing_gradient", "optimizer_state_bad",
    }  # fmt: skip
    assert {rule.tag for rule in RULES} == made
