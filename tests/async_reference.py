"""Asynchronous 1F1B in plain Python, one action after the other, which a pipeline must equal to the last bit."""

from __future__ import annotations

import copy

import torch
from torch.func import functional_call

from timelyfreeze.schedule.asynchronous import stream_order


def as_copies(parameters):
    return {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in parameters.items()}


class ReferenceStage:
    """A stage whose forwards get copies of its weights, into which backward finds the newest ones written.

    With ``stash`` the copies stay what they were (PipeDream). With ``predict`` forward's copies are ahead by the last
    update for each update that will fall between forward and backward.
    """

    def __init__(self, module, make_optimizer, stash, predict):
        self.module = copy.deepcopy(module)
        self.parameters = dict(self.module.named_parameters())
        trained = [p for p in self.parameters.values() if p.requires_grad]
        self.optimizer = make_optimizer(trained) if trained else None
        self.stash = stash
        self.predict = predict
        self.last_update = None
        self.kept = {}

    def forward(self, m, x, live=None, ahead=0):
        weights = as_copies(self.parameters)
        if self.predict and ahead and self.last_update is not None:
            with torch.no_grad():
                for weight, change in zip(weights.values(), self.last_update, strict=True):
                    weight.add_(change, alpha=ahead)
        for parameter, is_live in zip(weights.values(), live if live is not None else (), strict=live is not None):
            parameter.requires_grad_(parameter.requires_grad and bool(is_live))
        x = x.detach().clone().requires_grad_(x.is_floating_point())
        y = functional_call(self.module, weights, (x,))
        self.kept[m] = (weights, x, y)
        return y

    def backward(self, m, root, grad):
        weights, x, _ = self.kept.pop(m)
        if not self.stash:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(weights.values())):
                for name, p in self.parameters.items():
                    weights[name].copy_(p)
        if root.requires_grad:
            root.backward(grad)
        for name, p in self.parameters.items():
            own = weights[name].grad
            if own is not None:
                p.grad = own.clone() if p.grad is None else p.grad + own
        return x.grad

    def update(self, factor):
        if self.optimizer is not None:
            for p in self.parameters.values():
                if p.grad is not None and factor != 1.0:
                    p.grad.mul_(factor)
            before = as_copies(self.parameters)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.last_update = [p.detach() - before[name].detach() for name, p in self.parameters.items()]


def train_asynchronously(
    stages, make_optimizer, loss_fn, slices, accumulation, *, stash=False, predict=False, masks=None
):
    """The stages' parameters and the losses after a whole stream.

    Args:
        slices: ``(x, y)`` a micro-batch.
        masks: for every micro-batch, which parameters of every stage train; None: all.
    """
    own = [ReferenceStage(stage, make_optimizer, stash, predict) for stage in stages]
    num = len(own)
    orders = [list(stream_order(num, s, len(slices), accumulation)) for s in range(num)]
    outputs, gradients, losses = {}, {}, {}
    done = [0] * num
    while any(done[s] < len(orders[s]) for s in range(num)):
        for s, stage in enumerate(own):
            while done[s] < len(orders[s]):
                _, kind, m = orders[s][done[s]]
                if kind == "F":
                    if s and (s - 1, m) not in outputs:
                        break
                    x = slices[m][0] if s == 0 else outputs.pop((s - 1, m))
                    before = [kind for _, kind, _ in orders[s][: done[s]]].count("U")
                    until = orders[s].index((s, "B", m))
                    ahead = [kind for _, kind, _ in orders[s][:until]].count("U") - before
                    y = stage.forward(m, x, None if masks is None else masks[m][s], ahead)
                    if s + 1 < num:
                        outputs[s, m] = y
                    else:
                        losses[m] = loss_fn(y, slices[m][1])
                elif kind == "B":
                    if s + 1 < num:
                        if (s + 1, m) not in gradients:
                            break
                        root, grad = stage.kept[m][2], gradients.pop((s + 1, m))
                    else:
                        first = len(slices[m - m % accumulation][0])
                        root, grad = losses[m], torch.full_like(losses[m], len(slices[m][0]) / (first * accumulation))
                    received = stage.backward(m, root, grad) if grad is not None else stage.kept.pop(m) and None
                    gradients[s, m] = received
                else:
                    window = [len(x) for x, _ in slices[m - m % accumulation : m + 1]]
                    stage.update(window[0] * accumulation / sum(window))
                done[s] += 1
    return [stage.module for stage in own], [losses[m].detach() for m in range(len(slices))]
