"""boostax: train JAX, Flax and Optax networks in less time, fewer steps or less memory.

The public names, in the order of the pipeline. Each is imported when first used, so that
``import boostax`` costs next to nothing on top of JAX, Flax and Optax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from boostax import linen as linen
    from boostax import nnx as nnx
    from boostax import parallel as parallel
    from boostax.auto import AutoBoost as AutoBoost
    from boostax.config import BoostConfig as BoostConfig
    from boostax.config import load_config as load_config
    from boostax.errors import ConfigError as ConfigError
    from boostax.errors import MissingExtraError as MissingExtraError
    from boostax.errors import StateMismatchError as StateMismatchError
    from boostax.finetune.feature_tap import feature_tap as feature_tap
    from boostax.finetune.histograms import feature_histograms as feature_histograms
    from boostax.finetune.histograms import histogram_edges as histogram_edges
    from boostax.finetune.joint_batches import joint_batches as joint_batches
    from boostax.finetune.joint_loss import joint_loss as joint_loss
    from boostax.finetune.nearest import SourceSubset as SourceSubset
    from boostax.finetune.nearest import enlarge_neighbours as enlarge_neighbours
    from boostax.finetune.nearest import nearest_source_subset as nearest_source_subset
    from boostax.gradients.capture import capture_layers as capture_layers
    from boostax.gradients.forward_order import forward_order as forward_order
    from boostax.gradients.group_loss_scale import GroupLossScale as GroupLossScale
    from boostax.gradients.layers import CapturedLayers as CapturedLayers
    from boostax.gradients.loss_scale import DynamicLossScale as DynamicLossScale
    from boostax.gradients.loss_scale import LossScaleState as LossScaleState
    from boostax.gradients.loss_scale import set_loss_scale as set_loss_scale
    from boostax.gradients.microbatch import microbatch as microbatch
    from boostax.models.fold_batch_norm import fold_batch_norm as fold_batch_norm
    from boostax.models.less_bn import less_bn as less_bn
    from boostax.models.load_weights import LoadReport as LoadReport
    from boostax.models.load_weights import load_weights as load_weights
    from boostax.models.norm_head import norm_head as norm_head
    from boostax.models.normalized_dense import NormalizedDense as NormalizedDense
    from boostax.models.normalized_linear import NormalizedLinear as NormalizedLinear
    from boostax.models.replace_norm import replace_norm as replace_norm
    from boostax.models.report import ModelReport as ModelReport
    from boostax.training.contract import LossAux as LossAux
    from boostax.training.predictive import Categorical as Categorical
    from boostax.training.predictive import Gaussian as Gaussian
    from boostax.training.refresh import refresh_batch_statistics as refresh_batch_statistics
    from boostax.training.snapshots import SnapshotWriter as SnapshotWriter
    from boostax.training.state import TrainState as TrainState
    from boostax.training.step import train_step as train_step
    from boostax.updates.accumulate import AccumulateState as AccumulateState
    from boostax.updates.accumulate import accumulate as accumulate
    from boostax.updates.accumulate import flush as flush
    from boostax.updates.accumulate import has_updated as has_updated
    from boostax.updates.adasum import adasum as adasum
    from boostax.updates.adasum import adasum_pair as adasum_pair
    from boostax.updates.all_reduce import all_reduce as all_reduce
    from boostax.updates.basis import TrajectoryBasis as TrajectoryBasis
    from boostax.updates.centralize import centralize as centralize
    from boostax.updates.centralize import centralized_axes as centralized_axes
    from boostax.updates.dim_reduce import DimReduceState as DimReduceState
    from boostax.updates.dim_reduce import dim_reduce as dim_reduce
    from boostax.updates.freeze import FreezeState as FreezeState
    from boostax.updates.freeze import Freezing as Freezing
    from boostax.updates.freeze import freeze as freeze
    from boostax.updates.freeze_schedule import freeze_schedule as freeze_schedule
    from boostax.updates.local_steps import LocalStepsState as LocalStepsState
    from boostax.updates.local_steps import local_params as local_params
    from boostax.updates.local_steps import local_steps as local_steps
    from boostax.updates.optimizer import optimizer as optimizer
    from boostax.updates.parameter_groups import parameter_groups as parameter_groups
    from boostax.updates.row_sparse import RowSparse as RowSparse
    from boostax.updates.scale_by_thor import ThorState as ThorState
    from boostax.updates.scale_by_thor import scale_by_thor as scale_by_thor
    from boostax.updates.thor import thor as thor
    from boostax.updates.torch_state import from_torch_state as from_torch_state
    from boostax.updates.trajectory_basis import trajectory_basis as trajectory_basis

# Name -> module. Front door, model seam, gradient seam, update seam, training, fine-tuning, errors.
_HOME = {
    "AutoBoost": "auto",
    "BoostConfig": "config",
    "load_config": "config",
    "less_bn": "models.less_bn",
    "NormalizedLinear": "models.normalized_linear",
    "NormalizedDense": "models.normalized_dense",
    "norm_head": "models.norm_head",
    "replace_norm": "models.replace_norm",
    "fold_batch_norm": "models.fold_batch_norm",
    "load_weights": "models.load_weights",
    "LoadReport": "models.load_weights",
    "ModelReport": "models.report",
    "forward_order": "gradients.forward_order",
    "microbatch": "gradients.microbatch",
    "capture_layers": "gradients.capture",
    "CapturedLayers": "gradients.layers",
    "DynamicLossScale": "gradients.loss_scale",
    "GroupLossScale": "gradients.group_loss_scale",
    "LossScaleState": "gradients.loss_scale",
    "set_loss_scale": "gradients.loss_scale",
    "accumulate": "updates.accumulate",
    "AccumulateState": "updates.accumulate",
    "flush": "updates.accumulate",
    "has_updated": "updates.accumulate",
    "parameter_groups": "updates.parameter_groups",
    "freeze_schedule": "updates.freeze_schedule",
    "Freezing": "updates.freeze",
    "FreezeState": "updates.freeze",
    "freeze": "updates.freeze",
    "all_reduce": "updates.all_reduce",
    "adasum": "updates.adasum",
    "adasum_pair": "updates.adasum",
    "local_steps": "updates.local_steps",
    "local_params": "updates.local_steps",
    "LocalStepsState": "updates.local_steps",
    "centralize": "updates.centralize",
    "centralized_axes": "updates.centralize",
    "scale_by_thor": "updates.scale_by_thor",
    "ThorState": "updates.scale_by_thor",
    "thor": "updates.thor",
    "trajectory_basis": "updates.trajectory_basis",
    "TrajectoryBasis": "updates.basis",
    "dim_reduce": "updates.dim_reduce",
    "DimReduceState": "updates.dim_reduce",
    "optimizer": "updates.optimizer",
    "RowSparse": "updates.row_sparse",
    "from_torch_state": "updates.torch_state",
    "LossAux": "training.contract",
    "Categorical": "training.predictive",
    "Gaussian": "training.predictive",
    "TrainState": "training.state",
    "train_step": "training.step",
    "SnapshotWriter": "training.snapshots",
    "refresh_batch_statistics": "training.refresh",
    "feature_tap": "finetune.feature_tap",
    "histogram_edges": "finetune.histograms",
    "feature_histograms": "finetune.histograms",
    "nearest_source_subset": "finetune.nearest",
    "SourceSubset": "finetune.nearest",
    "enlarge_neighbours": "finetune.nearest",
    "joint_loss": "finetune.joint_loss",
    "joint_batches": "finetune.joint_batches",
    "ConfigError": "errors",
    "MissingExtraError": "errors",
    "StateMismatchError": "errors",
}

# Packages that are names of their own: boostax.parallel.start(), boostax.nnx.BatchNorm(8).
_PACKAGES = ("parallel", "nnx", "linen")

__version__ = "0.1.0"
__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"boostax.{name}")
    if name not in _HOME:
        from boostax.errors import did_you_mean

        raise AttributeError(
            f"module 'boostax' has no attribute {name!r}.{did_you_mean(name, _HOME)}"
        )
    value = getattr(importlib.import_module(f"boostax.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_PACKAGES})
