"""Lightning's Trainer owns the step: a callback that tracks it."""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Unpack

import torch

from anynan._base.context import replaying
from anynan._base.patches import Patches
from anynan._everywhere import Found
from anynan._monitored import Monitored
from anynan._steps.tracked import inside
from anynan.errors import AnomalyError
from anynan.events import Event
from anynan.options import MonitorOptions, Options
from anynan.torch.session.function import FunctionSession
from anynan.torch.tracking import track
from anynan.tracker import Tracker

try:
    import lightning.pytorch as _lightning
except ImportError:
    msg = 'anynan.lightning needs Lightning: pip install "anynan[lightning]"'
    raise ImportError(msg) from None


def _evaluating(
    word: str, loop: Callable[[Any], Any]
) -> tuple[Callable[..., None], Callable[..., None], Callable[..., None], Callable[..., None]]:
    """Give the hooks of one kind of evaluation: on its start, each batch's two ends, its end.

    Args:
        word: The kind.
        loop: Gives the Trainer's loop that runs it.
    """

    def start(monitor: "Monitor", trainer: Any, pl_module: Any) -> None:
        """Watch the evaluation."""
        monitor._evaluate(trainer, pl_module, loop(trainer), word)

    def batch_start(
        monitor: "Monitor", trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *rest: Any
    ) -> None:
        """Note where the evaluation is."""
        monitor._evaluates(trainer, word, batch_idx)

    def batch_end(
        monitor: "Monitor", trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int,
        *rest: Any,
    ) -> None:  # fmt: skip
        """Read what the evaluation gave."""
        monitor._evaluates(trainer, word, batch_idx, outputs)

    def end(monitor: "Monitor", trainer: Any, pl_module: Any) -> None:
        """Watch the training again."""
        monitor._evaluated(trainer, word)

    return start, batch_start, batch_end, end


def _validation_loop(trainer: Any) -> Any:
    fits = trainer.state.fn == "fit"
    return trainer.fit_loop.epoch_loop.val_loop if fits else trainer.validate_loop


