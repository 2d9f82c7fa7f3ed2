"""What this room says."""

from anynan._base.messages import Message

BUDGET_SPENT = Message(
    "budget-spent", "the budget of {seconds:g} s was spent before everything was tried"
)
INPUT_NOT_TRIED = Message(
    "input-not-tried", "{what} was not tried: {operation} would end the process"
)
