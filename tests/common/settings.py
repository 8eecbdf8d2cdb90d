"""The one settings table of the common suite: every technique has a row here.

``docs/testing.md`` says how to add one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

import boostax
from tests.common import programs
from tests.common.harness import Row
from tests.models import captured, data, plain, residual

_NOT_A_TRANSFORMATION = {
    "chain": "it holds the user's chain and is not itself a transformation to put into one",
    "masked": "it holds a transformation; a masked one inside it is optax's own business",
    "multi_transform": "it holds a transformation; a labelled one inside it is optax's own business",
    "inject_hyperparams": "it has no update whose hyperparameters optax could inject",
    "extra_args": "it hands extra arguments on to its transformation, whose own row has the check",
    "sharding": "it lays out nothing itself: shardings come from the transformation's own row",
    "shard_map": "its update is the transformation's, whose own row runs it inside shard_map",
}
_GRADIENT_SEAM = {
    "chain": "it makes gradients out of a loss and has no update to put into a chain",
    "masked": "it makes gradients out of a loss; there is no update to mask leaf by leaf",
    "multi_transform": "it makes gradients out of a loss; there is no update to give a label to",
    "inject_hyperparams": "its one setting is the static number of pieces, no traced hyperparameter",
    "extra_args": "it returns a value_and_grad function, and that takes no extra arguments",
    "sharding": "it keeps no state from step to step whose sharding could change",
    "shard_map": "it has no update; the check on devices splits its batch over all of them",
}


def _accumulate(policy: str):
    return lambda learning_rate: boostax.accumulate(
        optax.sgd(learning_rate, 0.9), 3, nonfinite=policy
    )


def _adasum(learning_rate):
    return optax.chain(boostax.adasum("data"), optax.sgd(learning_rate, 0.9))


def _local_steps(learning_rate):
    return boostax.local_steps(
        optax.sgd(learning_rate, 0.9),
        2,
        boostax.all_reduce("data"),
        outer=optax.sgd(0.7, 0.9, nesterov=True),
    )


_MANUAL = {"sharding": "it exchanges in manual regions, where each device holds whole leaves"}

# A schedule of six windows is two cycles of three; in steps 7 and 8 nothing is frozen any more.
_SCHEDULE = (0, 1, 2, 0, 1, 2)
_FROM_SCHEDULE = boostax.freeze_schedule("continuous", 3, full_fraction=0.34, total_steps=6)


def _flushing(learning_rate):
    """Windows of three and two: every fifth call flushes the window that is open."""
    tx = boostax.accumulate(optax.sgd(learning_rate, 0.9), 3, nonfinite="off")

    def init(params):
        return jnp.zeros((), jnp.int32), tx.init(params)

    def update(updates, state, params=None, **extra):
        calls, state = state[0] + 1, state[1]
        usual = tx.update(updates, state, params, **extra)
        flushed = boostax.flush(tx, usual[1], params)
        last = calls % 5 == 0
        updates, state = jax.tree.map(lambda a, b: jnp.where(last, a, b), flushed, usual)
        return updates, (calls, state)

    return optax.GradientTransformationExtraArgs(init, update)


def _thor(learning_rate):
    layers = captured.perceptron(plain.SIZES)
    # A KL clip that binds would make updates other than proportional to the learning rate.
    return boostax.thor(
        learning_rate, 0.1, layers=layers, weight_decay=0.01, frequency=3, early=(0, 1), kl_clip=1e6
    )


def _windows_of_thor():
    """Windows of two, statistics due in every second one: both programs meet in a cycle of four."""
    batch = jax.tree.map(lambda leaf: leaf[0], data.batches(1))
    layers = boostax.capture_layers(plain.loss, plain.init(), batch)
    thor = boostax.thor(0.05, 0.1, layers=layers, frequency=2, early=())
    return boostax.accumulate(thor, 2)


def _dim_reduce():
    """Three directions that reach every number of the perceptron."""
    params = plain.init()
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    rows = np.linalg.qr(np.random.default_rng(5).normal(size=(size, 3)))[0].T
    basis = boostax.TrajectoryBasis.from_array(rows.astype(np.float32), params)
    return boostax.dim_reduce(basis, alpha=0.1)


def _windows_that_freeze():
    """Windows of two around freezing, centralization and a clip that binds."""
    inner = optax.chain(boostax.centralize(), optax.clip_by_global_norm(0.1), programs.momentum())
    frozen = boostax.freeze(inner, programs.freezing((0, 1, 0, 1)))
    return boostax.accumulate(frozen, 2, nonfinite="skip_window")


def _one_a_leaf(learning_rate):
    """Every named optimizer, each on a leaf of its own; epsilons that float16 does not make noise of."""
    groups = [
        {"params": "layers_0/bias", "optimizer": {"name": "adagrad", **_START, "lr_decay": 0.1}},
        {"params": "layers_1/kernel", "optimizer": {"name": "adam", **_SLOW, "amsgrad": True}},
        {"params": "layers_1/bias", "optimizer": {"name": "adadelta", "weight_decay": 0.01}},
        {"params": "layers_2/kernel", "optimizer": {"name": "lars", "trust_coefficient": 0.1}},
        {
            "params": "layers_2/bias",
            "optimizer": {"name": "rmsprop", "eps": 0.1, "centered": True, "momentum": 0.5},
        },
    ]
    return boostax.optimizer(
        "sgd", learning_rate=learning_rate, momentum=0.9, dampening=0.5, groups=groups
    )


_START = {"initial_accumulator_value": 0.1}
_SLOW = {"b2": 0.9, "eps": 1e-2}


def _one_a_leaf_of_mindspore(learning_rate):
    """The same in MindSpore's convention, within windows of two and freezing."""
    theirs = {"convention": "mindspore"}
    groups = [
        {"params": "layers_0/kernel", "optimizer": {"name": "adam_weight_decay", **_SLOW}},
        {"params": "layers_0/bias", "optimizer": {"name": "adagrad", **theirs}},
        {"params": "layers_1/kernel", "optimizer": {"name": "lars", "trust_coefficient": 0.1}},
        {"params": "layers_1/bias", "optimizer": {"name": "rmsprop", **theirs}},
        {"params": "layers_2/bias", "optimizer": {"name": "adam", **_SLOW, **theirs}},
    ]
    inner = boostax.optimizer(
        "momentum",
        learning_rate=learning_rate,
        weight_decay=0.01,
        decay_bias_and_norm=False,
        groups=groups,
    )
    return boostax.accumulate(boostax.freeze(inner, programs.freezing((0, 2, 1))), 2)


