"""Losses that are modules, learning rates and function transforms, under ``anynan run``."""

import pytest

from tests.torch_adapter.forked import training

CLASSES = """
class Model(torch.nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        return {made}
model, criterion = Model(4, 3), torch.nn.NLLLoss()
"""


def classes(made: str) -> str:
    loss = "criterion(model(torch.randn(8, 4)), torch.arange(8) % 3)"
    return training(loss, CLASSES.format(made=made), steps=2)


@pytest.mark.tier(2)
def test_a_log_that_a_loss_module_makes_infinite_is_told_and_not_the_loss(run) -> None:
    first = run(classes("torch.log(torch.softmax(x * 1e3, 1))")).first
    assert "op log" in first and "[unseen-to-loss]" not in first
    assert "a softmax probability rounded to 0 [log_of_zero]" in first
    assert "it surfaced in the forward pass at NLLLoss" in first


def test_a_class_that_the_model_masks_is_told_where_the_loss_meets_it(run) -> None:
    mask = "torch.tensor([True, False, False])"
    made = f"torch.log_softmax(x.masked_fill({mask}, -float('inf')), 1)"
    run(classes(made)).tells("[target_class_masked]")


def diverging(loss: str, optimizer: str) -> str:
    model = "model = torch.nn.Sequential(*map(torch.nn.Linear, (4, 8), (8, 3)))"
    return training(loss, model, optimizer=optimizer, steps=3).replace(
        "loss = ", "out = model(torch.randn(8, 4)); loss = "
    )


@pytest.mark.parametrize(
    "made", ["Adam(model.parameters(), lr=1e30)", "SGD(model.parameters(), lr=1e25)"]
)
def test_a_learning_rate_that_blows_up_the_weights_at_once_is_told_as_such(run, made: str) -> None:
    first = run(diverging("out.square().mean()", made)).first
    assert "[learning_rate_divergence]" in first and "a second fault" not in first
    assert "; step 0 came to" in first and "lower the learning rate" in first


def test_what_a_blown_up_weight_leads_to_names_the_update_in_a_note(run) -> None:
    loss = "-torch.log(torch.softmax(out, 1).amin(1)).mean()"
    first = run(diverging(loss, "Adam(model.parameters(), lr=1e13)")).first
    assert "[log_of_zero]" in first and "try a lower learning rate first [grew]" in first


@pytest.mark.tier(2)
@pytest.mark.parametrize("loss", ["torch.log(out - 9).mean()", "out.mul(1e30).square().mean()"])
def test_other_faults_are_not_put_to_the_learning_rate(run, loss: str) -> None:
    first = run(diverging(loss, "SGD(model.parameters(), lr=1e-3)")).first
    assert first and "update" not in first


TRANSFORMED = """
import torch
from torch.func import functional_call, grad, grad_and_value, hessian, vmap
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
params = {{name: x.detach() for name, x in model.named_parameters()}}
def loss_of(params, x, y):
    return {loss}
def out_of(params, x):
    return functional_call(model, params, (x[None],))
for i in range(3):
    x = torch.randn(6, 4)
    gradients, losses = vmap(grad_and_value(loss_of), in_dims=(None, 0, 0))(params, x, x.sum(1))
    norm = sum((g ** 2).flatten(1).sum(1) for g in gradients.values()).sqrt()
    scale = {scale}
    for name, g in gradients.items():
        mean = (g * scale.view(-1, *[1] * (g.dim() - 1))).mean(0)
        params[name] = params[name] - 0.1 * mean
    print(losses.mean().item())
"""
SQUARE, CLIPPED = "(out_of(params, x) - y).square().mean()", "(1 / norm).clamp(max=1)"


@pytest.mark.parametrize(
    ("loss", "scale", "told"),
    [
        ("torch.log(out_of(params, x) - y).mean()", CLIPPED, "log_of_negative"),
        ("(out_of(params, x) * 0).mean().sqrt()", CLIPPED, "sqrt_gradient_at_zero"),
        (SQUARE, "(norm - norm) / (norm - norm)", "divide_by_zero"),
    ],
)
def test_a_fault_under_function_transforms_is_told_operation_and_line(loss, scale, told, run):
    program = TRANSFORMED.format(loss=loss, scale=scale)
    if scale != CLIPPED:  # what the package was called before
        program = program.replace("functional_call,", "functional_call\nfrom functorch import")
    done = run(program, "--fail")
    done.fails(f"[{told}]", f"return {loss}" if scale == CLIPPED else f"scale = {scale}")
    assert "bad_label" not in done.said


@pytest.mark.tier(2)
def test_function_transforms_give_what_they_do_and_clean_ones_are_clean(run) -> None:
    more = """
print(hessian(lambda x: (x ** 3).sum())(torch.arange(3.0)).sum().item(), vmap(torch.dot).__name__)
print(torch.compile(vmap(grad(lambda x: x.sin())), backend="eager", fullgraph=True)(torch.ones(2)))
"""
    done = run(TRANSFORMED.format(loss=SQUARE, scale=CLIPPED) + more, "--fail")
    assert done.status == 0 and "AnynanWarning" not in done.said
    assert done.out.splitlines()[-2:] == ["18.0 dot", "tensor([0.5403, 0.5403])"]


WRITES = """
class Layer(torch.nn.Linear):
    def forward(self, x):
        apart = (x - x[:1]).square().sum(1, keepdim=True)
        x += super().forward(apart) / divisor
        return x
model = Layer(1, 1)
"""


def writing(finite: str) -> str:
    loss = "model(torch.randn(6, 2)).square().mean()"
    return training(loss, WRITES, "print(loss.item())").replace(
        "loss = ", f"divisor = torch.tensor(float({finite})); loss = "
    )


def test_a_model_that_writes_into_its_input_is_run_again_with_what_it_was(run) -> None:
    done = run(writing("i != 2"))
    done.tells("op divide", "x += super().forward(apart) / divisor", "[divide_by_zero]")
    assert "[replay-input-changed]" not in done.said


def test_an_input_that_the_call_itself_made_bad_is_not_said_to_have_come_in(run) -> None:
    first = run(writing("i > 5")).first
    assert "first appeared in the forward pass of step 0" in first
    assert "[replay-input-changed]" in first
    assert "bad input" not in first and "came in" not in first


GIVEN = """
class Model(torch.nn.Sequential):
    def forward(self, x, t):
        return super().forward(torch.cat([x[:, 1:], t[:, 1:]], 1)).sigmoid()
t = torch.zeros(5, 2)
model = Model(torch.nn.Linear(2, 4), torch.nn.Sigmoid(), torch.nn.Linear(4, 1))
"""


def test_an_inf_that_the_program_hands_to_a_model_is_told_where_it_was_made(run) -> None:
    first = run(training("model(torch.rand(5, 2), torch.log(t)).square().mean()", GIVEN)).first
    assert "[log_of_zero]" in first and "torch.log(t)" in first


def test_what_goes_through_a_sparse_product_is_followed(run) -> None:
    program = """
    import torch
    links = torch.eye(3).to_sparse()
    class Graph(torch.nn.Linear):
        def forward(self, x):
            x = torch.spmm(links, torch.spmm(links, super().forward(x) / (x - x)))
            return torch.exp(-x) * x
    Graph(4, 4)(torch.randn(3, 4)).sum().backward()
    """
    done = run(program)
    done.tells("op divide")
    assert "Cannot access storage" not in done.said
