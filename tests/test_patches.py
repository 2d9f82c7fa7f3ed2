"""What was changed comes back, and what is somebody else's by then stays."""

from collections.abc import Callable
from typing import Any

from anynan._base.patches import Patches, through


class Base:
    def run(self) -> str:
        """Give a name."""
        return "base"


class Child(Base):
    pass


def louder(real: Callable[..., str]) -> Callable[..., str]:
    return lambda *args: real(*args) + "!"


def test_an_inherited_method_is_inherited_again() -> None:
    with Patches() as patches:
        patches.change(Child, "run", louder)
        assert Child().run() == "base!"
        assert Base().run() == "base"
        assert Child.run.__doc__ == "Give a name."
    assert "run" not in vars(Child)
    assert Child().run() == "base"


def test_changed_once_only() -> None:
    with Patches() as patches:
        patches.change(Base, "run", louder)
        patches.change(Base, "run", louder)
        assert (patches.holds(Base, "run"), patches.holds(Child, "run")) == (True, False)
        assert Base().run() == "base!"


def test_somebody_elses_stays() -> None:
    busy: Any = type("Busy", (Base,), {})
    with Patches() as patches:
        patches.change(busy, "run", louder)
        ours = busy.run
        theirs = busy.run = lambda self: ours(self) + "?"
    assert vars(busy)["run"] is theirs
    assert busy().run() == "base!?"


def test_a_metaclass_has_no_say() -> None:
    class Shut(type):
        def __setattr__(cls, name: str, *value: Any) -> None:
            raise AttributeError(name)

        __delattr__ = __setattr__

    class Closed(Base, metaclass=Shut):
        pass

    with Patches() as patches:
        patches.change(Closed, "run", louder)
        assert Closed().run() == "base!"
    assert Closed().run() == "base"


class Session:
    def __init__(self, word: str, *, paused: bool = False) -> None:
        self.word, self.paused = word, paused

    def around(self, run: Callable[..., str], owner: Base, *args: Any) -> str:
        assert isinstance(owner, Base)
        return f"{self.word}({run(*args)})"


def test_a_call_goes_through_every_session_and_the_first_is_innermost() -> None:
    sessions: list[Session] = []
    with Patches() as patches:
        patches.change(Base, "run", through(lambda: sessions, "around"))
        assert Base().run() == "base"
        sessions += [Session("inner"), Session("idle", paused=True), Session("outer")]
        assert Base().run() == "outer(inner(base))"  # asked at each call
        assert Child().run() == "outer(inner(base))"
    assert Base().run() == "base"
