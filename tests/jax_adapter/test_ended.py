"""What a program computed outside of any jit, before an exception ended it, is told."""

import os

import jax
import jax.numpy as jnp
import pytest

from tests.jax_adapter.watching import watched


def kernel(x):
    return jnp.exp(x)


class Data:
    """Ask for a shape, as a class of a library's does."""

    def __init__(self, x):
        assert x.shape
        self.x = x


jax.tree_util.register_pytree_node(Data, lambda d: ((d.x,), None), lambda _, x: Data(*x))


@pytest.mark.parametrize(
    ("line", "name", "text"),
    [
        ("scale = x / (x - x)", "divide", "scale = x / (x - x)"),
        ("scale = jnp.log(-Data(x).x)", "log", "scale = jnp.log(-Data(x).x)"),
        ("scale = kernel(x * 100)", "exp", "return jnp.exp(x)"),
        ("checked(jnp.sqrt(-x)); scale = x", "sqrt", "checked(jnp.sqrt(-x)); scale = x"),
    ],
)
@pytest.mark.parametrize("action", ["record", "raise"])
def test_an_exception_of_a_function_that_a_library_called_names_what_it_computed(
    line, name, text, action, library, tmp_path
):
    path = tmp_path / "sampling.py"
    path.write_text(f"def model(x):\n    y = x * 2\n    {line}\n    return checked(scale * y)\n")
    os.utime(path, (1, 1))  # a file that was written since may say something else
    scope = {"jnp": jnp, "kernel": kernel, "Data": Data, "checked": library["checked"]}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    watching = watched(action=action, level="step")
    found = next(watching)
    with pytest.raises(ValueError, match="invalid scale") as caught:
        library["sampled"](scope["model"], jnp.full(2, 2.0))
    found.ended_by = caught.value
    list(watching)
    (event,) = found.bad()
    assert (event.operation.name, event.operation.source.text) == (name, text)
    assert event.cause.tag != "unknown"


@pytest.mark.parametrize("way", ["compiled", "sampled"])
def test_an_exception_that_comes_of_no_number_is_left_alone(way, library):
    def model(x):
        y = calls.append(x) or jnp.log(x)
        return (y @ jnp.ones((5, 2))).sum()

    calls, watching = [], watched(action="record", level="step")
    found = next(watching)
    before = found.added  # TensorFlow's watcher, where it is imported
    with pytest.raises(TypeError, match="dot_general") as caught:
        library["sampled"](library[way](model) if way != "sampled" else model, jnp.ones(3))
    found.ended_by = caught.value
    list(watching)
    assert (len(calls), found.events, found.harms, found.added) == (1, [], [], before)


def test_what_a_function_computed_that_has_returned_is_told_and_not_called_again(library):
    def alone(x):
        calls.append(x)
        return jnp.log(-x)

    calls, watching, x = [], watched(action="record", level="step"), jnp.ones(2)
    found = next(watching)
    with pytest.raises(ValueError, match="invalid scale") as caught:
        library["checked"](alone(x))
    found.ended_by = caught.value
    list(watching)
    assert len(calls) == 1
    assert [event.operation.name for event in found.bad()] == ["log"]
    assert found.bad()[0].operation.source.text == "return jnp.log(-x)"
