"""Paired, timed comparisons of a boosted run with a plain one."""

from boostax.compare.task import Target as Target
from boostax.compare.task import Task as Task
from boostax.compare.task import UsageError as UsageError

__all__ = ["Target", "Task", "UsageError"]
