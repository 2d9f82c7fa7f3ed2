"""Act together with the other processes of a distributed run.

A rank that raised inside its forward pass would leave the others waiting in a collective. So
what is bad is held until the optimizer is about to update, which all ranks reach: there one
all-reduce of a flag tells whether any of them found something, and all act on one event.
"""

import itertools
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from anynan._diagnosis.evidence import ReplayError
from anynan._diagnosis.lineage import Replay, trace
from anynan._readings.readings import Reading, Site
from anynan._readings.step import Step
from anynan._steps.ranks import Claim, choose, confirm, excuse, with_others
from anynan._steps.tracked import Tracked
from anynan.errors import LostRankError
from anynan.events import Event
from anynan.options import environment
from anynan.torch.call.models import Models
from anynan.torch.call.state import State
from anynan.torch.distributed.links import Link, Unlinked, bounded, rehearsal
from anynan.torch.messages import RANK_LOST, RANKS_APART
from anynan.torch.read.probes import nonfinite
from anynan.torch.replay.collectives import SENT, world
from anynan.torch.replay.operands import flat
from anynan.torch.replay.replay import Replays

_ROUNDS = 100
_numbers = itertools.count()


class Ranks:
    """Delay raising until all ranks have exchanged their findings.

    Args:
        tracker: What judges, on this rank.
        models: What is watched.
        replays: What runs calls again.
    """

    def __init__(self, tracker: Tracked, models: Models, replays: Replays) -> None:
        self._tracker, self._models, self._replays = tracker, models, replays
        self.number = next(_numbers)
        self._wanted = tracker.judge.options.across_ranks
        self._link: Link | None = None
        self._joined = False
        self._alone = 0
        self._agreed: weakref.ref[Step] | None = None
        self._owed = False
        self._waiting: list[Step] = []
        self._refused: ReplayError | None = None
        self._rehearsal: State | None = None

    # What a session tells.

    @property
    def joined(self) -> bool:
        """Tell whether other ranks wait for this one's answer."""
        return self._joined and not self._alone

    def begin(self, state: State, rows: Step) -> None:
        """Decide whether what this step finds is held, as it opens and at each of its calls."""
        if not self._wanted:
            return
        group = world()
        self._joined = group is not None
        if group is None or not torch.is_grad_enabled():
            return
        if self._link is None or self._link.world() is not group:
            self._link = Link(group)
        rows.hold()
        if self._owed:
            self._agree(state, rows)

    def before_update(self, state: State, rows: Step) -> None:
        """Agree on the step with the other ranks, before any weight changes."""
        if self._joined and not self._alone:
            with state.aside():
                self._agree(state, rows)

    def end(self, state: State, rows: Step) -> None:
        """Settle what a step that was not agreed on has left, at its end."""
        if not rows.holding or self._alone or self._has_agreed(rows):
            return
        if not state.saw_backward:
            self._act_alone(rows)
        elif torch.is_grad_enabled():
            self._agree(state, rows)
        else:
            # An evaluation ends the step, and only some ranks may run it: agreed on later.
            self._owed = True
            self._wait(rows)

    def concluded(self, state: State, rows: Step) -> None:
        """Keep what turned up too late for its step's agreement for the next one."""
        if rows.held is None:
            return
        if self._alone:
            self._act_alone(rows)
        elif state.rows is not rows or self._has_agreed(rows):
            self._wait(rows)

    @contextmanager
    def alone(self, state: State | None = None) -> Iterator[None]:
        """Act without the other ranks inside, as where only this one may come by."""
        self._alone += 1
        try:
            yield
            while self._waiting:
                self._act_alone(self._waiting.pop(0))
            if state is not None and state.rows is not None and state.rows.held is not None:
                self._act_alone(state.rows)
        finally:
            self._alone -= 1

    def leave(self) -> None:
        """Tell the other ranks that this one stops tracking."""
        if self._link is not None:
            self._link.close()
            self._link = None
        self._joined = False

    def rehearses(self, state: State) -> bool:
        """Turn away while a pipeline only learns the shapes of its stages."""
        if self._rehearsal is None and rehearsal():
            self._rehearsal = state
            state.idle = True
        return self._rehearsal is state

    def rehearsed(self, state: State) -> bool:
        """Look again once it has; tell whether it had."""
        if self._rehearsal is not state:
            return False
        self._rehearsal = None
        state.idle = False
        return True

    # Agreeing.

    def _has_agreed(self, rows: Step) -> bool:
        return self._agreed is not None and self._agreed() is rows

    def _wait(self, rows: Step) -> None:
        if rows.held is not None and not any(rows is other for other in self._waiting):
            self._waiting.append(rows)

    def _agree(self, state: State, rows: Step) -> None:
        link = self._link
        if link is None:
            return
        self._agreed, self._owed = weakref.ref(rows), False
        found = [*self._waiting, *([rows] if rows.held is not None else [])]
        try:
            if link.any(bool(found)):
                self._waiting.clear()
                self._settle(state, rows, found, link)
        except Unlinked as why:
            self._unlink(str(why))
            self._act_on(found)
        except LostRankError as error:
            self._unlink("", quiet=bool(found))
            self._act_on(found, f"the other ranks could not be informed: {error}")
            if (environment() or self._tracker.judge.options.action) in ("raise", "skip"):
                raise
            self._tracker.judge.say(RANK_LOST(error=str(error)))

    def _settle(self, state: State, rows: Step, found: list[Step], link: Link) -> None:
        """Choose the story, run it again on every rank, and act on it."""
        tracker = self._tracker
        for _ in range(_ROUNDS):
            found = [item for item in found if item.held is not None]
            mine = found[0] if found else None
            claim = None if mine is None else self._claim(state, mine, link.rank)
            facts = link.gather(self._facts(state, mine, claim))
            claims = [Claim.from_dict(fact["claim"]) for fact in facts if fact["claim"]]
            chosen = choose(claims, staged=_staged(facts))
            if chosen is None:
                return
            again = set(chosen.roots)
            if again and facts[chosen.rank]["replay"]:
                together = all(again <= set(fact["roots"]) for fact in facts)
                if together:
                    shown = link.gather(self._replay(state, mine, chosen))
                    chosen = confirm(chosen, claims, shown)
            event, excused = None, None
            if chosen.rank == link.rank and mine is not None:
                event, excused = self._release(mine)
            told = link.gather({"event": event and event.to_dict(), "excused": excused})
            self._refused = None
            answer = told[chosen.rank]
            if answer["event"] is not None:
                # The rank it began on keeps the event as it made it.
                event = event or Event.from_dict(answer["event"])
                event = with_others(event, chosen, claims)
                for item in found:
                    item.defer(None)
                tracker.judge.accept(mine if mine is not None else rows, event)
                return
            if answer["excused"] is not None:
                key, reason = answer["excused"]
                for item in found:
                    if item.held is not None:
                        excuse(tracker.judge, item, tuple(key), reason)

    def _claim(self, state: State, rows: Step, rank: int) -> Claim | None:
        held = rows.held
        if held is None:
            return None
        reading = held.reading
        if reading is None:
            return Claim(rank, rows.number, held.event.order, held.event.phase)
        roots = self._roots_of(state, reading) if state.rows is rows else ()
        came_in = reading.phase == "input"
        if reading.phase == "backward":
            came_in = any(
                grad is not None and nonfinite(grad)
                for root in state.living_roots()
                for grad in root.gradients.values()
            )
        return Claim(
            rank, rows.number, reading.order, reading.phase, reading.site.parameter, came_in, roots
        )

    def _facts(self, state: State, rows: Step | None, claim: Claim | None) -> dict[str, Any]:
        held = None if rows is None else rows.held
        wanted = (
            held is not None
            and held.reading is not None
            and held.replayed is None
            and self._tracker.judge.wants_replay(held.reading, held.kind)
        )
        roots = state.living_roots()
        inputs = [x for r in roots for x in flat([*r.args, *r.kwargs.values()])]
        program = repr([(name, tuple(p.shape)) for name, p in self._models.parameters()])
        return {
            "claim": None if claim is None else claim.to_dict(),
            "replay": wanted,
            "roots": sorted(self._calls(state)),
            "fed": any(x.requires_grad for x in inputs),
            "program": zlib.crc32(program.encode()),
        }

    def _release(self, rows: Step) -> tuple[Event | None, tuple[list[Any], str] | None]:
        held = rows.held
        event = self._tracker.judge.release(rows)
        if event is not None or held is None or held.reading is None:
            return event, None
        key = held.reading.key(held.kind)
        reason = self._tracker.judge.monitor.downgraded.get(key)
        return None, None if reason is None else (list(key), reason)

    # Alone.

    def _act_alone(self, rows: Step, *notes: str) -> None:
        rows.release()
        event = self._tracker.judge.release(rows)
        if event is not None:
            self._tracker.judge.accept(rows, replace(event, notes=(*event.notes, *notes)))

    def _act_on(self, found: list[Step], *notes: str) -> None:
        self._waiting.clear()
        for rows in found:
            self._act_alone(rows, *notes)

    def _unlink(self, why: str, *, quiet: bool = False) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
        self._wanted = self._joined = False
        if why and not quiet:
            self._tracker.judge.say(RANKS_APART(why=why))

    # Replays.

    def replayed(self) -> None:
        """Hand on why the replay that all ranks joined did not come about.

        Raises:
            ReplayError: If it did not.
        """
        if self._refused is not None:
            raise self._refused

    def _replay(self, state: State, mine: Step | None, chosen: Claim) -> str:
        """Run the failing call again on every rank; tell whether it went bad here, and how."""
        held = None if mine is None else mine.held
        site = Site(-1, None, chosen.phase, "output", "", None, 0.0)
        reading = Reading(chosen.step, chosen.order, 0, site, 0.0, 0.0)
        try:
            with bounded():
                calls = self._calls(state)
                roots = [calls[i] for i in chosen.roots]
                result = self._replays.again(state, reading, roots, together=True)
        except ReplayError as error:
            self._refused = error
            return ""
        except Exception as error:  # noqa: BLE001  what was found must not be lost
            text = f"the second run failed: {type(error).__name__} {error}".rstrip()
            self._refused = ReplayError(text)
            return ""
        if mine is not None and held is not None:
            result = self._behind(state, held.reading) or result
            mine.defer(replace(held, replayed=result))
        if not result.sinks and not result.incoming:
            return ""
        outside = trace(result.records, result.sinks).outside
        return "sent" if outside is not None and outside.label == SENT else "made"

    def _behind(self, state: State, reading: Reading | None) -> Replay | None:
        """Run what this rank computed behind the model again, where that made it bad."""
        if reading is None or state.in_step or reading.phase not in ("loss", "backward"):
            return None
        found = self._replays.tails.replay(state.thread.ident, reading, None)
        return found if found is not None and found.made else None

    def _calls(self, state: State) -> dict[int, Any]:
        """Give the step's calls that can still be run again, by their number."""
        if self._models.fn is not None:
            return {} if state.root is None else {0: state.root}
        found = {i: ref() for i, (_, ref) in enumerate(state.step_roots)}
        return {i: root for i, root in found.items() if root is not None}

    def _roots_of(self, state: State, reading: Reading) -> tuple[int, ...]:
        """Number the calls that a replay of this reading runs."""
        calls = self._calls(state)
        if self._models.fn is not None:
            return tuple(calls)
        if reading.phase == "backward":
            known = state.roots.get(reading.order)
            return tuple(i for i, root in calls.items() if known is None or root is known)
        before = [i for i, (start, _) in enumerate(state.step_roots) if start <= reading.order]
        return tuple(before[-1:]) if before and before[-1] in calls else ()


def _staged(facts: list[dict[str, Any]]) -> bool:
    """Tell whether the ranks run stages of a pipeline, not copies of one program.

    A stage's input carries a gradient back to the stage before; the first one's does not.
    """
    fed = {fact["fed"] for fact in facts}
    return len(fed) > 1 or any(fact["program"] != facts[0]["program"] for fact in facts)
