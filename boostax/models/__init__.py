"""Model seam: functions from a model to a model and a report of what changed."""
