"""A PyTorch program that does all a program may do, twice."""

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import optimizer as optimizers
from torch.utils.checkpoint import checkpoint

import anynan
from tests.chaos import twins
from tests.torch_adapter.training import Fault

OWNERS = (
    nn.Module, torch.Tensor, torch.optim.Optimizer, torch.optim.Adam, torch.amp.GradScaler,
    torch.autograd, torch.autograd.Function, modules, optimizers, torch.utils.checkpoint,
    torch.nn.functional,
)  # fmt: skip
LOG: list[str] = []


class Broken(Fault):
    """Be a fault that can be the user's own exception, too."""

    def forward(self, x: Tensor, turn: int | None = None) -> Tensor:
        if self.armed == "raise":
            raise ValueError("of the user's own")
        return super().forward(x)


class Net(nn.Module):
    """Hold a shared layer, a checkpoint, running statistics, dropout and a place for faults."""

    def __init__(self, checkpointed: str | None, nested: bool, shared: bool) -> None:
        super().__init__()
        self.checkpointed, self.nested = checkpointed, nested
        self.stem = nn.Linear(6, 6)
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.2))
        self.norm = nn.BatchNorm1d(6)
        self.fault = Broken()
        self.extra: nn.Module | None = None
        self.head = nn.Linear(6, 2)
        if shared:
            self.again = self.stem

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        if self.checkpointed is None:
            x = self.inner(x)
        else:
            x = checkpoint(self.inner, x, use_reentrant=self.checkpointed == "reentrant")
        x = self.fault(self.norm(x if self.extra is None else self.extra(x)))
        x = x * (1 + random.random())
        return (self.head(x), {"hidden": x}) if self.nested else self.head(x)


def first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def heard(module: nn.Module, *_: Any) -> None:
    if not anynan.replaying():
        LOG.append(type(module).__name__)


def half_more(module: nn.Module, args: Any, out: Any) -> Any:
    return out * 1.5 if isinstance(out, Tensor) else None


def failing(*_: Any) -> None:
    raise KeyError("a hook of the user's own")


class Side:
    """Hold one of the two models, its optimizers, and what can be done with them."""

    def __init__(self, model: Net) -> None:
        self.model = model
        self.plain_step = self.step = self._step
        self.handles: list[Any] = []
        self.log: list[str] = []
        self.renew()

    def renew(self, k: int = 0) -> None:
        self.adam = torch.optim.Adam(self.model.parameters(), 1e-2)
        self.sgd = torch.optim.SGD(self.model.head.parameters(), 1e-2)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def batch(self, k: int) -> Tensor:
        return torch.randn(4, 6, generator=torch.Generator().manual_seed(k)).to(self.dtype)

    def loss(self, k: int) -> Tensor:
        return first(self.model(self.batch(k))).square().mean()

    def _step(self, k: int) -> Tensor:
        self.adam.zero_grad()
        loss = self.loss(k)
        loss.backward()
        self.adam.step()
        return loss.detach()

    def train(self, k: int) -> Any:
        return self.step(k)

    def train_head(self, k: int) -> Any:
        self.sgd.zero_grad()
        self.loss(k).backward()
        self.sgd.step()

    def scaled(self, k: int) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.adam.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = first(self.model(self.batch(k))).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(self.adam)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        scaler.step(self.adam)
        scaler.update()
        return loss.detach(), scaler.get_scale()

    def validate(self, k: int) -> Any:
        self.model.eval()
        with torch.no_grad():
            return first(self.model(self.batch(k)))

    def infer(self, k: int) -> Any:
        with torch.inference_mode():
            return first(self.model(self.batch(k))).clone()

    def call_functionally(self, k: int) -> Any:
        weights = {name: p.detach() * 1.01 for name, p in self.model.named_parameters()}
        return first(torch.func.functional_call(self.model, weights, (self.batch(k),))).detach()

    def call_for_each_row(self, k: int) -> Any:
        self.model.eval()
        return torch.vmap(lambda x: first(self.model(x[None]))[0])(self.batch(k)).detach()

    def ask_for_gradients(self, k: int) -> Any:
        weights = [p for p in self.model.parameters() if p.requires_grad]
        return torch.autograd.grad(self.loss(k), weights, allow_unused=True)

    def call_a_part(self, k: int) -> Any:
        return self.model.inner(self.batch(k)).detach()

    def call_in_a_thread(self, k: int) -> Any:
        return twins.threaded(lambda: self._step(k))

    def fail_in_backward(self, k: int) -> Any:
        loss = self.loss(k)
        loss.register_hook(failing)
        loss.backward()

    def fail_in_a_hook(self, k: int) -> Any:
        with self.model.head.register_forward_hook(failing):
            self.loss(k)

    def fail_in_the_optimizer(self, k: int) -> Any:
        with self.adam.register_step_pre_hook(failing):
            self._step(k)

    def set_training(self, k: int) -> None:
        self.model.train(k % 2 == 0)

    def freeze(self, k: int) -> None:
        for p in self.model.stem.parameters():
            p.requires_grad_(not p.requires_grad)

    def change_dtype(self, k: int) -> None:
        self.model.to(torch.float64 if self.dtype is torch.float32 else torch.float32)

    def replace_a_part(self, k: int) -> None:
        self.model.inner = nn.Sequential(nn.Linear(6, 6), nn.GELU()).to(self.dtype)

    def add_a_part(self, k: int) -> None:
        self.model.extra = nn.Linear(6, 6).to(self.dtype) if self.model.extra is None else None

    def parametrize(self, k: int) -> None:
        head = self.model.head
        if parametrize.is_parametrized(head):
            parametrize.remove_parametrizations(head, "weight")
        elif k % 2:
            parametrizations.weight_norm(head)
        else:
            parametrizations.spectral_norm(head)

    def prune(self, k: int) -> None:
        if prune.is_pruned(self.model.stem):
            prune.remove(self.model.stem, "weight")
        else:
            prune.random_unstructured(self.model.stem, "weight", 0.3)

    def reload(self, k: int) -> Any:
        weights = copied(self.model.state_dict())
        self.model.load_state_dict(weights)
        self.adam.load_state_dict(copy.deepcopy(self.adam.state_dict()))
        return list(weights), list(weights.values())

    def copy(self, k: int) -> Any:
        other = copy.deepcopy(self.model)
        assert counted(other) == counted(self.model, theirs_only=True)
        return first(other(self.batch(k))).detach()

    def pickle(self, k: int) -> Any:
        other = pickle.loads(pickle.dumps(self.model))
        return first(other(self.batch(k))).detach()

    def hook(self, k: int) -> None:
        self.handles += [
            self.model.stem.register_forward_hook(heard),
            self.model.head.register_full_backward_hook(heard),
            self.model.register_forward_pre_hook(heard),
            self.model.inner.register_forward_hook(half_more),
        ]

    def unhook(self, k: int) -> None:
        while self.handles:
            self.handles.pop().remove()

    def state(self) -> dict[str, Any]:
        model = self.model
        return {
            "weights": copied(model.state_dict()),
            "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
            "requires": [p.requires_grad for p in model.parameters()],
            "training": [module.training for module in model.modules()],
            "adam": copied(self.adam.state_dict()),
            "sgd": copied(self.sgd.state_dict()),
            "log": list(self.log),
            "repr": repr(model),
        }

    def hooks(self) -> list[Any]:
        """Count what hangs on the modules, weights and optimizers."""
        found = counted(self.model)
        found += [[sorted(vars(module)) for module in self.model.modules()]]
        for p in self.model.parameters():
            found.append((sorted(vars(p)), *(len(getattr(p, key) or ()) for key in TENSOR_HOOKS)))
        for optimizer in (self.adam, self.sgd):
            found.append({k: len(v) if "hooks" in k else 0 for k, v in vars(optimizer).items()})
        return found

    def take_over(self, other: "Side") -> None:
        """Become what the other is, once an action has made them part."""
        self.model.load_state_dict(copy.deepcopy(other.model.state_dict()))
        for p, q in zip(self.model.parameters(), other.model.parameters(), strict=True):
            p.grad = None if q.grad is None else q.grad.clone()
        self.adam.load_state_dict(copy.deepcopy(other.adam.state_dict()))
        self.sgd.load_state_dict(copy.deepcopy(other.sgd.state_dict()))
        self.log = list(other.log)
        for mine, others in zip(self.model.modules(), other.model.modules(), strict=True):
            mine.training = others.training


