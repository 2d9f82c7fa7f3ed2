"""What a framework calls old: in its own code it fails no test, in ours it does."""

import re
import warnings
from pathlib import Path

import pytest

ADAPTERS = Path(__file__).parents[1] / "adapters"
# They warn in the framework's own name, whoever calls them: PyTorch since 2.14, NumPy since 2.5.
OLD = re.compile(r"torch\.jit\.(script|trace|load|save)\(|(?<!self)\.shape = ")


def said_of(module: str) -> None:
    warnings.warn_explicit("it is old", DeprecationWarning, f"{module}.py", 1, module)


@pytest.mark.parametrize("module", ["torch.jit._script", "jax._src.core", "gast.gast", "keras"])
def test_what_a_framework_says_of_itself_fails_no_test(module: str) -> None:
    said_of(module)


@pytest.mark.parametrize("module", ["anynan.torch.tracking", "tests.torch_adapter", "torching"])
def test_what_is_said_of_our_code_is_an_error(module: str) -> None:
    with pytest.raises(DeprecationWarning):
        said_of(module)


def test_no_adapter_calls_what_frameworks_are_known_to_give_up() -> None:
    for path in ADAPTERS.rglob("*.py"):
        assert not OLD.search(path.read_text(encoding="utf-8")), path
