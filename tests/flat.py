"""The options of ``track`` as one flat dict, for tests that choose among all of them."""

from typing import Any

import anynan
from anynan.options import ADVANCED


def split(options: dict[str, Any]) -> dict[str, Any]:
    """Put those that are ``Advanced``'s into one."""
    chosen = {name: value for name, value in options.items() if name not in ADVANCED}
    further = {name: value for name, value in options.items() if name in ADVANCED}
    return chosen | ({"advanced": anynan.Advanced(**further)} if further else {})
