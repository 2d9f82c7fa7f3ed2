"""``anynan.watch``: the loop runs as before, and a bad batch is named with its field and row."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import anynan
from tests.backends import Space
from tests.failing import failure

NAN, INF = float("nan"), float("inf")


class Loader:
    """A loader as frameworks have them: sized, iterated again and again, with attributes."""

    dataset = "mine"

    def __init__(self, *batches: Any) -> None:
        self.batches, self.epoch = batches, 0

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def good() -> Any:
    return {"image": np.ones((4, 2, 2), np.float32), "label": np.arange(4), "id": ["a"] * 4}


def spoiled() -> Any:
    batch = good()
    batch["image"][1, 0, 0] = NAN
    batch["image"][3, 1, 1] = INF
    return batch


def test_the_batches_are_the_same_objects() -> None:
    loader = Loader(good(), [np.ones(3)], 7, "text", None)
    watched = anynan.watch(loader)
    for _ in range(2):
        assert all(a is b for a, b in zip(watched, loader.batches, strict=True))
    assert len(watched) == 5
    assert watched.dataset == "mine"
    watched.set_epoch(3)
    assert loader.epoch == 3
    assert not watched.events
    with pytest.raises(AttributeError, match="colour"):
        _ = watched.colour


def test_a_bad_batch_is_named_with_field_and_rows() -> None:
    seen: list[Any] = []
    with pytest.raises(anynan.NonFiniteError) as caught:
        seen.extend(anynan.watch(Loader(good(), good(), spoiled(), good()), "train"))
    event = caught.value.event
    found = (len(seen), event.step, event.phase, event.kind, event.tensor)
    assert found == (2, 2, "input", "nan", "train['image']")
    assert (event.cause.tag, event.cause.evidence) == ("bad_input", "2 of 4 rows are bad: 1, 3")
    assert str(caught.value).splitlines()[0] == "NaN came in with the batch of step 2"


def test_actions() -> None:
    loader = Loader(good(), spoiled(), good())
    assert len(list(anynan.watch(loader, action="record"))) == 3
    with pytest.warns(anynan.AnynanWarning, match="this batch is left out"):
        assert len(list(anynan.watch(loader, action="skip"))) == 2
    events: list[anynan.Event] = []
    assert len(list(anynan.watch(loader, action=events.append))) == 3
    assert [event.step for event in events] == [1]
    with pytest.warns(anynan.AnynanWarning) as record:
        assert len(list(anynan.watch(loader, action="warn"))) == 3
    assert [item.filename for item in record] == [__file__]


def test_minus_infinity_is_suspect_and_what_is_expected_is_let_in() -> None:
    mask = [np.array([0.0, -INF])]
    watched = anynan.watch(mask)
    assert len(list(watched)) == 1
    assert [event.severity for event in watched.events] == ["suspect"]
    with pytest.raises(anynan.NonFiniteError):
        list(anynan.watch(mask, policy=anynan.Policy(neginf="bad")))
    with anynan.expect(nan=True, posinf=True, reason="gaps"):
        assert len(list(anynan.watch([spoiled()]))) == 1


def test_every_library(space: Space) -> None:
    values = np.ones((5, 3), np.float32)
    values[2, 1] = NAN
    event = failure(list, anynan.watch([(space.array(np.ones(2)), space.array(values))]))
    assert event.tensor == "batch[1]"
    chunked = space.backend.library == "dask"
    said = "1 x NaN of 15 elements" if chunked else "1 of 5 rows is bad: 2"
    assert event.cause.evidence == said


@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        ((3,), {}, "yields batches, not int"),
        (([], 3), {}, "takes a string, not int"),
        (([],), {"action": "drop"}, "action='drop' is unknown"),
        (([],), {"policy": "strict"}, r"takes an anynan\.Policy"),
    ],
)
def test_wrong_arguments_are_named(args: Any, options: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        anynan.watch(*args, **options)


def test_the_report_has_the_line_that_allows_such_data() -> None:
    with pytest.raises(anynan.NonFiniteError) as caught:
        list(anynan.watch([np.array([1.0, np.nan])], "train"))
    text = " ".join(str(caught.value).split())
    line = 'policy=anynan.Policy(allow=anynan.Allow("*", "nan", "why", "input"))'
    assert line in text
    policy = eval(line.removeprefix("policy="))
    assert len(list(anynan.watch([np.array([1.0, np.nan])], "train", policy=policy))) == 1
