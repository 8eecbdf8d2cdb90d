"""The one settings table of the common suite: every technique has a row here.

``docs/testing.md`` says how to add one.
"""

from __future__ import annotations

import optax

from tests.common.harness import Row

ROWS: tuple[Row, ...] = (
    Row(
        name="optax_momentum",
        covers=("accumulate",),
        seam="update",
        cycle=2,
        transform=lambda learning_rate: optax.sgd(learning_rate, 0.9),
    ),
    Row(
        name="optax_adam",
        covers=("accumulate",),
        seam="update",
        cycle=2,
        transform=lambda learning_rate: optax.adam(learning_rate, eps=1e-3),
    ),
)

# Public names that are no technique, each with what it is instead.
NOT_TECHNIQUES: dict[str, str] = {
    "BoostConfig": "the settings that AutoBoost is built from",
    "load_config": "reads the settings that AutoBoost is built from",
    "forward_order": "names layers for parameter_groups; changes nothing in training",
    "AccumulateState": "the state of accumulate",
    "has_updated": "reads the state of accumulate",
    "FreezeState": "the state of freeze",
    "LossAux": "what a loss function returns",
    "TrainState": "the state of train_step",
    "ConfigError": "an error of the config loader",
    "MissingExtraError": "an error about a missing package",
    "StateMismatchError": "an error about a restored state",
}
