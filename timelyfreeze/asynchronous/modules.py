"""Which modules would notice that their weights change between a micro-batch's forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.utils import parametrize

from timelyfreeze.errors import problem, raise_all

# Hooks of torch.nn.utils that make a weight anew before each forward.
_NORM_HOOKS = {"WeightNorm", "SpectralNorm"}


def refuse_unfit_modules(stages: Iterable[nn.Module], *, recomputes: bool, stashes: bool) -> None:
    """Raise ValueError that names what cannot be trained so.

    A weight that is made from others in forward (weight norm, spectral norm, any parametrization) is an intermediate
    value: backward would mix the new parameters with the old weight. Where forward runs again first, or backward gets
    the weights of its forward, it fits. What counts its forwards (BatchNorm's running statistics, spectral norm's power
    iteration) would count twice where forward runs again.
    """
    problems = []
    for index, stage in enumerate(stages):
        for name, module in stage.named_modules():
            reasons = [] if recomputes or stashes else list(_derived_weights(module))
            reasons += _counters(module) if recomputes else []
            problems += [
                problem(
                    f"{name or 'the stage itself'} ({type(module).__name__})",
                    expected="a module that does not notice updates between forward and backward",
                    got=reason,
                    where=f"stage {index}",
                    hint=f'Take it out, or pass memory="{"keep" if recomputes else "recompute"}".',
                )
                for reason in reasons
            ]
    raise_all(ValueError, problems)


def _derived_weights(module: nn.Module) -> Iterator[str]:
    if parametrize.is_parametrized(module):
        kinds = {
            type(one).__name__.strip("_")
            for chain in module.parametrizations.values()  # type: ignore[operator]
            for one in chain
        }
        yield f"a weight made in forward by {', '.join(sorted(kinds))}"
    for hook in module._forward_pre_hooks.values():
        if type(hook).__name__ in _NORM_HOOKS:
            yield f"a weight made in forward by {type(hook).__name__}"


def _counters(module: nn.Module) -> Iterator[str]:
    if not module.training:
        return
    if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
        yield "running statistics, which a second forward would update again"
    if type(module).__name__ == "_SpectralNorm":
        yield "a power iteration, which a second forward would go on with"
    if any(type(hook).__name__ == "SpectralNorm" for hook in module._forward_pre_hooks.values()):
        yield "a power iteration, which a second forward would go on with"


def refuse_shared_parameters(model: nn.Module, shared: Iterable[nn.Parameter]) -> None:
    """Raise ValueError that names parameters which two stages have."""
    ids = {id(parameter) for parameter in shared}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in ids]
    if names:
        raise ValueError(
            problem(
                "parameters in two stages",
                expected="each in one stage, whose optimizer alone updates it",
                got=", ".join(names),
                hint="Split elsewhere, untie them, or use FreezingPipeline.",
            )
        )
