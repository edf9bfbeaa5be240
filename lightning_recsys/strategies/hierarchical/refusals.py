"""The refusals of models that cannot be trained in parts on group servers, said before training begins."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import MethodType

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from pytorch_lightning.plugins.precision import Precision
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from lightning_recsys.strategies.common.averaged_copies import averaging_callbacks

# Hooks between the backward pass and the update, which read or change the gradients of the whole model.
GRADIENT_HOOKS = ("on_after_backward", "configure_gradient_clipping", "on_before_optimizer_step")


def cut_module(task: pl.LightningModule, path: str | None) -> nn.Module:
    """The module that is cut: the one at a path, or the task's ``model``, or the task itself where it has none.

    Raises:
        ValueError: there is no such module.
    """
    if path is None:
        own = getattr(task, "model", None)
        return own if isinstance(own, nn.Module) else task
    try:
        return task.get_submodule(path)
    except AttributeError:
        names = [name for name, _ in task.named_children()]
        raise ValueError(f"strategy.module={path!r}: the task has no such module; it has {names}.") from None


def refuse_without_forward(task: pl.LightningModule, cut: nn.Module) -> None:
    """Refuse a module that has no ``forward``, as a task whose training step calls its modules one by one.

    One that was set on the object is no method of its class, which is what is traced.

    Raises:
        ValueError: there is none, and names the modules that could be called by one; or it was set on the object.
    """
    own = vars(cut).get("forward")
    if own is not None and own != MethodType(type(cut).forward, cut):  # which Lightning may set as well
        raise ValueError(
            f"strategy=hierarchical cuts what the forward of a module's class computes, and this {type(cut).__name__}"
            f" has another one, {getattr(own, '__qualname__', own)}, which was set on the object"
            f" (model.forward = ...). Make it the forward of a class of its own, or use strategy=shadowsync."
        )
    if getattr(cut.forward, "__func__", None) not in (nn.Module.forward, pl.LightningModule.forward):
        return
    trained = [name for name, x in cut.named_children() if any(y.requires_grad for y in x.parameters())]
    raise ValueError(
        f"strategy=hierarchical cuts what one module's forward computes, and {type(cut).__name__} has no forward:"
        f" {type(task).__name__}.training_step calls {' and '.join(trained) or 'other modules'} by itself. Give"
        f" {type(cut).__name__} a forward that calls them and returns what the loss needs, and call self(...) in"
        " training_step; or put them into one module and name its path with strategy.module; or use"
        " strategy=shadowsync."
    )


def refuse_trainer(trainer: pl.Trainer, precision: Precision) -> None:
    """Refuse graphs, and whatever looks at gradients between the backward pass and the update.

    Raises:
        TypeError: the task trains on a graph.
        ValueError: there is such a setting of the trainer, or such a hook of the task or a callback.
    """
    module = trainer.lightning_module
    if getattr(module, "joins_examples", False):
        raise TypeError(
            "strategy=hierarchical cuts a model into operators that make one row of each example, and"
            f" {type(module).__name__} joins each node with its neighbours, of which every batch has others: use"
            " strategy=shadowsync, het, async_ps or ddp."
        )
    if not module.automatic_optimization:
        raise ValueError(
            "strategy=hierarchical updates a part of the model as soon as its gradients are there, which manual"
            " optimization (automatic_optimization=False) has no say in. Use strategy=shadowsync."
        )
    if trainer.gradient_clip_val:
        raise ValueError(
            f"trainer.gradient_clip_val={trainer.gradient_clip_val} needs the gradients of the whole model before any"
            " of them is applied, and strategy=hierarchical applies them part by part, on several servers. Leave it"
            " out, or use strategy=shadowsync."
        )
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    owners: list[pl.LightningModule | pl.Callback] = [module, *callbacks]
    for owner, hook in itertools.product(owners, GRADIENT_HOOKS):
        if _has_own(hook, owner):
            raise ValueError(
                f"{type(owner).__name__}.{hook} looks at gradients before they are applied, and strategy=hierarchical"
                " applies them on group servers, in the backward pass: there would be none. Leave it out, or use"
                " strategy=shadowsync."
            )
    schedules = [x for x in callbacks if isinstance(x, GradientAccumulationScheduler)]
    accumulating = [
        f"the callback {type(x).__name__} (scheduling={x.scheduling})"
        for x in schedules
        if x.going_to_accumulate_grad_batches()
    ]
    if trainer.accumulate_grad_batches != 1:
        accumulating.insert(0, f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}")
    if accumulating:
        raise ValueError(
            f"{accumulating[0]} accumulates gradients, and strategy=hierarchical updates the model at every backward"
            " pass, on its group servers. Leave it out, and use larger batches (data.batch_size)."
        )
    if (name := getattr(precision, "precision", "32-true")) != "32-true":
        raise ValueError(
            f"trainer.precision={name}: group servers compute in float32, whatever trainers do. Use 32-true, and"
            " strategy.compression=bf16 to send half the bytes."
        )
    if averaging := averaging_callbacks(trainer):
        raise ValueError(
            f"callback {type(averaging[0]).__name__} averages weights after each step, and with strategy=hierarchical"
            " these are on group servers meanwhile. Leave it out, or use strategy=shadowsync."
        )


def _has_own(hook: str, owner: pl.LightningModule | pl.Callback) -> bool:
    """Whether a hook is another one than Lightning's empty one; a callback may have any callable, or ``None``."""
    base = getattr(pl.LightningModule if isinstance(owner, pl.LightningModule) else pl.Callback, hook, None)
    own = getattr(owner, hook, None)
    return None not in (base, own) and getattr(own, "__func__", own) is not base


