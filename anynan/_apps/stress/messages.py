"""What this room says."""

from anynan._base.messages import Message

BUDGET_SPENT = Message(
    "budget-spent", "the budget of {seconds:g} s was spent before everything was tried"
)
NOTHING_TO_CHANGE = Message(
    "nothing-to-change",
    "no input can be changed: give the arrays as arguments, or in dicts, lists, tuples or "
    "dataclasses",
)
INPUT_NOT_TRIED = Message(
    "input-not-tried", "{what} was not tried: {operation} would end the process"
)
