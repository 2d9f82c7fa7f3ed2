"""What is known of the weights: when they were finite, what updated them, what is intended."""

from anynan._diagnosis.evidence import BadParameter
from anynan._steps.subject import Subject


class Weights:
    """Remember what a report says about the time at which a weight turned bad.

    Attributes:
        clean: The last step at whose start every weight and buffer was finite.
        updates: The last steps that updated them.
        trained: Whether there was an update at all.
        corrupted: A step whose bad gradients were seen only after the update.
        intended: Buffers that hold NaN or Inf by design, for all that is known, and since when.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.clean: int | None = None
        self.updates: list[int] = []
        self.trained = False
        self.corrupted: int | None = None
        self.intended: dict[str, int] = {}

    def known_clean(self, step: int) -> None:
        """Note that every weight and buffer was finite at the start of this step."""
        self.clean = step
        self.corrupted = None
        self.updates.clear()

    def updated(self, step: int) -> None:
        """Note an optimizer update."""
        self.trained = True
        self.updates.append(step)
        del self.updates[:-2]

    @property
    def unread(self) -> str:
        """Say why an update may have used a bad gradient, empty if none can have."""
        options = self._subject.options
        if not options.backward:
            return "Advanced(backward=False) reads no gradient"
        if self.corrupted is not None:
            return (
                f"the gradients of step {self.corrupted} were bad, which "
                f"Advanced(read={options.read}) saw only after the update"
            )
        return ""

    def bad(self) -> list[BadParameter]:
        """List the weights that are bad, and the buffers that may not be."""
        found = self._subject.adapter.bad_weights()
        return [item for item in found if item.name not in self.intended]

    def bad_buffers(self) -> set[str]:
        """Name the buffers that hold bad values."""
        return {item.name for item in self._subject.adapter.bad_parameters() if item.buffer}
