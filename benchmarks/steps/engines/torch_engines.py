"""Training steps of PyTorch: ordinary, and private by Opacus."""

from __future__ import annotations

import warnings
from typing import Callable

import torch
from torch import nn

from benchmarks.steps import problems

RATE = 0.01
ACTIVATIONS = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid}


class Encoder(nn.Module):
    """One transformer block on token and position embeddings, averaged over the positions."""

    def __init__(self):
        super().__init__()
        # Of Linear layers, since Opacus cannot train torch's own; for `torch_sgd` the same.
        from opacus.layers import DPMultiheadAttention

        dim = problems.DIM
        self.tokens = nn.Embedding(problems.VOCABULARY, dim)
        self.positions = nn.Embedding(problems.LENGTH, dim)
        self.attention = DPMultiheadAttention(dim, problems.HEADS, batch_first=True)
        self.first_norm, self.second_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.feed_forward = nn.Sequential(
            nn.Linear(dim, problems.FEED_FORWARD), nn.ReLU(), nn.Linear(problems.FEED_FORWARD, dim)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(problems.LENGTH).repeat(len(tokens), 1)
        x = self.tokens(tokens) + self.positions(positions)
        x = self.first_norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.second_norm(x + self.feed_forward(x)).mean(1)


class BagOfWords(nn.Module):
    """The mean of embeddings."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(problems.BOW_VOCABULARY, problems.BOW_DIM)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens).mean(1)


class Loss:
    """One loss an example, reduced as `reduction` says; Opacus's ghost clipping sets that."""

    def __init__(self, kind: str):
        self.kind = kind
        self.reduction = "mean"

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.kind == "softmax":
            return nn.functional.cross_entropy(outputs, targets, reduction=self.reduction)
        if self.kind == "sigmoid":
            losses = nn.functional.binary_cross_entropy_with_logits(
                outputs, targets, reduction="none"
            )
        else:
            losses = nn.functional.mse_loss(outputs, targets, reduction="none")
        return losses.mean(1) if self.reduction == "none" else losses.mean()


def build(problem: problems.Problem, width: int) -> nn.Sequential:
    """The model of a problem."""
    layers: list[nn.Module] = []
    if problem.name == "cnn":
        channels = problems.IMAGE[-1]
        for _ in range(2):
            layers += [nn.Conv2d(channels, problems.FILTERS, 3, padding=1), nn.ReLU()]
            layers += [nn.MaxPool2d(2)]
            channels = problems.FILTERS
        layers += [nn.Flatten()]
    elif problem.name == "transformer":
        layers += [Encoder()]
    elif problem.name == "bow":
        layers += [BagOfWords()]
    sizes = problem.layer_sizes(width)
    activations = [problem.activation] * (len(sizes) - 2) + [problem.output_activation]
    for inputs, outputs, activation in zip(sizes, sizes[1:], activations):
        layers += [nn.Linear(inputs, outputs)]
        if activation is not None:
            layers += [ACTIVATIONS[activation]()]
    return nn.Sequential(*layers)


def _make_private(engine: str, model: nn.Module, optimizer, loss: Loss, x, y):
    """What Opacus's PrivacyEngine makes of the three, for batches of a fixed size."""
    from opacus import PrivacyEngine

    ghost = engine == "opacus_ghost"
    warnings.filterwarnings("ignore", message="Secure RNG turned off")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=len(x))
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        criterion=loss,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode="ghost" if ghost else "hooks",
    )
    return private[:3] if ghost else (*private[:2], loss)


def make(engine: str, model: str, batch_size: int, width: int) -> tuple[Callable[[], None], int]:
    """Makes a training step; see `tensorflow_engines.make`."""
    torch.manual_seed(0)
    problem = problems.PROBLEMS[model]
    x, y = (torch.from_numpy(array) for array in problems.make_data(model, batch_size))
    if problem.loss == "softmax":
        y = y.long()
    if model == "cnn":
        x = x.permute(0, 3, 1, 2).contiguous()
    module = build(problem, width)
    num_parameters = sum(p.numel() for p in module.parameters())
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    loss = Loss(problem.loss)
    if engine != "torch_sgd":
        module, optimizer, loss = _make_private(engine, module, optimizer, loss, x, y)

    def step() -> None:
        optimizer.zero_grad()
        loss(module(x), y).backward()
        optimizer.step()

    return step, num_parameters
