"""``level="operation"``: the replay's watcher, on every step."""

from contextlib import ExitStack
from typing import TYPE_CHECKING

from anynan.lineage import Replay
from anynan.torch.replay import backward_seam, layer_stack, outside
from anynan.torch.rootcall import RootCall
from anynan.torch.watcher import Watcher

if TYPE_CHECKING:
    from anynan.torch.session import Session


class Operations:
    """Watch one step's operations from its first root call to its end."""

    def __init__(self, session: "Session", root: RootCall, entered: str | None) -> None:
        self.watcher = Watcher(outside(session, root))
        self._stack = ExitStack()
        for prefix, ref in session.models:
            model = ref()
            if model is not None:
                self._stack.enter_context(
                    layer_stack(session, prefix, model, self.watcher, root.calls)
                )
        if entered is not None:  # the root layer's own call began before its hooks were there
            self.watcher.layers.append((entered, 0))
        self._stack.enter_context(backward_seam(self.watcher, replaying=False))
        self._stack.enter_context(self.watcher)

    def finish(self) -> Replay:
        """Stop watching and hand over what was seen."""
        self._stack.close()
        blind = self.watcher.outside.get(-1)
        notes = [] if blind is None else [f"one operation could not be looked at: {blind[1]}"]
        return Replay(self.watcher.records, self.watcher.sinks, notes)
