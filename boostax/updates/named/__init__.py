"""The optimizers that have PyTorch's and MindSpore's semantics, by name."""

from __future__ import annotations

from boostax.updates.named.adadelta import adadelta
from boostax.updates.named.adagrad import AdagradState, adagrad
from boostax.updates.named.adam import adam, adam_weight_decay
from boostax.updates.named.lars import lars
from boostax.updates.named.rmsprop import rmsprop
from boostax.updates.named.sgd import momentum, sgd

__all__ = [
    "OPTIMIZERS",
    "AdagradState",
    "adadelta",
    "adagrad",
    "adam",
    "adam_weight_decay",
    "lars",
    "momentum",
    "rmsprop",
    "sgd",
]

OPTIMIZERS = {
    function.__name__: function
    for function in (sgd, momentum, adagrad, adadelta, rmsprop, adam, adam_weight_decay, lars)
}