class Monitor(Monitored, _lightning.Callback):
    """Watch a module while ``fit`` trains it, and name operation and line in ``training_step`` too.

    It also watches ``validation_step``, in ``fit`` and alone, ``test_step`` and ``predict_step``.

    Args:
        action: ``"stop"`` drops the bad step's update, warns with the report, saves a checkpoint
            and ends the training after this batch; ``"raise"``, ``"warn"``, ``"record"`` and
            ``"skip"`` are those of ``track``. An evaluation updates no weight, so
            ``"stop"`` and ``"skip"`` warn there, and the Trainer continues.
        save: Whether ``"stop"`` and ``"raise"`` save ``anynan-step=N.ckpt`` below the Trainer's
            ``default_root_dir``. No bad step has updated its weights.
        **options: The other options of ``anynan.torch.track``.

    Attributes:
        tracker: What watches the training, and holds what was seen, once ``fit`` has begun.
        evaluations: What watches each evaluation that has begun, by the name of its step.
        saved: Path of the checkpoint that was saved, empty if there is none.

    Raises:
        ValueError: If the action is unknown.

    Example:
        >>> import anynan
        >>> monitor = anynan.lightning.Monitor(action="stop")
        >>> # lightning.Trainer(callbacks=[monitor]).fit(module, loader)
        >>> monitor.events
        ()
    """

    def __init__(
        self, action: str = "stop", *, save: bool = True, **options: Unpack[MonitorOptions]
    ) -> None:
        super().__init__(action, options)
        self.save, self.saved = save, ""
        self.evaluations: dict[str, Tracker] = {}
        self._taken = _Taken()

    @property
    def events(self) -> tuple[Event, ...]:
        """Return what was seen, oldest first."""
        trackers = [*filter(None, [self.tracker]), *self.evaluations.values()]
        pairs = (
            zip(inside(each).judge.record.turns, each.events, strict=False) for each in trackers
        )
        return tuple(event for _, event in sorted(chain(*pairs), key=itemgetter(0)))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch: devices are final, and no weight has changed."""
        self._end()
        # One call of it is one batch: forward, backward, and the update if there is one.
        loops = trainer.fit_loop.epoch_loop
        automatic = pl_module.automatic_optimization
        loop = loops.automatic_optimization if automatic else loops.manual_optimization
        progress = loop.optim_progress if automatic else loop.optim_step_progress
        tracker = self._begin(track, _batch(loop.run, progress, trainer, pl_module))
        _put(tracker, loop, "run", pl_module, "training_step")

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *rest: Any
    ) -> None:
        """Note where the training is."""
        if self.tracker is not None:
            self.tracker.where = f"epoch {trainer.current_epoch}, batch {batch_idx} of fit"

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Read the loss: a NaN in it may send back finite gradients."""
        # A loss scaler has scaled it already.
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        if (
            self.tracker is not None
            and inside(self.tracker).judge.adapter is not None
            and not scaled
        ):
            _session(self.tracker).read_loss(loss)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        """Stop after a bad batch, if that is wanted."""
        if self._stops():
            if not trainer.should_stop:
                self._save(trainer)
            trainer.should_stop = True

    def _evaluate(self, trainer: Any, module: Any, loop: Any, word: str) -> None:
        """Watch the batches of an evaluation, and no longer those of the training around it."""
        name, method = f"{word}_step", "_predict_step" if word == "predict" else "_evaluation_step"
        tracker, step = self.evaluations.get(name), getattr(loop, method, None)
        if self.tracker is not None:
            self.tracker.pause()
        if tracker is not None and inside(tracker).judge.adapter is not None:
            tracker.resume()
        elif step is not None:
            action = "warn" if self.action in ("stop", "skip") else self.action
            run = _batch(step, loop.batch_progress, trainer, module, self._taken)
            tracker = self.evaluations[name] = self._made(track, run, action)
            _put(tracker, loop, method, module, name)

    def _evaluates(self, trainer: Any, word: str, index: int, outputs: Any = None) -> None:
        """Note where the evaluation is, and read what its step gave."""
        tracker = self.evaluations.get(f"{word}_step")
        if tracker is None or inside(tracker).judge.adapter is None:
            return
        where = f"batch {index} of {word.replace('predict', 'prediction')}"
        if trainer.sanity_checking:
            where += ", in the sanity check before the training"
        elif trainer.state.fn == "fit":
            where = f"epoch {trainer.current_epoch}, {where}"
        tracker.where = where
        if outputs is not None or self._taken.logged:
            _session(tracker).read_loss(self._taken.with_output(outputs))

    def _evaluated(self, trainer: Any, word: str) -> None:
        """Watch the training again, if there is one."""
        tracker = self.evaluations.get(f"{word}_step")
        if tracker is None:
            return
        if trainer.state.fn == "fit" and self.tracker is not None:
            tracker.pause()
            self.tracker.resume()
        else:
            tracker.remove()

    (
        on_validation_start, on_validation_batch_start, on_validation_batch_end, on_validation_end,
    ) = _evaluating("validation", _validation_loop)  # fmt: skip
    on_test_start, on_test_batch_start, on_test_batch_end, on_test_end = _evaluating(
        "test", attrgetter("test_loop")
    )
    on_predict_start, on_predict_batch_start, on_predict_batch_end, on_predict_end = _evaluating(
        "predict", attrgetter("predict_loop")
    )

    def _end(self) -> None:
        """Watch no longer."""
        super()._end()
        for tracker in self.evaluations.values():
            tracker.remove()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Save the weights as the step before left them."""
        trains = trainer.state.fn == "fit"
        if trains and isinstance(exception, AnomalyError) and trainer.world_size == 1:
            self._save(trainer)
        self._end()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Watch no longer."""
        self._end()

    def _save(self, trainer: Any) -> None:
        if self.save and not self.saved:
            name = f"anynan-step={trainer.global_step}.ckpt"
            path = os.path.join(trainer.default_root_dir, name)
            trainer.save_checkpoint(path)
            self.saved = path


