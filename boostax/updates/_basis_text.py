"""A basis in words."""

from __future__ import annotations

from typing import Any

__all__ = ["describe"]


def describe(basis: Any) -> str:
    """Return what ``TrajectoryBasis.describe`` says."""
    layout = basis.layout
    size = basis.k * basis.size * basis.dtype.itemsize
    source = ""
    if basis.snapshots:
        how = " less their mean" if basis.centered else ", as they are"
        source = f", from {basis.snapshots} snapshots{how}"
    lines = [
        f"{basis.k} directions of {basis.size:,} weights in {len(basis.paths)} leaves{source}",
        f"kept in {basis.dtype}: {_bytes(size)}",
    ]
    if basis.explained:
        lines.append(f"explained: {100 * sum(basis.explained):.4g} % of the snapshots' variance")
    left_out = [
        f"{path} ({dtype})"
        for path, dtype, covered in zip(layout.paths, layout.dtypes, layout.covered, strict=True)
        if not covered
    ]
    if left_out:
        lines.append(f"not covered: {', '.join(left_out)}")
    return "\n".join(lines)


def _bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"
