"""The harness itself: a named backend must run, and a marker must say why."""

from pathlib import Path

import pytest

from tests.backends import Backend, parse, read_marker

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).with_name("conftest.py")
# Which libraries a machine has is not for these tests to know.
ABSENT = """
    import pytest
    from tests.backends import Backend

    @pytest.fixture(autouse=True)
    def nothing_is_installed(monkeypatch):
        monkeypatch.setattr(Backend, "load", lambda self: __import__("absent"))

    def test_x(xp): pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    # In a process of its own: pytester's in-process runs would import NumPy a second time.
    monkeypatch.setenv("PYTHONPATH", str(CONFTEST.parent.parent))
    pytester.makeconftest(CONFTEST.read_text())
    return pytester


def _run(suite: pytest.Pytester, *options: str) -> pytest.RunResult:
    return suite.runpytest_subprocess("-p", "no:hypothesispytest", *options)


def test_the_list_is_read_in_order_and_once() -> None:
    assert parse("torch, numpy,torch") == [Backend.TORCH, Backend.NUMPY]


@pytest.mark.parametrize("text", ["numpi", "", "numpy,,nope"])
def test_an_unknown_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is unknown; choose from numpy, "):
        parse(text)


@pytest.mark.tier(2)
def test_backends_run_and_markers_are_obeyed(suite: pytest.Pytester) -> None:
    suite.makepyfile("""
        import pytest
        from tests.backends import Backend

        def test_x(space): assert float(space.array([2.0])[0]) == 2.0

        @pytest.mark.skip_backend(Backend.NUMPY, reason="why")
        def test_skipped(backend): assert backend is Backend.NUMPY_READONLY

        @pytest.mark.xfail_backend(Backend.NUMPY, reason="why")
        def test_known(backend): assert backend is Backend.NUMPY_READONLY

        @pytest.mark.xfail_backend(Backend.NUMPY, reason="why")
        def test_mended(backend): pass
    """)
    result = _run(suite, "--backends=numpy,numpy:readonly")
    # The marker on a test that passes has outlived its reason: that is the failure.
    result.assert_outcomes(passed=5, skipped=1, xfailed=1, failed=1)


@pytest.mark.tier(2)
def test_a_missing_backend_is_skipped_unless_it_is_named(suite: pytest.Pytester) -> None:
    suite.makepyfile(ABSENT)
    assert set(_run(suite).parseoutcomes()) == {"skipped"}
    result = _run(suite, "--backends=torch")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*--backends names torch, which cannot run*"])


@pytest.mark.parametrize(
    ("marker", "words"),
    [
        (pytest.mark.skip_backend("numpy", reason="why"), "takes one Backend, not"),
        (pytest.mark.skip_backend(reason="why"), "takes one Backend, not"),
        (pytest.mark.xfail_backend(Backend.NUMPY), "needs reason='...'"),
        (pytest.mark.skip_backend(Backend.NUMPY, reason=" "), "needs reason='...'"),
        (pytest.mark.skip_backend(Backend.NUMPY, reason="a", strict=False), "nothing else"),
    ],
)
def test_a_marker_without_backend_or_reason_is_refused(
    marker: pytest.MarkDecorator, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        read_marker(marker.mark)
