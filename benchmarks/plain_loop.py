"""The baseline of `benchmarks.simulation`: one MtFEEL round as the plain loop it is, one autograd call per (model, device)."""

import numpy as np
import torch
import torch.nn.functional as F

from fadefed.messages import Array
from fadefed.methods.mtfeel import alpha_gradient, project_simplex


class PlainLoop:
    """N models in torch, trained by N^2 autograd calls a round, everything kept in memory as float32."""

    def __init__(self, x: Array, y: Array, w0: Array, discrepancy: Array, kappa: float, rounds: int) -> None:
        """x [N, n, 784], y [N, n], w0 [d]: the same data and start as the simulator's."""
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(y)
        self.size = len(x)
        self.models = [torch.from_numpy(w0.copy()) for _ in range(self.size)]
        self.alpha = np.full((self.size, self.size), 1 / self.size)
        self.discrepancy, self.kappa, self.rate = discrepancy, kappa, rounds**-0.5
        self.lam = np.full(self.size, 1 / self.size)
        self.n = np.full(self.size, float(x.shape[1]))

    def loss(self, flat: torch.Tensor, m: int) -> torch.Tensor:
        first, bias, second, last = torch.split(flat, [784 * 32, 32, 320, 10])
        hidden = torch.relu(self.x[m] @ first.view(32, 784).T + bias)
        outputs = hidden @ second.view(10, 32).T + last
        picked = F.log_softmax(outputs, -1).gather(1, self.y[m][:, None])[:, 0]
        return -torch.log(0.9 * picked.exp() + 0.01).mean()

    def round(self) -> None:
        losses = np.zeros((self.size, self.size))
        signs = [[torch.empty(0)] * self.size for _ in range(self.size)]
        for k in range(self.size):
            for m in range(self.size):
                w = self.models[k].detach().requires_grad_()
                value = self.loss(w, m)
                (gradient,) = torch.autograd.grad(value, w)
                losses[k, m] = value.item()
                signs[k][m] = torch.sign(gradient)
        step = alpha_gradient(self.alpha, losses, self.discrepancy, self.lam, self.n, self.kappa, 1)
        self.alpha = project_simplex(self.alpha - self.rate * step)
        for k in range(self.size):
            direction = sum(float(self.alpha[k, m]) * signs[k][m] for m in range(self.size))
            self.models[k] = self.models[k] - self.rate * self.lam[k] * direction
