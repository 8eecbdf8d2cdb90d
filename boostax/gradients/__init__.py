"""Gradient seam: from a loss to its value and gradients, one technique a file."""
