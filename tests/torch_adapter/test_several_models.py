"""Models that train beside each other under ``anynan run``: one fault is one report."""

from pathlib import Path

from tests.torch_adapter.forked import run

ACTOR_CRITIC = """
import copy, torch
from torch import nn

class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 1)

    def forward(self, s, a):
        return self.b(torch.relu(self.a(torch.cat([s, a], 1))))

    def first(self, s, a):
        return self.b(torch.relu(self.a(torch.cat([s, a], 1))))

actor, critic = nn.Linear(3, 2), Critic()
actor_target, critic_target = copy.deepcopy(actor), copy.deepcopy(critic)
actor_opt = torch.optim.Adam(actor.parameters())
critic_opt = torch.optim.Adam(critic.parameters())
memory = [torch.randn(3) for _ in range(8)]
for step in range(20):
    with torch.no_grad():
        memory.append(memory[-1] + actor(memory[-1]).sum() / 10)
    s = torch.stack([memory[i] for i in torch.randint(len(memory), (6,))])
    with torch.no_grad():
        target = critic_target(s, actor_target(s)) {target}
    loss = (critic(s, actor(s).detach()) - target).pow(2).mean()
    critic_opt.zero_grad(); loss.backward(); critic_opt.step()
    loss = -critic.first(s, actor(s)).mean() {loss}
    actor_opt.zero_grad(); loss.backward(); actor_opt.step()
    for ours, theirs in [(actor, actor_target), (critic, critic_target)]:
        for p, q in zip(ours.parameters(), theirs.parameters()):
            q.data.copy_(0.1 * p.data + 0.9 * q.data)
"""


def reports(said: str) -> list[str]:
    return said.partition("anynan: ")[0].split("AnynanWarning: ")[1:]


def test_what_follows_in_other_models_is_said_in_the_closing_lines(tmp_path: Path) -> None:
    program = ACTOR_CRITIC.replace("{target}", "- 9 if step < 5 else torch.tensor(-1.0).log()")
    _, _, said = run(tmp_path, program.replace("{loss}", ""))
    (report,) = reports(said)
    assert "op log" in report
    assert "may-follow" not in report
    assert "perhaps because of it: model actor (Linear)" in said
    assert "assign" not in said


def test_a_model_that_another_gives_bad_input_is_told_so_once(tmp_path: Path) -> None:
    program = """
import torch
from torch import nn
torch.manual_seed(0)
class Encoder(nn.Linear):
    def forward(self, x):
        return super().forward(x).log()
encoder, decoder = Encoder(4, 3), nn.Linear(3, 2)
optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
for i in range(2):
    made = encoder(torch.randn(6, 4))
    loss = sum(decoder(made).mean() for _ in range(5))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
    told = reports(run(tmp_path, program)[2])
    assert sum("what Encoder gave" in each for each in told) <= 1
    assert "op log" in told[0]


SAMPLER = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, x, t):
        return self.b(torch.tanh(self.a(x))) {inside}

net, betas, sample = Net(), torch.linspace(-0.1, 0.3, 10), torch.randn(5, 3)
for i in reversed(range(10)):
    t = torch.from_numpy(__import__("numpy").full(5, i)).long()
    with torch.no_grad():
        noise = net(sample, t)
    sample = sample - 0.1 * noise + {factor} * torch.randn_like(noise)
"""


def test_what_a_sampling_loop_makes_between_calls_names_its_operation(tmp_path: Path) -> None:
    _, _, said = run(tmp_path, SAMPLER.format(inside="", factor="betas[t[0]] ** 0.5"))
    first, *others = reports(said)
    assert "[power_domain]" in first
    assert all("[power_domain]" in other or "times since" in other for other in others)


def test_what_a_model_makes_of_its_own_bad_output_is_no_bad_batch(tmp_path: Path) -> None:
    inside = "+ torch.log(t - 3.5)[:, None]"
    _, _, said = run(tmp_path, SAMPLER.format(inside=inside, factor="0.1"))
    first, *others = reports(said)
    assert "op log" in first
    assert not others
    assert "the input of Net is bad, and came after its own step" in said


def test_a_model_whose_methods_call_its_layers_is_one_model(tmp_path: Path) -> None:
    program = """
    import torch
    from torch import nn

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x):
            return self.second(torch.relu(self.first(x)))

        def sample(self, x):
            mean = self.forward(x)
            return mean + torch.randn_like(mean)

    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters())
    for i in range(8):
        x = torch.randn(5, 4) * (torch.nan if i == 4 else 1)
        loss = policy.sample(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    """
    _, _, said = run(tmp_path, program)
    (report,) = reports(said)
    assert "NaN came in with the batch of step 4" in report
    assert "layer first" in report
    assert "anynan: Policy: 1 bad in 8 steps" in said


def test_a_backward_pass_outside_of_the_tracked_function_is_said_to_be_the_reason(
    tmp_path: Path,
) -> None:
    program = """
    import anynan, torch
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)

    def loss_of(x):
        p = model(x)
        return (p - p.detach()).square().sum(-1).sqrt().mean()

    loss_of = anynan.torch.track(loss_of, action="warn")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss_of(torch.randn(6, 4)).backward()
        optimizer.step()
    """
    _, _, said = run(tmp_path, program)
    assert "the backward pass ran outside of the tracked function" in " ".join(said.split())
