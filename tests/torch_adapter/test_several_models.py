"""Models that train beside each other under ``anynan run``: one fault is one report."""

import pytest

from tests.torch_adapter.forked import training

ACTOR_CRITIC = """
import copy, torch
from torch import nn
class Critic(nn.Sequential):
    def forward(self, s, a):
        return super().forward(torch.cat([s, a], 1))
    first = forward
actor, critic = nn.Linear(3, 2), Critic(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
actor_target, critic_target = copy.deepcopy(actor), copy.deepcopy(critic)
actor_opt, critic_opt = (torch.optim.Adam(each.parameters()) for each in (actor, critic))
memory = [torch.randn(3) for _ in range(8)]
for step in range(20):
    with torch.no_grad():
        memory.append(memory[-1] + actor(memory[-1]).sum() / 10)
    s = torch.stack([memory[i] for i in torch.randint(len(memory), (6,))])
    with torch.no_grad():
        target = critic_target(s, actor_target(s)) {target}
    loss = (critic(s, actor(s).detach()) - target).pow(2).mean()
    critic_opt.zero_grad(); loss.backward(); critic_opt.step()
    loss = -critic.first(s, actor(s)).mean()
    actor_opt.zero_grad(); loss.backward(); actor_opt.step()
    for ours, theirs in [(actor, actor_target), (critic, critic_target)]:
        for p, q in zip(ours.parameters(), theirs.parameters()):
            q.data.copy_(0.1 * p.data + 0.9 * q.data)
"""


def reports(done) -> list[str]:
    return done.said.partition("anynan: ")[0].split("AnynanWarning: ")[1:]


def test_what_follows_in_other_models_is_said_in_the_closing_lines(run) -> None:
    target = "- 9 if step < 5 else torch.tensor(-1.0).log()"
    done = run(ACTOR_CRITIC.replace("{target}", target))
    (report,) = reports(done)
    assert "op log" in report and "may-follow" not in report
    done.tells("perhaps because of it: model actor (Linear)")
    assert "assign" not in done.said


SAMPLER = """
import torch
class Net(torch.nn.Sequential):
    def forward(self, x, t):
        return torch.tanh(super().forward(x)) {inside}
net = Net(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
betas, sample = torch.linspace(-0.1, 0.3, 10), torch.randn(5, 3)
for i in reversed(range(10)):
    t = torch.from_numpy(__import__("numpy").full(5, i)).long()
    with torch.no_grad():
        noise = net(sample, t)
    sample = sample - 0.1 * noise + {factor} * torch.randn_like(noise)
"""


def test_what_a_sampling_loop_makes_between_calls_names_its_operation(run) -> None:
    first, *others = reports(run(SAMPLER.format(inside="", factor="betas[t[0]] ** 0.5")))
    assert "[power_domain]" in first
    assert all("[power_domain]" in other or "times since" in other for other in others)


def test_what_a_model_makes_of_its_own_bad_output_is_no_bad_batch(run) -> None:
    done = run(SAMPLER.format(inside="+ torch.log(t - 3.5)[:, None]", factor="0.1"))
    (report,) = reports(done)
    assert "op log" in report
    done.tells("the input of Net is bad, and came after its own step")


def test_a_model_whose_methods_call_its_layers_is_one_model(run) -> None:
    before = """
    class Policy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
        def forward(self, x):
            return self.second(torch.relu(self.first(x)))
        def sample(self, x):
            mean = self.forward(x)
            return mean + torch.randn_like(mean)
    model = Policy()
    """
    loss = "model.sample(torch.randn(5, 4) * (torch.nan if i == 4 else 1)).square().mean()"
    done = run(training(loss, before, steps=8))
    (report,) = reports(done)
    assert "NaN came in with the batch of step 4" in report and "layer first" in report
    done.tells("anynan: Policy: 1 bad in 8 steps")


def test_a_backward_pass_outside_of_the_tracked_function_is_said_to_be_the_reason(run) -> None:
    before = """
    import anynan
    model = torch.nn.Linear(4, 3)
    def loss_of(x):
        p = model(x)
        return (p - p.detach()).square().sum(-1).sqrt().mean()
    loss_of = anynan.torch.track(loss_of, action="warn")
    """
    said = run(training("loss_of(torch.randn(6, 4))", before, steps=2)).said
    assert "the backward pass ran outside of the tracked function" in said


# Gradients that pass through several models, that the program asks for, or of its own weights.


LOOP = """
import torch
from torch import nn
torch.manual_seed(0)
class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)
    def forward(self, x):
        return self.layer(x.square().sqrt())
first, second, root, free = nn.Linear(4, 3), nn.Linear(3, 4), Root(), nn.Parameter(torch.ones(3))
weights = [*first.parameters(), *second.parameters(), *root.parameters(), free]
optimizer = torch.optim.SGD({trained}, lr=0.01)
for i in range(4):
    k = {k}
    x = torch.full((2, 3), k, requires_grad=True)
    {step}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
MADE = {
    "between models": "loss = second((first(torch.ones(2, 4)) * k).square().sqrt()).mean()",
    "in the next model": "loss = root(first(torch.ones(2, 4)) * k).mean()",
    "asked for, before the model": (
        "loss = torch.autograd.grad(second(x.square().sqrt()).sum(), x, create_graph=True)[0].sum()"
    ),
    "asked for, in the model": (
        "loss = nn.MSELoss()(torch.autograd.grad(root(x).sum(), x, create_graph=True)[0], x)"
    ),
    "of a free weight": "loss = second(x).mean() + (free * k).square().sqrt().sum()",
    "of a free weight, before the model": "loss = second((free * k).square().sqrt()).mean()",
}


def loop(step: str, *, k: str = "float(i != 2)", trained: str = "weights") -> str:
    return LOOP.format(step=step, k=k, trained=trained)


@pytest.mark.parametrize("step", MADE.values(), ids=MADE)
def test_the_operation_is_told_once_with_its_line(run, tmp_path, step: str) -> None:
    said = run(loop(step)).said
    assert "op gradient of sqrt" in said
    before = LOOP.partition("return" if "root" in step else "{step}")[0]
    assert f"sqrt at {tmp_path}/script.py:{len(before.splitlines())}: " in said
    assert "backward pass of step 2" in said
    assert ("gradient of free" in said) is ("free" in step)
    assert said.count("AnynanWarning") == 1


@pytest.mark.parametrize("step", [MADE["asked for, in the model"], MADE["of a free weight"]])
def test_a_clean_program_is_clean(run, step: str) -> None:
    said = run(loop(step, k="1.0")).said
    assert "nothing went bad" in said
    assert "the program" not in said


def test_what_only_is_trained_is_no_data(run) -> None:
    step = "loss = second(free).mean() + (free * k).norm().square().sqrt()"
    said = run(loop(step, trained="[free]")).said
    assert "op gradient of sqrt" in said
    assert "data set" not in said
