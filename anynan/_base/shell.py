"""What a running IPython says of itself; it is never imported for that."""

import sys
from typing import Any


def shell() -> Any:
    """Give the IPython shell that runs this program, None without one."""
    ipython = sys.modules.get("IPython")
    find = getattr(ipython, "get_ipython", None)
    return None if find is None else find()


def cell(file: str) -> str:
    """Name the cell that a file stands for, as IPython does; empty if it is none.

    Args:
        file: As a frame names it.
    """
    try:
        name = shell().compile.format_code_name(file)
    except Exception:  # noqa: BLE001  no shell, or an older one: the file says it, too
        return ""
    return " ".join(name) if name else ""
