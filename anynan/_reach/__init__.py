"""What the code of a step can reach, and a second run of it would move: kept, and put back."""

from anynan._reach.began import Began
from anynan._reach.items import Exhausted, Items
from anynan._reach.kept import Kept, container_state, refill
from anynan._reach.reach import Reach
from anynan._reach.search import Holder, Kinds, fixed, is_own, named, weak

__all__ = [
    "Began", "Exhausted", "Holder", "Items", "Kept", "Kinds", "Reach", "container_state", "fixed",
    "is_own", "named", "refill", "weak",
]  # fmt: skip
