"""Which strategy, on which machines, and what it will give: measured here for some seconds, forecast for a cluster."""

from lightning_recsys.placement.machine_kinds import MachineKind, Machines, machines_from, read_machines
from lightning_recsys.planning.forecast import Forecast, Layout
from lightning_recsys.planning.measuring import StepCost, measure_step
from lightning_recsys.planning.plan import Measured, Plan, compare, measure, plan

__all__ = [
    "Forecast",
    "Layout",
    "MachineKind",
    "Machines",
    "Measured",
    "Plan",
    "StepCost",
    "compare",
    "machines_from",
    "measure",
    "measure_step",
    "plan",
    "read_machines",
]
