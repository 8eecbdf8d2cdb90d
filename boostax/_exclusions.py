"""What excludes what: data, each row with its reason. Read through :mod:`boostax.rules`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from boostax.config import BoostConfig

__all__ = [
    "AROUND_A_SEARCH",
    "EXCLUSIONS",
    "LINE_SEARCHES",
    "NEEDS_VALUE",
    "NORMALISES",
    "WINDOWS",
    "Exclusion",
]


@dataclasses.dataclass(frozen=True)
class Exclusion:
    """Two things that don't go together.

    Attributes:
      keeps: the technique that stays with ``enable_all``, or ``"optimizer"``.
      drops: the technique that is left out then.
      reason: why they don't go together, and what to do instead.
      applies: a test of the config and of the names of optax's parts in the base optimizer, for
        exclusions that depend on them.
    """

    keeps: str
    drops: str
    reason: str
    applies: Callable[[BoostConfig, frozenset[str]], bool] = lambda config, parts: True


# What evaluates the loss at trial points.
LINE_SEARCHES = frozenset(
    {"scale_by_zoom_linesearch", "scale_by_backtracking_linesearch", "dim_reduce"}
)
# A base optimizer that updates only once in several calls by itself.
WINDOWS = frozenset({"MultiSteps", "accumulate"})
# What may not be around dim_reduce in a chain of the user's own, and why.
_MOVES = "moves the parameters by itself, away from the point that its line search accepted"
_PARTS = (
    "gives it some of the leaves, and its trials would not know where the others go; leave leaves out "
    "with exclude= of trajectory_basis"
)
AROUND_A_SEARCH = {
    **dict.fromkeys(("lookahead", "schedule_free", "mechanize", "sam", "local_steps"), _MOVES),
    **dict.fromkeys(("masked", "partition", "multi_transform", "freeze"), _PARTS),
}
# What exchanges between devices by itself.
_EXCHANGES = frozenset({"adasum", "all_reduce", "local_steps"})
# Parts of optax whose step is as long as the loss over the gradient's norm says.
_LOSS_BY_NORM = frozenset({"scale_by_polyak", "momo", "momo_adam"})
# Parts of optax whose update takes the loss; a window averages it by weight.
NEEDS_VALUE = _LOSS_BY_NORM | {"reduce_on_plateau"}
# Parts of optax whose step has a length that does not follow that of the gradient.
NORMALISES = frozenset(
    {"scale_by_adam", "scale_by_adamax", "scale_by_amsgrad", "scale_by_adan", "scale_by_radam"}
    | {"scale_by_belief", "scale_by_yogi", "scale_by_novograd", "scale_by_adadelta", "scale_by_rms"}
    | {"scale_by_rss", "scale_by_stddev", "scale_by_factored_rms", "scale_by_sm3", "scale_by_lion"}
    | {
        "scale_by_sign",
        "scale_by_trust_ratio",
        "scale_by_sophia",
        "scale_by_muon",
        "scale_by_ademamix",
    }
    | {"normalize_by_update_norm", "scale_by_distance_over_gradients", "prodigy", "dadapt_adamw"}
    # boostax's own.
    | {"adagrad", "adadelta", "rmsprop", "adam", "adam_weight_decay", "lars"}
)

EXCLUSIONS: tuple[Exclusion, ...] = (
    Exclusion(
        "loss_scale_group",
        "loss_scale",
        "the backward pass is scaled once, by one scale for all or by one a group; use one of them",
    ),
    Exclusion(
        "dim_reduce",
        "thor",
        "its line search has accepted a point already, which nothing may change afterwards; it takes "
        "the place of clip, thor and the base optimizer",
    ),
    Exclusion(
        "optimizer",
        "thor",
        "it preconditions already (boostax.thor or scale_by_thor); pass the optimizer that is behind "
        "that, or leave boost.thor off",
        lambda config, parts: "scale_by_thor" in parts,
    ),
    Exclusion(
        "optimizer",
        "thor",
        "the curvature pairs of L-BFGS are differences of one function's gradients, and what THOR "
        "makes of gradients is no function's",
        lambda config, parts: "scale_by_lbfgs" in parts,
    ),
    Exclusion(
        "optimizer",
        "thor",
        "its step is as long as the loss over the gradient's norm says, and behind THOR that norm is "
        "the preconditioned gradient's",
        lambda config, parts: bool(parts & _LOSS_BY_NORM),
    ),
    Exclusion(
        "optimizer",
        "thor",
        "SAM goes up along the gradient before it goes down, and THOR would turn both steps and take "
        "statistics at the points in between; put boostax.scale_by_thor into the optimizer inside it",
        lambda config, parts: "sam" in parts,
    ),
    Exclusion(
        "optimizer",
        "thor",
        "it accumulates by itself (optax.MultiSteps or boostax.accumulate), and THOR would refresh and "
        "clip by micro-batches; pass the optimizer that is inside it, and let grad_accumulation.every "
        "make the window",
        lambda config, parts: bool(parts & WINDOWS),
    ),
    Exclusion(
        "optimizer",
        "thor",
        "it holds boostax.freeze already, and THOR around that would average the zeros of frozen layers "
        "into their factors; pass the optimizer that is inside it, and let grad_freeze freeze",
        lambda config, parts: "freeze" in parts,
    ),
    Exclusion(
        "dim_reduce",
        "grad_accumulation",
        "its line search needs the loss of the whole window, and a window across steps keeps only "
        "the last micro-batch; use grad_accumulation.microbatch with every = 1",
        lambda config, parts: config.has_window,
    ),
    Exclusion(
        "dim_reduce",
        "grad_freeze",
        "a step along a direction of the trajectory moves every leaf of it, and to hold some of them "
        "would change the point that the line search accepted; leave leaves out of the basis for good "
        "with dim_reduce.exclude",
    ),
    Exclusion(
        "dim_reduce",
        "adasum",
        "combining the devices' deltas would change the point that the line search accepted",
    ),
    Exclusion(
        "adasum",
        "grad_freeze",
        "with local steps a leaf that gets frozen between two exchanges would stay, on each device, "
        "where that device has moved it, and the common parameters would not learn of it; set "
        "adasum.local_steps = 1",
        lambda config, parts: config.adasum.local_steps > 1,
    ),
    Exclusion(
        "dim_reduce",
        "centralize",
        "centralizing the final update would change the point that the line search accepted; "
        'use centralize.on = "gradient"',
        lambda config, parts: config.centralize.on == "update",
    ),
    Exclusion(
        "optimizer",
        "grad_accumulation",
        "its line search needs the loss of the whole window, and a window across steps keeps only "
        "the last micro-batch; use grad_accumulation.microbatch with every = 1",
        lambda config, parts: bool(parts & LINE_SEARCHES) and config.has_window,
    ),
    Exclusion(
        "optimizer",
        "grad_accumulation",
        "it accumulates by itself (optax.MultiSteps or boostax.accumulate), and one window inside "
        "another updates once in every * every calls; pass the optimizer that is inside it",
        lambda config, parts: bool(parts & WINDOWS) and config.has_window,
    ),
    Exclusion(
        "optimizer",
        "grad_freeze",
        "it accumulates by itself (optax.MultiSteps or boostax.accumulate), and freezing around a "
        "window would count calls instead of updates; pass the optimizer that is inside it, and "
        "let grad_accumulation.every make the window",
        lambda config, parts: bool(parts & WINDOWS),
    ),
    Exclusion(
        "optimizer",
        "grad_freeze",
        "it holds boostax.freeze already, with groups and a schedule of its own; pass the "
        "optimizer that is inside it",
        lambda config, parts: "freeze" in parts,
    ),
    Exclusion(
        "optimizer",
        "grad_freeze",
        "the curvature pairs of L-BFGS couple all parameters, so that a pair of which some leaves "
        "are on hold is none",
        lambda config, parts: "scale_by_lbfgs" in parts,
    ),
    Exclusion(
        "optimizer",
        "centralize",
        "centralizing the final update would change the point that its line search accepted; "
        'use centralize.on = "gradient"',
        lambda config, parts: bool(parts & LINE_SEARCHES) and config.centralize.on == "update",
    ),
    Exclusion(
        "optimizer",
        "adasum",
        "it exchanges between devices already; pass the optimizer that is inside it",
        lambda config, parts: bool(parts & _EXCHANGES),
    ),
    Exclusion(
        "optimizer",
        "adasum",
        "it accumulates by itself (optax.MultiSteps or boostax.accumulate), and the devices would "
        "exchange at each call instead of once a window; pass the optimizer that is inside it, and "
        "let grad_accumulation.every make the window",
        lambda config, parts: bool(parts & WINDOWS),
    ),
    Exclusion(
        "optimizer",
        "adasum",
        "it holds boostax.freeze already, and an exchange around it would send the frozen leaves "
        "too; pass the optimizer that is inside it, and let grad_freeze freeze",
        lambda config, parts: "freeze" in parts,
    ),
    Exclusion(
        "optimizer",
        "adasum",
        "its line search takes the slope from each device's own gradient, so that the devices would "
        "end at different points; without adasum the devices' mean is searched along",
        lambda config, parts: bool(parts & LINE_SEARCHES) and config.adasum.on == "gradient",
    ),
    Exclusion(
        "optimizer",
        "adasum",
        "on each device its line search would go along a line of its own and wait for the others' "
        "loss, and combining the devices' updates would change the point that it accepted",
        lambda config, parts: bool(parts & LINE_SEARCHES) and config.adasum.on == "update",
    ),
    Exclusion(
        "optimizer",
        "adasum",
        "the curvature pairs of L-BFGS are differences of one function's gradients, and what AdaSum "
        "makes of the devices' gradients is no function's",
        lambda config, parts: "scale_by_lbfgs" in parts and config.adasum.on == "gradient",
    ),
    Exclusion(
        "optimizer",
        "adasum",
        "its step is as long as the loss over the gradient's norm says, and the loss is that of all "
        'devices, the gradient each device\'s own; use adasum.on = "gradient"',
        lambda config, parts: bool(parts & _LOSS_BY_NORM) and config.adasum.on == "update",
    ),
)