def _everything(learning_rate):
    inner = optax.chain(boostax.centralize(), optax.adam(learning_rate, eps=1e-3))
    return boostax.accumulate(boostax.freeze(inner, programs.freezing((0, 2, 1))), 2)


ROWS: tuple[Row, ...] = (
    *(
        Row(
            name=f"accumulate_{policy}",
            covers=("accumulate",),
            seam="update",
            cycle=3,
            transform=_accumulate(policy),
        )
        for policy in ("skip_micro", "skip_window")
    ),
    Row(
        name="accumulate_flush",
        covers=("accumulate", "flush"),
        seam="update",
        cycle=5,
        transform=_flushing,
    ),
    Row(
        name="freeze",
        covers=("freeze", "Freezing", "parameter_groups", "freeze_schedule"),
        seam="update",
        cycle=3,
        steps=8,
        transform=lambda learning_rate: boostax.freeze(
            optax.sgd(learning_rate, 0.9), programs.freezing(_FROM_SCHEDULE)
        ),
    ),
    Row(
        name="centralize",
        covers=("centralize",),
        seam="update",
        cycle=2,
        transform=lambda learning_rate: optax.chain(
            boostax.centralize(), optax.sgd(learning_rate, 0.9)
        ),
    ),
    Row(
        name="centralize_update",
        covers=("centralize",),
        seam="update",
        cycle=2,
        transform=lambda learning_rate: optax.chain(
            # Adam's second moment at its usual rate of 0.999 would be lost in float16.
            optax.adam(learning_rate, b2=0.9, eps=1e-2),
            boostax.centralize(),
        ),
    ),
    Row(
        name="thor",
        covers=("thor", "scale_by_thor"),
        seam="update",
        cycle=3,
        transform=_thor,
        extra={"stats": captured.statistics(captured.perceptron(plain.SIZES))},
        leafwise=False,
        does_not_apply={
            "sharding": "a bias is updated as a row of its kernel, and XLA lets it lie as that does "
            "over Auto axes; tests/updates/test_thor_devices.py has the Explicit ones"
        },
    ),
    Row(
        name="adasum",
        covers=("adasum",),
        seam="update",
        cycle=2,
        talks_to_devices=True,
        transform=_adasum,
        does_not_apply=_MANUAL,
    ),
    Row(
        name="all_reduce",
        covers=("all_reduce",),
        seam="update",
        cycle=2,
        talks_to_devices=True,
        transform=lambda learning_rate: optax.chain(
            boostax.all_reduce("data"), optax.sgd(learning_rate, 0.9)
        ),
        does_not_apply=_MANUAL,
    ),
    Row(
        name="local_steps",
        covers=("local_steps",),
        seam="update",
        cycle=2,
        talks_to_devices=True,
        transform=_local_steps,
        does_not_apply={
            "inject_hyperparams": "the outer momentum carries moves made at the old rate along, so "
            "that half the rate is not half the update",
            **_MANUAL,
            **dict.fromkeys(
                ("devices", "shard_map"),
                "the offsets differ between devices; tests/updates/test_local_steps.py does this",
            ),
        },
    ),
    Row(
        name="accumulate_freeze_centralize_adam",
        covers=("accumulate", "freeze", "centralize"),
        seam="update",
        cycle=6,
        transform=_everything,
    ),
    Row(
        name="optimizer_groups",
        covers=("optimizer",),
        seam="update",
        cycle=2,
        transform=_one_a_leaf,
    ),
    Row(
        name="optimizer_groups_accumulate_freeze",
        covers=("optimizer", "accumulate", "freeze"),
        seam="update",
        cycle=6,
        transform=_one_a_leaf_of_mindspore,
    ),
    Row(
        name="microbatch",
        covers=("microbatch",),
        seam="gradient",
        cycle=2,
        program=programs.microbatched(3),
        does_not_apply=_GRADIENT_SEAM,
    ),
    Row(
        name="train_step_plain_freeze",
        covers=("train_step", "freeze"),
        seam="all",
        cycle=3,
        steps=8,
        variants=3,
        program=programs.plain_step(
            lambda: boostax.freeze(programs.momentum(), programs.freezing(_SCHEDULE))
        ),
        does_not_apply=_NOT_A_TRANSFORMATION,
    ),
    Row(
        name="train_step_linen",
        covers=("train_step", "microbatch"),
        seam="all",
        cycle=2,
        program=programs.linen_step(microbatch=3),
        does_not_apply=_NOT_A_TRANSFORMATION,
    ),
    Row(
        name="train_step_linen_accumulate",
        covers=("train_step", "accumulate"),
        seam="all",
        cycle=3,
        program=programs.linen_step(lambda: boostax.accumulate(programs.momentum(), 3)),
        does_not_apply=_NOT_A_TRANSFORMATION,
    ),
    Row(
        name="train_step_nnx",
        covers=("train_step",),
        seam="all",
        cycle=2,
        program=programs.nnx_step(),
        does_not_apply=_NOT_A_TRANSFORMATION,
    ),
    Row(
        name="train_step_nnx_microbatch",
        covers=("train_step", "microbatch"),
        seam="all",
        cycle=2,
        program=programs.nnx_step(microbatch=3),
        does_not_apply=_NOT_A_TRANSFORMATION,
    ),
    Row(
        name="train_step_linen_freeze",
        covers=("train_step", "freeze"),
        seam="all",
        cycle=2,
        variants=2,
        program=programs.linen_step(
            lambda: boostax.freeze(programs.momentum(), programs.LINEN_FREEZING)
        ),
        does_not_apply=_NOT_A_TRANSFORMATION,
    ),
    Row(
        name="rewritten_nnx",
        covers=("less_bn", "replace_norm", "norm_head", "NormalizedLinear"),
        seam="model",
        cycle=2,
        program=programs.nnx_step(loss=residual.nnx_loss, model_of=residual.nnx_net),
        does_not_apply=_NOT_A_TRANSFORMATION,
    ),
    Row(
        name="rewritten_linen",
        covers=("less_bn", "norm_head", "NormalizedDense"),
        seam="model",
        cycle=2,
        program=programs.linen_step(loss=residual.linen_loss, variables_of=residual.linen_init),
        does_not_apply=_NOT_A_TRANSFORMATION,
    ),
    Row(
        name="train_step_thor",
        covers=("train_step", "thor", "capture_layers", "accumulate"),
        seam="all",
        cycle=4,
        variants=2,
        program=programs.plain_step(_windows_of_thor),
        does_not_apply=_NOT_A_TRANSFORMATION,
    ),
    Row(
        name="train_step_dim_reduce",
        covers=("train_step", "dim_reduce"),
        seam="all",
        cycle=2,
        program=programs.plain_step(_dim_reduce),
        does_not_apply=_NOT_A_TRANSFORMATION,
    ),
    Row(
        # Powers of two: in float32 the gradients are those of no scale, bit for bit.
        name="train_step_loss_scale",
        covers=("train_step", "DynamicLossScale"),
        seam="all",
        cycle=2,
        program=programs.plain_step(
            loss_scale=boostax.DynamicLossScale(init=2.0**8, window=2, max_scale=2.0**9)
        ),
        does_not_apply=_NOT_A_TRANSFORMATION,
    ),
    Row(
        name="train_step_loss_scale_group",
        covers=("train_step", "GroupLossScale", "accumulate", "freeze", "centralize"),
        seam="all",
        cycle=4,
        variants=2,
        program=programs.plain_step(
            _windows_that_freeze,
            loss_scale=boostax.GroupLossScale(
                ["layers_0/*", "layers_[12]/*"], init=[2.0**6, 2.0**8], window=3
            ),
        ),
        does_not_apply=_NOT_A_TRANSFORMATION,
    ),
    Row(
        name="train_step_mesh_adasum",
        covers=("train_step", "adasum", "accumulate"),
        seam="all",
        cycle=2,
        program=programs.mesh_step(
            lambda: boostax.accumulate(
                optax.chain(programs.momentum(), boostax.adasum("data", buckets=())), 2
            )
        ),
        does_not_apply={
            **_NOT_A_TRANSFORMATION,
            "devices": "it brings its mesh along; tests/training/test_mesh.py has 1 to 8 devices",
        },
    ),
    Row(
        name="auto_boost",
        covers=("AutoBoost",),
        seam="all",
        cycle=6,
        variants=3,
        program=programs.auto_step(
            "O1",
            {
                "boost": {
                    "mode": "manual",
                    "grad_freeze": True,
                    "centralize": True,
                    "grad_accumulation": True,
                },
                "grad_freeze": {"param_groups": 3, "total_steps": 100},
                "grad_accumulation": {"grad_accumulation_step": 2},
            },
        ),
        does_not_apply=_NOT_A_TRANSFORMATION,
    ),
)

