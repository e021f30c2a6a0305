"""The name that bench knows a step's figures by."""

from hetero.reporting.run_record import StepPoint as StepMetrics

__all__ = ["StepMetrics"]