class _Finding(Monitor):
    """Watch what a Trainer fits, for those who watch everything."""

    def __init__(self, options: Options, found: Found) -> None:
        super().__init__(str(options.action), save=False, level=options.level)
        self._found = found

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take the Trainer up in a process that it was sent to."""
        if trainer not in self._found.trainers:
            self._found.trainers.append(trainer)

    def _made(self, track: Callable[..., Tracker], target: Any, action: str) -> Tracker:
        tracker = super()._made(track, target, action)
        self._found.add(tracker)
        return tracker


@contextmanager
def watched(trainer: Any, options: Options, found: Found) -> Iterator[None]:
    """Watch what a Trainer fits, unless a Monitor does.

    Args:
        trainer: The Trainer.
        options: As for ``track``.
        found: Is given the tracker.
    """
    if any(isinstance(callback, Monitor) for callback in trainer.callbacks):
        yield
        return
    monitor = _Finding(options, found)
    try:
        trainer.callbacks.append(monitor)
        yield
    finally:
        if monitor in trainer.callbacks:
            trainer.callbacks.remove(monitor)


def _put(tracker: Tracker, loop: Any, method: str, module: Any, step: str) -> None:
    """Have a loop run a tracker in its method's place, until the tracker ends."""
    inside(tracker).name = f"{type(module).__name__}.{step}"
    _session(tracker).give([module])
    patches = Patches()
    patches.put(loop, method, tracker)
    inside(tracker).judge.ends.append(patches.undo)


def _session(tracker: Tracker) -> FunctionSession:
    session = inside(tracker).judge.adapter
    assert isinstance(session, FunctionSession)
    return session


class _Taken(_lightning.Callback):
    """Take what an evaluation's step logs and gives, which its loop does not return."""

    def __init__(self) -> None:
        self.logged: dict[str, Any] = {}
        self._output: Any = None

    def with_output(self, output: Any) -> Any:
        """Give all of it, as a step would return it."""
        return {**self.logged, "output": output} if self.logged else output

    def _gave(self, _: Any, __: Any, outputs: Any, *rest: Any) -> None:
        self._output = outputs

    on_validation_batch_end: Any = _gave
    on_test_batch_end: Any = _gave
    on_predict_batch_end: Any = _gave

    @contextmanager
    def logging(self, module: Any, *, quietly: bool) -> Iterator[None]:
        """Take what a module logs meanwhile.

        Args:
            module: The module.
            quietly: Log nothing.
        """
        real, mine = module.log, vars(module).get("log")
        self.logged = {}

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if not quietly:
                real(name, value, *args, **kwargs)
            if isinstance(value, torch.Tensor):
                self.logged[name] = value

        vars(module)["log"] = log  # log_dict calls it
        try:
            yield
        finally:
            self._output = None
            del vars(module)["log"]
            if mine is not None:
                vars(module)["log"] = mine


def _batch(
    run: Callable[..., Any], progress: Any, trainer: Any, module: Any, taken: _Taken | None = None
) -> Callable[..., Any]:
    """Make one batch a step that can be run again, in which nothing is counted or logged.

    Args:
        run: The loop's method.
        progress: What counts the batches.
        trainer: The Trainer.
        module: The module.
        taken: Takes what the step of an evaluation gives.
    """

    def batch(*args: Any, **kwargs: Any) -> Any:
        if not replaying():
            with nullcontext() if taken is None else taken.logging(module, quietly=False):
                return run(*args, **kwargs)
        counted = copy.deepcopy(progress.state_dict())
        callbacks = trainer.callbacks
        again = taken or _Taken()
        try:
            trainer.callbacks = [] if taken is None else [taken]
            with again.logging(module, quietly=True):
                found = run(*args, **kwargs)
                return found if taken is None else taken.with_output(taken._output)
        finally:
            progress.load_state_dict(counted)
            trainer.callbacks = callbacks

    return batch