# What a config calls a technique -> its public name, for every technique.
CONFIG_NAMES: dict[str, str] = {
    "less_bn": "less_bn",
    "grad_freeze": "freeze",
    "grad_accumulation": "accumulate",
    "centralize": "centralize",
    "adasum": "adasum",
    "thor": "thor",
    "dim_reduce": "dim_reduce",
    "loss_scale": "DynamicLossScale",
    "loss_scale_group": "GroupLossScale",
}

# Public names that are no technique, each with what it is instead.
NOT_TECHNIQUES: dict[str, str] = {
    "fold_batch_norm": "makes a model for inference, which is not trained",
    "load_weights": "puts values into a model ahead of training",
    "LoadReport": "what load_weights did",
    "ModelReport": "what a rewrite of a model did",
    "BoostConfig": "the settings that AutoBoost is built from",
    "load_config": "reads the settings that AutoBoost is built from",
    "forward_order": "names layers for parameter_groups; changes nothing in training",
    "CapturedLayers": "what capture_layers found",
    "local_params": "reads the state of local_steps",
    "LocalStepsState": "the state of local_steps",
    "adasum_pair": "the arithmetic of adasum for two trees on one device",
    "centralized_axes": "says which leaves centralize touches; changes nothing in training",
    "AccumulateState": "the state of accumulate",
    "has_updated": "reads the state of accumulate",
    "FreezeState": "the state of freeze",
    "ThorState": "the state of scale_by_thor and thor",
    "LossScaleState": "the state of DynamicLossScale and GroupLossScale",
    "set_loss_scale": "changes the state of a loss scale from the host",
    "LossAux": "what a loss function returns",
    "Categorical": "a part of what a loss function returns",
    "Gaussian": "a part of what a loss function returns",
    "TrainState": "the state of train_step",
    "refresh_batch_statistics": "takes statistics anew after training, by forward passes alone",
    "trajectory_basis": "reads directions out of snapshots; changes nothing in training",
    "TrajectoryBasis": "what trajectory_basis found",
    "DimReduceState": "the state of dim_reduce",
    "SnapshotWriter": "keeps snapshots of the parameters; changes nothing in training",
    "feature_tap": "gives what a layer puts out; changes nothing in training",
    "histogram_edges": "describes features; changes nothing in training",
    "feature_histograms": "describes features; changes nothing in training",
    "nearest_source_subset": "chooses data; changes nothing in a step",
    "SourceSubset": "what nearest_source_subset found",
    "enlarge_neighbours": "counts for nearest_source_subset; changes nothing in a step",
    "joint_loss": "makes one loss of two, which any technique then trains",
    "joint_batches": "brings two loaders together; changes nothing in a step",
    "RowSparse": "a form that a gradient may have",
    "from_torch_state": "reads a state from elsewhere into that of optimizer",
    "ConfigError": "an error of the config loader",
    "MissingExtraError": "an error about a missing package",
    "StateMismatchError": "an error about a restored state",
}
