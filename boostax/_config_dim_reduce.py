"""The section ``dim_reduce`` of a config: where the basis comes from, and what ``dim_reduce`` takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from boostax._config_named import Fault
from boostax._config_types import (
    INT32,
    Allowed,
    Count,
    Flag,
    NotNegative,
    OpenFraction,
    OptionalPath,
    Pattern,
    Section,
    one_of,
)

if TYPE_CHECKING:
    from boostax.config import BoostConfig

__all__ = ["NO_BASIS", "DimReduce", "dim_reduce_faults"]

# Why dim_reduce can't be set up.
NO_BASIS = (
    "dim_reduce needs to know where its basis comes from; set dim_reduce.pca_mat_path to a file of one, "
    "or dim_reduce.weight_load_dir to a folder of snapshots"
)


class DimReduce(Section):
    """Quasi-Newton steps in the subspace of a training trajectory."""

    rho: OpenFraction = Field(default=0.55, description="Factor by which a trial step shrinks.")
    gamma: Annotated[
        Annotated[float, Field(ge=0, lt=1)], Allowed("a number of at least 0 and below 1")
    ] = Field(default=0.9, description="Momentum of the gradient outside the space.")
    alpha: NotNegative = Field(default=0.001, description="Step size outside the space.")
    sigma: OpenFraction = Field(
        default=0.4, description="Share of the expected decrease that is asked."
    )
    n_components: Count = Field(
        default=32,
        description="Dimensions of the space. A basis that is read must have as many.",
    )
    pca_mat_path: OptionalPath = Field(
        default=None,
        description="File of the basis: .npz, as boostax basis writes it, or .npy with the shape "
        "(n_components, weights). Where weight_load_dir is given too and there is no such file, the "
        "basis is written there.",
    )
    weight_load_dir: OptionalPath = Field(
        default=None,
        description="Folder of weight snapshots (.npz, flax or orbax) that the basis is made from.",
    )
    timeout: Count = Field(
        default=1800,
        description="Seconds to wait for the file at pca_mat_path, which another process writes.",
    )
    max_backtracks: Annotated[
        Annotated[int, Field(ge=0, le=INT32)], Allowed(f"an integer from 0 to {INT32}")
    ] = Field(
        default=10, description="How often a step is shortened at most; in mode reference once."
    )
    center: Flag = Field(
        default=True,
        description="Principal directions of the snapshots less their mean; false: the "
        "orthogonalised snapshots themselves.",
    )
    exclude: Annotated[tuple[Pattern, ...], Allowed("a list of path patterns")] = Field(
        default=(), description="Path patterns of leaves that stay as they are."
    )
    leaf_order: Annotated[
        Annotated[tuple[Pattern, ...], Field(min_length=1)] | None,
        Allowed("a list with the path of each leaf"),
    ] = Field(
        default=None,
        description="The leaves' paths in the order of a .npy file's columns. Default: tree order, "
        "which is alphabetical.",
    )
    dtype: Annotated[
        Literal["float32", "bfloat16", "float64"] | None, one_of("float32", "bfloat16", "float64")
    ] = Field(
        default=None,
        description="Dtype that the basis is kept in; bfloat16 halves its memory. Default: that of a "
        ".npz file, else float32.",
    )
    mode: Annotated[Literal["default", "reference"], one_of("default", "reference")] = Field(
        default="default", description="reference: the numbers of mindspore.boost.DimReduce."
    )

    @property
    def has_source(self) -> bool:
        """Whether it is known where the basis comes from."""
        return self.pca_mat_path is not None or self.weight_load_dir is not None


def dim_reduce_faults(config: BoostConfig) -> list[Fault]:
    """Return the faults that only several keys of the section make."""
    section = config.dim_reduce
    path, folder = section.pca_mat_path, section.weight_load_dir
    faults = [
        Fault(f"dim_reduce.{key}", "is empty; give a path")
        for key in ("pca_mat_path", "weight_load_dir")
        if getattr(section, key) == ""
    ]
    if path and not path.endswith((".npz", ".npy")):
        faults.append(
            Fault("dim_reduce.pca_mat_path", f'is "{path}"; a basis is a .npz or a .npy file')
        )
    if section.leaf_order is not None and not (path and path.endswith(".npy")):
        faults.append(
            Fault(
                "dim_reduce.leaf_order",
                "says the order of a .npy file's columns, and pca_mat_path names no such file",
            )
        )
    if not section.center and folder is None:
        faults.append(
            Fault("dim_reduce.center", "is for snapshots; set dim_reduce.weight_load_dir")
        )
    return faults
