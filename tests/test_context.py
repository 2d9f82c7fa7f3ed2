"""Where the program is: scopes, what is expected, whether it replays."""

import threading
from typing import Any

import pytest

import anynan
from anynan._base import context


@anynan.scope("step")
def decorated() -> str | None:
    return context.scope_path()


def test_scopes_nest_and_end() -> None:
    assert context.scope_path() is None
    with anynan.scope("decoder") as outer:
        assert outer == context.scope_path() == "decoder"
        with anynan.scope("block.attn") as inner:
            assert inner == context.scope_path() == "decoder.block.attn"
        assert [decorated(), decorated()] == ["decoder.step"] * 2
    assert context.scope_path() is None


def test_a_scope_needs_a_name_and_expect_a_kind() -> None:
    with pytest.raises(ValueError, match="needs a name: the empty path is the model itself"):
        anynan.scope("").__enter__()
    for kinds in ({}, {"nan": False}, {"reason": "gaps"}):
        with pytest.raises(ValueError, match=r"expect\(\) names nothing: say what is legitimate"):
            anynan.expect(**kinds).__enter__()


def test_expectations_add_up_and_the_inner_reason_holds() -> None:
    with anynan.expect(nan=True, reason="outer"), anynan.expect(posinf=True, reason="in"):
        assert context.expectations() == {"nan": "outer", "posinf": "in"}
        with anynan.expect(nan=True, reason="inmost"):
            assert context.expectations() == {"nan": "inmost", "posinf": "in"}
    assert context.expectations() is None


def test_another_thread_is_outside() -> None:
    seen: list[Any] = []

    def look() -> None:
        seen.extend([context.scope_path(), context.expectations(), anynan.replaying()])

    with anynan.scope("a"), anynan.expect(nan=True), context.replay_context():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join(5)
    assert seen == [None, None, False]
