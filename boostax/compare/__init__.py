"""Paired, timed comparisons of a boosted run with a plain one."""
