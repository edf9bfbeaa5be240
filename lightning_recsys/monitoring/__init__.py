"""Where a process tells how it is doing: Prometheus text, health and readiness, at a port of its own."""

from lightning_recsys.monitoring.endpoint import Collect, MonitoringEndpoint
from lightning_recsys.monitoring.run_folder import Monitored, announce, monitored_in

__all__ = ["Collect", "Monitored", "MonitoringEndpoint", "announce", "monitored_in"]
