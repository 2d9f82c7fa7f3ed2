"""Run each test of array-api-tests in a tracked function: a plug-in of their pytest."""

import os
import random
import warnings
from typing import Any

import anynan


def pytest_runtest_setup() -> None:
    """Draw the same examples with and without anynan: ``.example()`` is not derandomized."""
    random.seed(0)


if os.environ.get("ANYNAN_WILD_LEVEL"):
    warnings.simplefilter("ignore", anynan.AnynanWarning)

    def pytest_pyfunc_call(pyfuncitem: Any) -> bool:
        names = pyfuncitem._fixtureinfo.argnames
        arguments = {name: pyfuncitem.funcargs[name] for name in names}
        level: Any = os.environ["ANYNAN_WILD_LEVEL"]
        test = anynan.track(lambda: pyfuncitem.obj(**arguments), action="record", level=level)
        test()
        return True