def refuse_optimizers(task: pl.LightningModule, optimizers: Sequence[Optimizer], *, cut: str | None) -> None:
    """Refuse optimizers that group servers cannot share, and parameters that no part of the model has.

    Raises:
        ValueError: there is not one optimizer, or a parameter is outside the module that is cut.
        TypeError: the optimizer has hooks before its step.
    """
    if len(optimizers) != 1:
        raise ValueError(
            f"strategy=hierarchical trains with one optimizer, of which group servers each have a share, and"
            f" configure_optimizers gives {len(optimizers)}."
        )
    (optimizer,) = optimizers
    if optimizer._optimizer_step_pre_hooks:
        raise TypeError(
            "strategy=hierarchical trains the dense part on group servers, and hooks before the steps of"
            f" {type(optimizer).__name__} (register_step_pre_hook, lightning_recsys.optim.swap) would find neither"
            " gradients nor state. Leave them out, or use strategy=shadowsync."
        )
    module = cut_module(task, cut)
    inside = {id(x) for x in module.parameters()}
    trained = {id(x) for group in optimizer.param_groups for x in group["params"]}
    outside = [
        name for name, x in task.named_parameters() if x.requires_grad and id(x) in trained and id(x) not in inside
    ]
    if outside:
        raise ValueError(
            f"strategy=hierarchical cuts {type(module).__name__} over group servers, and {outside[0]} is outside of"
            " it, where each trainer would train its own. Put it into the model, or name with strategy.module the path"
            " of a module that has all trained parameters ('' is the task itself)."
        )


def refuse_hooked(module: nn.Module) -> None:
    """Refuse hooks on the parameters of a module that is cut: its gradients come to be on group servers.

    Raises:
        ValueError: a parameter has such a hook.
    """
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"strategy=hierarchical: {name} has hooks (register_hook), which would not run, as its gradient is"
                " computed and applied on a group server. Leave them out, or use strategy=shadowsync."
            )


def refuse_parametrized(module: nn.Module) -> None:
    """Refuse parametrizations in a module that is cut: their classes, which torch makes as it goes, do not travel.

    Raises:
        ValueError: a module has such a one.
    """
    for name, inner in module.named_modules():
        if is_parametrized(inner):
            parametrized = ", ".join(inner.parametrizations)
            raise ValueError(
                f"strategy=hierarchical: {name or 'the model'} ({type(inner).__name__}) has parametrizations"
                f" ({parametrized}), with which it cannot be sent to a group server. Take them away with"
                " torch.nn.utils.parametrize.remove_parametrizations, or use strategy=shadowsync."
            )


def switches(module: nn.Module) -> dict[str, bool]:
    """The modes that group servers take of a module once: which of its modules are in training mode, or trained."""
    modes = {f"{name}.training": x.training for name, x in module.named_modules()}
    return modes | {f"{name}.requires_grad": x.requires_grad for name, x in module.named_parameters()}


def refuse_switched(before: Mapping[str, bool], module: nn.Module) -> None:
    """Refuse a module that is frozen or released in the midst of training, of which group servers would not know.

    Args:
        before: The :func:`switches` of the module when group servers took it.
        module: The same module as it is now.

    Raises:
        ValueError: a parameter or a module was frozen, released, or put into another mode.
    """
    now = switches(module)
    if changed := [name for name, value in now.items() if before.get(name) is not value]:
        raise ValueError(
            f"strategy=hierarchical: {changed[0]} became {now[changed[0]]} in the midst of training, and group servers"
            " have the model as it was at the first batch. Freeze and release modules before training, end it and go on"
            " from its checkpoint with other ones, or use strategy=shadowsync."
        )


def refuse_autocast() -> None:
    """Refuse a call of the model under ``torch.autocast``, of which group servers would not know.

    Raises:
        ValueError: it is on.
    """
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise ValueError(
            "strategy=hierarchical: the training step calls the model under torch.autocast, and group servers compute"
            " in float32. Call the model outside of it, or use strategy=shadowsync."
        )
