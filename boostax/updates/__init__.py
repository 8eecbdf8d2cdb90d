"""Update seam: gradient transformations, one technique a file."""