def copied(value: Any) -> Any:
    """Copy what a state dict holds: a deep copy takes several times as long."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


MODULE_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_state_dict_hooks", "_load_state_dict_pre_hooks",
)  # fmt: skip
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
CALLS: list[Callable[[Side, int], Any]] = [
    Side.train_head, Side.scaled, Side.validate, Side.infer, Side.call_functionally,
    Side.call_for_each_row, Side.ask_for_gradients, Side.call_a_part, Side.call_in_a_thread,
]  # fmt: skip
FAILURES: list[Callable[[Side, int], Any]] = [
    Side.fail_in_backward, Side.fail_in_a_hook, Side.fail_in_the_optimizer,
]  # fmt: skip
COPIES: list[Callable[[Side, int], Any]] = [Side.copy, Side.pickle]
CHANGES: list[Callable[[Side, int], Any]] = [
    Side.set_training, Side.freeze, Side.change_dtype, Side.replace_a_part, Side.add_a_part,
    Side.parametrize, Side.prune, Side.renew, Side.reload, Side.hook, Side.unhook, *COPIES,
]  # fmt: skip


def counted(model: nn.Module, *, theirs_only: bool = False) -> list[Any]:
    """Count the hooks of every module, anynan's own or not."""
    return [
        (name, key, len([x for x in value.values() if not (theirs_only and is_ours(x))]))
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key in MODULE_HOOKS
    ]


def is_ours(hook: Any) -> bool:
    return type(hook).__module__.startswith("anynan")


def generators() -> dict[str, Any]:
    return {**twins.generators(), "torch": torch.get_rng_state().numpy().tobytes()}


def seed(number: int) -> None:
    twins.seed(number)
    torch.default_generator.manual_seed(number)


def modes() -> dict[str, Any]:
    """Give what is on for every operation of this thread.

    What anynan notes between a model and the update is left out: it ends with the tracker.
    """
    count = torch._C._len_torch_function_stack()
    functions = [torch._C._get_function_stack_at(i) for i in range(count)]
    return {
        "stacks": (torch._C._len_torch_dispatch_stack(), sum(not is_ours(x) for x in functions)),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "anomaly": torch.is_anomaly_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "dtype": torch.get_default_dtype(),
        "replaying": anynan.replaying(),
    }


def process() -> dict[str, Any]:
    """Give what PyTorch shares among all models, and what any program does."""
    attributes = {f"{x.__name__}.{key}": id(v) for x in OWNERS for key, v in vars(x).items()}
    shared = {
        f"{x.__name__}.{key}": len(value)
        for x in (modules, optimizers)
        for key, value in vars(x).items()
        if key.startswith("_global_") and isinstance(value, dict)
    }
    return {
        **twins.process(),
        **attributes,
        **{f"{key} (length)": number for key, number in shared.items()},
        "hook guards": torch._dynamo.config.skip_nnmodule_hook_guards,
        **modes(),
        "function modes": torch._C._len_torch_function_stack(),
        "threads of PyTorch": torch.get_num_threads(),
    }
