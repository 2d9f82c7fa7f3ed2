"""The pytest plugin: a test in which something went bad fails with the report.

It is loaded by every run of pytest, so it imports nothing else of anynan until it is asked for
with ``--anynan`` or ``anynan = true``.
"""

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from anynan._everywhere import Found

_watched = pytest.StashKey[tuple["Found", Callable[[], None]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what turns it on."""
    said = "fail a test in which a model makes a NaN or an Inf"
    parser.getgroup("anynan").addoption("--anynan", action="store_true", help=said)
    parser.addini("anynan", type="bool", default=False, help=said)


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker."""
    config.addinivalue_line(
        "markers",
        "anynan(allow, reason): what a test under --anynan may make: 'nan', 'posinf', 'neginf' "
        "or several of them; and why",
    )


@pytest.fixture
def anynan_stress() -> Callable[..., Any]:
    """Give what hunts as ``anynan.stress`` does, and fails the test by what is open then.

    What is outside of the example's range fails no test, nor does what ``accept=`` names.
    """

    def hunt(target: Any, *example: Any, **options: Any) -> Any:
        import anynan

        report = anynan.stress(target, *example, **options)
        if report.open:
            pytest.fail(str(report), pytrace=False)
        return report

    return hunt


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Begin to watch, before the fixtures of the test are made."""
    if item.config.getoption("--anynan") or item.config.getini("anynan"):
        from anynan._everywhere import Found, watch_everything
        from anynan.options import Options

        found = Found()
        end = watch_everything(Options(action="record", policy=_policy(item)), found)
        item.stash[_watched] = found, end
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Judge what the test did; one that failed by itself only gets a section more."""
    try:
        result = yield
    except BaseException:
        if report := _report(item):
            item.add_report_section("call", "anynan", report)
        raise
    if report := _report(item):
        pytest.fail(report, pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Watch no longer."""
    watched = item.stash.get(_watched, None)
    if watched is not None:
        del item.stash[_watched]
        watched[1]()
    return (yield)


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> None:  # noqa: ARG001
    """End the traceback of an anomaly in the test's own line."""
    errors: Any = sys.modules.get("anynan.errors")
    if call.excinfo is not None and errors is not None:
        error = call.excinfo.value
        if isinstance(error, errors.AnomalyError):
            from anynan._base.tracebacks import shorten

            shorten(error)
            if error.__traceback__ is not None:
                call.excinfo = pytest.ExceptionInfo.from_exception(error)


def _policy(item: pytest.Item) -> Any:
    """Give the policy of a test: what its markers allow is allowed."""
    from anynan._readings.policy import Allow, Policy

    allowed = []
    for marker in item.iter_markers("anynan"):
        if marker.args or set(marker.kwargs) != {"allow", "reason"}:
            pytest.fail("@pytest.mark.anynan: it takes allow= and reason=", pytrace=False)
        kinds, reason = marker.kwargs["allow"], marker.kwargs["reason"]
        try:
            kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
            allowed += [Allow("*", kind, reason) for kind in kinds]
        except (TypeError, ValueError) as error:
            pytest.fail(f"@pytest.mark.anynan: {error}", pytrace=False)
    return Policy(allow=tuple(allowed))


def _report(item: pytest.Item) -> str:
    """Say what went bad in a test, empty if nothing did."""
    watched = item.stash.get(_watched, None)
    if watched is None:
        return ""
    from anynan._reports.report import render, render_line

    found = watched[0]
    found.close()
    bad = found.bad()
    return "\n\n".join([*map(render, bad[:1]), *map(render_line, bad[1:10])])
