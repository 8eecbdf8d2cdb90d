"""The config: defaults, strictness, files, optimizers by name, and the JSON Schema."""

import inspect
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import boostax
from boostax import _info
from boostax._config_catalogue import catalogue, limits
from boostax._config_named import _outside
from boostax._config_schema import json_schema
from boostax._config_sections import NULLABLE, SECTIONS
from boostax._info import info_of
from boostax.compare._fitting import horizons
from boostax.config import BoostConfig, load_config
from boostax.errors import ConfigError
from boostax.updates.named import OPTIMIZERS
from tests.mindspore_config import DEFAULTS, WHOLE


def refused(config, *parts):
    with pytest.raises(ConfigError) as error:
        load_config(config)
    message = str(error.value)
    for part in parts:
        assert part in message
    return message


def test_the_documented_dictionary_holds_the_defaults():
    common = {"gradient_split_groups": WHOLE["common"]["gradient_split_groups"]}
    assert load_config({**WHOLE, "common": common}) == load_config()
    assert load_config(WHOLE).common.device_number == 8
    assert load_config().common.device_number is None
    assert load_config(WHOLE).grad_freeze.freeze_p == 0.7


@pytest.mark.parametrize("nothing", [None, {}, ""])
def test_nothing_means_defaults(nothing):
    assert load_config(nothing) == BoostConfig()
    assert hash(load_config(nothing)) == hash(BoostConfig())


def test_a_file_and_the_equal_dict_are_equal(tmp_path):
    config = {
        "$schema": "schema.json",
        **WHOLE,
        "grad_accumulation": {"grad_accumulation_step": 4},
        "optimizer": {
            "name": "sgd",
            "learning_rate": {
                "name": "piecewise_constant_schedule",
                "init_value": 0.1,
                "boundaries_and_scales": {"10": 0.5, "9": 0.1},
            },
        },
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    loaded = load_config(path)
    assert loaded == load_config(str(path)) == load_config(config)
    assert hash(loaded) == hash(load_config(config))
    assert loaded.every == 4
    with_ints = {**config, "optimizer": {**config["optimizer"]}}
    with_ints["optimizer"]["learning_rate"] = {
        **config["optimizer"]["learning_rate"],
        "boundaries_and_scales": {9: 0.1, 10: 0.5},
    }
    assert load_config(with_ints) == loaded
    assert load_config(loaded) is loaded
    assert load_config({"grad_accumulation": {"every": 5}}) != loaded


def test_a_config_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        load_config().boost = None
    with pytest.raises(ValueError, match="frozen"):
        load_config().boost.adasum = True


def test_the_nearest_name_is_suggested():
    refused(
        {"boost": {"grad_freze": True}, "grad_freze": {}},
        "2 faults",
        "boost.grad_freze: unknown key. Did you mean 'grad_freeze'?",
        "grad_freze: unknown section. Did you mean 'grad_freeze'?",
    )
    refused({"boost": {"mode": "manul"}}, "boost.mode", "Did you mean 'manual'?")


def test_all_faults_stand_in_one_message():
    message = refused(
        {
            "boost": {"less_bn": 1, "adasum": "False", "mode": None},
            "common": {"device_number": "8", "gradient_split_groups": [100, 50]},
            "grad_freeze": {"total_steps": 2.5, "freeze_p": 1.5, "freeze_type": True},
            "dim_reduce": {"rho": float("nan"), "timeout": 0, "pca_mat_path": 3},
            "clip": {"global_norm": 0.0},
            "optimizer": {"name": "adamw", "learning_rate": "1e-4"},
            "less_bn": [],
        },
        "14 faults",
        "boost.less_bn: got 1 (a number); allowed: true or false",
        'boost.adasum: got "False" (text); allowed: true or false',
        "boost.mode: got null; allowed: one of 'auto', 'manual', 'enable_all', 'disable_all'",
        'common.device_number: got "8" (text); allowed: an integer from 1 to',
        "common.gradient_split_groups: got (100, 50) (a list)",
        "grad_freeze.total_steps: got 2.5 (a number)",
        "grad_freeze.freeze_p: got 1.5 (a number); allowed: a number from 0 to 1",
        "grad_freeze.freeze_type: got true (a boolean)",
        "dim_reduce.rho: got nan",
        "dim_reduce.timeout: got 0",
        "dim_reduce.pca_mat_path: got 3",
        "clip.global_norm: got 0.0 (a number); allowed: a number above 0",
        'optimizer.learning_rate: got "1e-4" (text)',
        "less_bn: got () (a list); allowed: an object",
    )
    assert message.count("\n- ") == 14


@pytest.mark.parametrize("section", ["common", "grad_accumulation"])
@pytest.mark.parametrize("key", ["grad_accumulation_step", "every"])
@pytest.mark.parametrize("wrong", [0, -2, 2.5, True, "4", None, np.bool_(True), np.float32(4)])
def test_accumulation_steps_that_are_refused(section, key, wrong):
    if (section, key) == ("common", "every"):
        key = "grad_accumulation_step"
    refused({section: {key: wrong}}, f"{section}.{key}: got")


@pytest.mark.parametrize("right", [4, np.int64(4), np.array(4), jnp.int32(4), lambda step: 4])
def test_accumulation_steps_that_are_taken(right):
    every = load_config({"grad_accumulation": {"every": right}}).every
    assert every is right if callable(right) else (every, type(every)) == (4, int)
    assert load_config({"common": {"grad_accumulation_step": right}}).every == every


def test_numpy_values_become_plain():
    config = load_config(
        {
            "boost": {"grad_freeze": np.bool_(True)},
            "common": {"gradient_split_groups": np.int32(50)},
            "grad_freeze": {"freeze_p": np.float64(0.5), "param_groups": np.uint8(3)},
        }
    )
    assert config.boost.grad_freeze is True
    assert config.common.gradient_split_groups == (50,)
    assert type(config.grad_freeze.freeze_p) is float
    assert load_config({"grad_freeze": {"freeze_p": 1}}).grad_freeze.freeze_p == 1.0


@pytest.mark.parametrize("section", list(WHOLE))
def test_null_is_refused_except_for_the_two_paths(section):
    for key in WHOLE[section]:
        config = {section: {key: None}}
        if key in ("pca_mat_path", "weight_load_dir"):
            assert load_config(config) == load_config()
        else:
            refused(config, f"{section}.{key}: got null")
    refused({section: None}, f"{section}: got null")


def test_two_names_for_one_setting():
    refused(
        {"grad_freeze": {"freeze_p": 0.7, "full_fraction": 0.7}},
        "grad_freeze.full_fraction: says the same as grad_freeze.freeze_p",
    )
    refused({"grad_freeze": {"freeze_type": 0, "kind": "ramp"}}, "grad_freeze.kind")
    refused(
        {"common": {"grad_accumulation_step": 2}, "grad_accumulation": {"every": 2}},
        "common.grad_accumulation_step: says the same as grad_accumulation.every",
    )
    refused({"clip": {"value": 1.0, "global_norm": 1.0}}, "clip.value")
    ours = load_config({"grad_freeze": {"full_fraction": 0.3, "kind": "ramp"}}).grad_freeze
    assert (ours.share_of_full_steps, ours.schedule_kind) == (0.3, "ramp")
    theirs = load_config({"grad_freeze": {"freeze_p": 0.3, "freeze_type": 0}}).grad_freeze
    assert (theirs.share_of_full_steps, theirs.schedule_kind) == (0.3, "continuous")


def test_requests_without_what_they_need_join_the_list():
    refused(
        {"boost": {"mode": "manual", "dim_reduce": True, "loss_scale_group": True}, "commn": {}},
        "3 faults",
        "dim_reduce.pca_mat_path: missing; dim_reduce needs to know",
        "loss_scale_group.groups: missing; loss_scale_group needs to know",
        "commn: unknown section",
    )


def test_less_bn_is_read():
    given = {"keep": "none", "compensation": "skip_init", "bias": True, "multiplier_init": 1.0}
    config = load_config({"less_bn": {**given, "head": "fc"}})
    assert load_config(config.to_dict()) == config
    refused(
        {
            "less_bn": {
                "patterns": ["bn1"],
                "keep": "none",
                "fn_flag": False,
                "head": "fc",
                "compensation": "scaled",
            }
        },
        "3 faults",
        'less_bn.patterns: says which norms go, but less_bn.keep is "none"',
        "less_bn.head: is about the head, but less_bn.fn_flag is false",
        "less_bn.compensation: got \"scaled\" (text); allowed: one of 'skip_init', 'scaled_ws'",
    )


def test_dim_reduce_is_read():
    given = {"pca_mat_path": "v.npy", "leaf_order": ["b", "a"], "exclude": ["c"], "gamma": 0.0}
    config = load_config({"dim_reduce": given})
    assert config.dim_reduce.leaf_order == ("b", "a")
    assert load_config(config.to_dict()) == config
    refused(
        {"dim_reduce": {"pca_mat_path": "v.pkl", "leaf_order": ["a"], "center": False, "gamma": 1}},
        "4 faults",
        'dim_reduce.pca_mat_path: is "v.pkl"; a basis is a .npz or a .npy file',
        "dim_reduce.leaf_order: says the order of a .npy file's columns",
        "dim_reduce.center: is for snapshots; set dim_reduce.weight_load_dir",
        "dim_reduce.gamma: got 1 (a number); allowed: a number of at least 0 and below 1",
    )
    refused({"dim_reduce": {"weight_load_dir": ""}}, "dim_reduce.weight_load_dir: is empty")


def test_adasum_is_read():
    section = load_config().adasum
    assert (section.on, section.granularity, section.algorithm) == ("gradient", "leaf", "halving")
    assert section.axis_name is section.inner_axis is None
    given = {"on": "update", "granularity": "tree", "algorithm": "gather", "axis_name": "data"}
    config = load_config({"adasum": {**given, "inner_axis": "local"}})
    assert config.to_dict(defaults=False) == {"adasum": {**given, "inner_axis": "local"}}
    assert load_config({"common": {"gradient_split_groups": 3}}).common.split_points == (3,)
    assert load_config().common.split_points == (50, 100)
    assert hash(config) == hash(load_config(config.to_dict()))


def test_faults_of_adasum():
    refused(
        {
            "adasum": {"on": "gradients", "granularity": 1, "algorithm": "ring", "axis_name": ""},
            "common": {"device_number": None, "gradient_split_groups": [2, 2]},
        },
        "6 faults",
        "adasum.on: got \"gradients\" (text); allowed: one of 'gradient', 'update'. Did you mean",
        "adasum.granularity: got 1 (a number)",
        'adasum.algorithm: got "ring" (text)',
        'adasum.axis_name: got "" (text); allowed: text: the name of a mesh axis',
        "common.device_number: got null; allowed: an integer from 1",
        "common.gradient_split_groups: got (2, 2) (a list)",
    )
    refused({"adasum": {"axis_name": None}}, "adasum.axis_name: got null")


def test_local_steps_are_read():
    outer = {"name": "sgd", "learning_rate": 0.7, "momentum": 0.9, "nesterov": True}
    section = {"on": "update", "local_steps": 4, "outer": outer}
    config = load_config({"adasum": section})
    assert config.to_dict(defaults=False) == {"adasum": section}
    assert load_config(config.to_dict()) == config
    assert hash(load_config({"adasum": section})) == hash(config)
    assert config.adasum.outer.name == "sgd"
    assert load_config({"adasum": {**section, "outer": config.adasum.outer}}) == config


def test_faults_of_local_steps():
    refused(
        {"adasum": {"local_steps": 2}}, "1 fault", "adasum.local_steps: is 2, so that each device"
    )
    outer = {"name": "sgd", "learning_rate": 0.7}
    refused(
        {"adasum": {"outer": outer}},
        "1 fault",
        "adasum.outer: is for local steps; set adasum.local_steps to more than 1",
    )
    local = {"on": "update", "local_steps": 2}
    for name, part in (("lbfgs", "scale_by_zoom_linesearch"), ("momo", "momo")):
        refused(
            {"adasum": {**local, "outer": {"name": name}}},
            "1 fault",
            f"adasum.outer: {name} needs the loss ({part})",
        )
    refused(
        {"adasum": {**local, "outer": {"name": "sgd", "learning_rate": "1", "momentm": 1}}},
        "2 faults",
        'adasum.outer.learning_rate: got "1" (text)',
        "adasum.outer.momentm: sgd has no argument 'momentm'. Did you mean 'momentum'?",
    )
    refused(
        {"adasum": {"local_steps": 0, "outer": None}},
        "2 faults",
        "adasum.local_steps: got 0",
        "adasum.outer: got null; allowed: an optimizer by name",
    )


DECAY = {"name": "exponential_decay", "init_value": 0.1, "transition_steps": 9, "decay_rate": 0.5}


def test_thor_is_read():
    section = load_config().thor
    assert (section.damping, section.frequency, section.early) == (0.01, 100, (0, 1, 3, 6))
    assert (section.block_size, section.fisher, section.mode) == (256, "empirical", "default")
    given = {
        "damping": DECAY,
        "learning_rate": {**DECAY, "init_value": 1.0},
        "early": [0, 2],
        "clip": "kl",
        "split_indices": [0, 4],
        "exclude": ["*/head"],
    }
    config = load_config({"thor": given})
    assert config.to_dict(defaults=False) == {"thor": given}
    assert load_config(config.to_dict()) == config
    assert hash(load_config({"thor": given})) == hash(config)
    assert (
        load_config({"thor": {"damping": config.thor.damping}}).thor.damping.name == DECAY["name"]
    )
    schedule = lambda count: 0.1
    assert load_config({"thor": {"damping": schedule}}).thor.damping is schedule
    for clip, kl in ((True, True), ("kl", True), ("tensor", False), (False, False)):
        assert load_config({"thor": {"clip": clip}}).thor.kl == kl
    assert not load_config({"thor": {"mode": "reference"}}).thor.kl


def test_faults_of_thor():
    rate = "a number above 0, or a schedule by name"
    refused(
        {
            "thor": {
                "damping": "0.1",
                "learning_rate": 0,
                "frequency": 2.0,
                "early": [3, 3],
                "factor_decay": 1,
                "pi_split": "true",
                "clip": 1,
                "kl_clip": "1e-3",
                "trace_rule": 0,
                "split_indices": [-1],
                "block_size": 0,
                "fisher": "tru",
                "exclude": "*/bias",
                "layer_norms": [""],
                "mode": "ref",
            }
        },
        "15 faults",
        f'thor.damping: got "0.1" (text); allowed: {rate}',
        f"thor.learning_rate: got 0 (a number); allowed: {rate}",
        "thor.frequency: got 2.0 (a number); allowed: an integer from 1",
        "thor.early: got (3, 3) (a list); allowed: a list of increasing integers of at least 0",
        "thor.factor_decay: got 1 (a number); allowed: a number of at least 0 and below 1",
        'thor.pi_split: got "true" (text)',
        "thor.clip: got 1 (a number); allowed: true or false, or one of 'kl', 'tensor'",
        'thor.kl_clip: got "1e-3" (text); allowed: a number above 0',
        "thor.trace_rule: got 0 (a number)",
        "thor.split_indices: got (-1,) (a list)",
        "thor.block_size: got 0 (a number)",
        "thor.fisher: got \"tru\" (text); allowed: one of 'empirical', 'true'. Did you mean 'true'?",
        'thor.exclude: got "*/bias" (text); allowed: a list of path patterns',
        "thor.layer_norms: got ('',) (a list)",
        "thor.mode: got \"ref\" (text); allowed: one of 'default', 'reference'",
    )
    refused(
        {"thor": {"damping": {**DECAY, "decay_rate": "a", "steps": 1}, "learning_rate": float}},
        "3 faults",
        'thor.damping.decay_rate: got "a" (text)',
        "thor.damping.steps: exponential_decay has no argument 'steps'",
        "thor.learning_rate: got <class 'float'> (type)",
    )
    refused({"thor": {"damping": None}}, "1 fault", "thor.damping: got null")
    refused(
        {"thor": {"mode": "reference", "frequency": 1, "clip": "kl", "trace_rule": 0.1}},
        "3 faults",
        'thor.frequency: is 1; with thor.mode = "reference" it is at least 2',
        'thor.clip: is "kl", which thor.mode = "reference" has not',
        'thor.trace_rule: goes with thor.mode = "default" only',
    )
    refused({"thor": {"layer_norms": ["*/ln"]}}, "1 fault", "thor.layer_norms: is for thor.mode")


def test_the_kl_clip_of_thor_finds_its_rate_when_the_config_is_read():
    on = {"boost": {"mode": "manual", "thor": True}}
    named = {"name": "prodigy"}
    load_config({**on, "optimizer": named})  # its default is a rate
    named = {"name": "sm3", "learning_rate": 0.1}
    load_config({**on, "optimizer": named})
    adaptive = {"name": "adafactor"}
    refused({**on, "optimizer": adaptive}, "1 fault", "thor.learning_rate: missing; the KL clip")
    load_config({**on, "optimizer": adaptive, "thor": {"clip": False}})
    load_config({**on, "optimizer": adaptive, "thor": {"learning_rate": 0.1}})


def test_loss_scales_are_read():
    one, several = load_config().loss_scale, load_config().loss_scale_group
    assert one.dynamic is True
    assert (one.init, one.factor, one.window, one.min_scale, one.max_scale) == (
        2**15,
        2,
        2000,
        1,
        2**24,
    )
    assert several.groups is None
    assert (several.init, several.min_scale, several.max_scale) == (2**15, 2**-24, 2**24)
    assert (several.factor, several.window, several.rule) == (2, 2000, "window")
    groups = ["a/*", ["b/*", "c/*"]]
    given = {"groups": groups, "init": [4, 0.5], "max_scale": 8, "rule": "reference"}
    config = load_config(
        {"loss_scale": {"init": 2, "window": np.int64(3)}, "loss_scale_group": given}
    )
    assert config.loss_scale_group.groups == ("a/*", ("b/*", "c/*"))
    assert config.loss_scale_group.init == (4.0, 0.5)
    assert type(config.loss_scale.init) is float
    assert config.to_dict(defaults=False) == {
        "loss_scale": {"init": 2.0, "window": 3},
        "loss_scale_group": given,
    }
    assert load_config(json.loads(json.dumps(config.to_dict()))) == config
    assert hash(load_config(config.to_dict())) == hash(config)


def test_faults_of_loss_scales():
    refused(
        {
            "loss_scale": {"dynamic": 1, "init": 0, "factor": 1, "window": True, "min_scale": None},
            "loss_scale_group": {"groups": "a", "init": [1, "2"], "rule": "windw", "window": 0},
        },
        "9 faults",
        "loss_scale.dynamic: got 1 (a number); allowed: true or false",
        "loss_scale.init: got 0 (a number); allowed: a number above 0, in float32's range",
        "loss_scale.factor: got 1 (a number); allowed: a number above 1",
        "loss_scale.window: got true (a boolean); allowed: an integer from 1 to 1073741824",
        "loss_scale.min_scale: got null",
        'loss_scale_group.groups: got "a" (text); allowed: a list with a path pattern, or a list of',
        "loss_scale_group.init: got (1, '2') (a list)",
        "loss_scale_group.rule: got \"windw\" (text); allowed: one of 'window', 'reference'. Did you",
        "loss_scale_group.window: got 0",
    )
    # What is missing because it was faulty is told once.
    flags = {"mode": "manual", "loss_scale_group": True}
    refused({"boost": flags, "loss_scale_group": {"groups": 3}}, "1 fault", "groups: got 3")
    refused(
        {
            "loss_scale": {"min_scale": 8, "max_scale": 4},
            "loss_scale_group": {"groups": ["a", "b"], "init": [1, 2], "max_scale": [1, 1]},
        },
        "2 faults",
        "loss_scale.max_scale: is 4, below min_scale = 8",
        "loss_scale_group.init: is 2 in group 2, out of [min_scale, max_scale]",
    )
    refused(
        {
            "loss_scale": {"init": 0.5},
            "loss_scale_group": {"groups": ["a", "b"], "init": [1, 2, 3], "min_scale": [1]},
        },
        "3 faults",
        "loss_scale.init: is 0.5, out of [min_scale, max_scale] = [1, 1.67772e+07]; move the bound",
        "loss_scale_group.init: has the length 3, but there are 2 groups",
        "loss_scale_group.min_scale: has the length 1, but there are 2 groups",
    )
    # A fixed scale has no bounds.
    assert load_config({"loss_scale": {"dynamic": False, "init": 0.5}}).loss_scale.init == 0.5


def test_axes_of_ones_own_go_with_no_group_size():
    refused(
        {"adasum": {"axis_name": "data"}, "common": {"device_number": 4}},
        "1 fault",
        "common.device_number: shapes the mesh that boostax makes",
    )
    refused({"adasum": {"inner_axis": "local"}}, "1 fault", "needs adasum.axis_name beside it")
    refused(
        {"adasum": {"inner_axis": "data", "axis_name": "data"}},
        "1 fault",
        "adasum.inner_axis: is 'data', as adasum.axis_name is",
    )


def test_other_types():
    for wrong in (3, [], True, b"x"):
        with pytest.raises((TypeError, ConfigError)):
            load_config(wrong)
    refused({3: {}}, "the key 3 is not text")
    refused({"boost": {3: True}}, "boost.3: unknown key")
    with pytest.raises(ConfigError, match="unknown section"):
        BoostConfig(bost={})


# Files


def test_files_that_cannot_be_read(tmp_path):
    for path, part in ((tmp_path / "missing.json", "No such file"), (tmp_path, "directory")):
        refused(str(path), str(path), part)
        refused(path, str(path))
    for name, content, part in (
        ("broken", b'{"boost": ', "line 1, column"),
        (
            "list",
            b"[1]",
            "top level must be an object, got [1] (a list)".replace(
                "object,", "object with sections,"
            ),
        ),
        ("text", b'"x"', "top level"),
        ("empty", b"", "broken JSON"),
        ("latin", b'{"b\xf6": 1}', "UTF-8"),
        ("nan", b'{"grad_freeze": {"freeze_p": NaN}}', "got NaN"),
        ("twice", b'{"boost": {"adasum": false, "adasum": true}}', "'adasum' stands twice"),
        ("deep", b"[" * 200_000, "nested too deeply"),
        ("digits", b'{"a": ' + b"1" * 10_000 + b"}", "digits"),
        ("fault", b'{"boost": {"adasum": "False"}}', 'boost.adasum: got "False"'),
        ("infinite", b'{"grad_freeze": {"freeze_p": 1e999}}', "grad_freeze.freeze_p"),
    ):
        path = tmp_path / f"{name}.json"
        path.write_bytes(content)
        refused(str(path), str(path), part)
    refused("a\0b", "null")


def test_a_byte_order_mark_is_passed_over(tmp_path):
    path = tmp_path / "bom.json"
    path.write_text('{"less_bn": {"gc_flag": false}}', encoding="utf-8-sig")
    assert load_config(os.fspath(path)).less_bn.gc_flag is False


# Optimizers by name


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion", "muon", "prodigy", "lbfgs", "polyak_sgd"])
def test_optimizers_by_name(name):
    arguments = {} if name in ("lbfgs", "polyak_sgd") else {"learning_rate": 0.1}
    tx = load_config({"optimizer": {"name": name, **arguments}}).optimizer.build()
    assert isinstance(tx, optax.GradientTransformation)


# They need a name inside them, or call their rate otherwise; the last one is deprecated.
NEED_MORE = {"mechanize", "polyak_sgd", "sam", "schedule_free", "dpsgd", "noisy_sgd", "galore"}


def test_every_optimizer_that_needs_only_a_rate_builds():
    names = set(catalogue("optimizer")) - NEED_MORE - {"optimistic_adam"}
    assert len(names) >= 40
    for name in names:
        load_config({"optimizer": {"name": name, "learning_rate": 0.1}})


def test_a_named_optimizer_is_the_same_as_the_function():
    config = load_config(
        {
            "optimizer": {
                "name": "adamw",
                "learning_rate": {
                    "name": "cosine_decay_schedule",
                    "init_value": 0.1,
                    "decay_steps": 4,
                },
                "weight_decay": 0.1,
                "mask": ["*/kernel"],
                "mu_dtype": "bfloat16",
            }
        }
    )
    ours = config.optimizer.build()
    theirs = optax.adamw(
        optax.cosine_decay_schedule(0.1, 4),
        weight_decay=0.1,
        mask={"a": {"bias": False, "kernel": True}},
        mu_dtype="bfloat16",
    )
    params = {"a": {"bias": jnp.ones(2), "kernel": jnp.ones((2, 2))}}
    states = ours.init(params), theirs.init(params)
    for _ in range(3):
        first, a = ours.update(params, states[0], params)
        second, b = theirs.update(params, states[1], params)
        states = a, b
        np.testing.assert_array_equal(first["a"]["kernel"], second["a"]["kernel"])
        np.testing.assert_array_equal(first["a"]["bias"], second["a"]["bias"])


def test_nested_names():
    config = load_config(
        {
            "optimizer": {
                "name": "sam",
                "optimizer": {"name": "sgd", "learning_rate": 0.1},
                "adv_optimizer": [{"name": "normalize"}, {"name": "sgd", "learning_rate": 0.05}],
            }
        }
    )
    config.optimizer.build().init(jnp.ones(2))
    joined = load_config(
        {
            "optimizer": {
                "name": "sgd",
                "learning_rate": {
                    "name": "join_schedules",
                    "schedules": [
                        {"name": "constant_schedule", "value": 1.0},
                        {"name": "constant_schedule", "value": 2.0},
                    ],
                    "boundaries": [3],
                },
            }
        }
    ).optimizer
    rate = joined.get("learning_rate").build()
    assert [float(rate(i)) for i in (2, 3)] == [1.0, 2.0]
    cycles = [
        {
            "init_value": 0.0,
            "peak_value": 1.0,
            "decay_steps": 4,
            "warmup_steps": 2,
            "end_value": 0.0,
        }
    ]
    named = load_config(
        {
            "optimizer": {
                "name": "sgd",
                "learning_rate": {"name": "sgdr_schedule", "cosine_kwargs": cycles},
            }
        }
    ).optimizer
    assert float(named.get("learning_rate").build()(2)) == 1.0


def test_faults_of_the_optimizer():
    refused({"optimizer": {"name": "adamq"}}, "optimizer.name", "Did you mean 'adam'?")
    refused({"optimizer": {"nme": "adam"}}, "optimizer.name: missing", "Did you mean")
    refused({"optimizer": {"name": "sgd"}}, "optimizer.learning_rate: missing; sgd needs a number")
    refused(
        {"optimizer": {"name": "sgd", "learning_rate": 0.1, "momentm": 0.9}},
        "optimizer.momentm: sgd has no argument 'momentm'. Did you mean 'momentum'?",
    )
    refused({"optimizer": None}, "optimizer: got null")
    refused({"optimizer": "adam"}, 'optimizer: got "adam" (text)')
    for value in (True, None, -0.1, float("inf"), [0.1]):
        refused(
            {"optimizer": {"name": "sgd", "learning_rate": value}}, "optimizer.learning_rate: got"
        )
    refused(
        {"optimizer": {"name": "sgd", "learning_rate": 1, "nesterov": 1}},
        "nesterov: got 1 (a number)",
    )
    refused(
        {"optimizer": {"name": "sgd", "learning_rate": {"name": "cosine_decy_schedule"}}},
        "optimizer.learning_rate.name",
        "Did you mean 'cosine_decay_schedule'?",
    )
    refused(
        {
            "optimizer": {
                "name": "sgd",
                "learning_rate": {
                    "name": "cosine_decay_schedule",
                    "init_value": 1,
                    "decay_steps": 0,
                },
            }
        },
        "optimizer.learning_rate: optax.cosine_decay_schedule refuses",
    )


@pytest.mark.parametrize(
    "name", ["os.system", "__import__", "chain", "inject_hyperparams", "apply_updates"]
)
def test_only_optimizers_can_be_named(name):
    refused({"optimizer": {"name": name, "learning_rate": 0.1}}, "optimizer.name: got")


def test_names_of_boostax_and_of_optax():
    functions = catalogue("optimizer")
    for name in OPTIMIZERS:
        assert functions[name] is catalogue("transformation")[name] is OPTIMIZERS[name]
        assert functions.get(f"optax.{name}") is getattr(optax, name, None)
    theirs = {"learning_rate": 0.1, "convention": "mindspore"}
    config = load_config({"optimizer": {"name": "rmsprop", **theirs}})
    assert dict(info_of(config.optimizer.build()).settings)["decay"] == 0.9
    refused({"optimizer": {"name": "adam", **theirs, "convention": "torhc"}}, "mean 'torch'?")
    refused({"optimizer": {"name": "adam", "lr": 0.1}}, "lr is learning_rate", "rate: missing")
    refused({"optimizer": {"name": "adagrad", "learning_rate": 1, "eps": -1}}, "of at least 0")


GROUPED = {
    "name": "sgd",
    "learning_rate": 1.0,
    "weight_decay": 0.5,
    "decay_bias_and_norm": False,
    "groups": [
        {"params": "head/*", "learning_rate": {"name": "constant_schedule", "value": 0.1}},
        {"params": ["body/bias", "norm/*"], "optimizer": {"name": "lion"}, "centralize": False},
    ],
}


def test_a_schedule_in_a_group_has_an_end_like_any_other():
    rate = {"name": "cosine_decay_schedule", "init_value": 0.1, "decay_steps": 7}
    group = {"params": "a", "optimizer": {"name": "lion", "learning_rate": rate}}
    for one in (group, {"params": "a", "learning_rate": rate}):
        named = load_config({"optimizer": {**GROUPED, "groups": [one]}}).optimizer
        assert list(horizons(named)) == [("cosine_decay_schedule", "decay_steps", 7)]


def test_groups_of_an_optimizer():
    config = load_config({"optimizer": GROUPED})
    assert load_config(json.loads(json.dumps(config.to_dict()))) == config
    assert hash(config)
    assert config.to_dict()["optimizer"]["groups"][0]["params"] == ["head/*"]
    params = {
        "body": {"kernel": jnp.ones(1), "bias": jnp.ones(1)},
        "head": {"kernel": jnp.ones(1), "bias": jnp.ones(1)},
        "norm": {"scale": jnp.ones(1)},
    }
    tx = config.optimizer.build()
    updates, _ = tx.update(jax.tree.map(lambda p: 2 * p, params), tx.init(params), params)
    expected = {
        "body": {"kernel": [-2.5], "bias": [-1.0]},  # Lion moves by the rate, which it takes over
        "head": {"kernel": [-0.25], "bias": [-0.2]},
        "norm": {"scale": [-1.0]},
    }
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, 1e-6),
        updates,
        jax.tree.map(np.array, expected, is_leaf=lambda x: isinstance(x, list)),
    )
    base = load_config({"optimizer": {**GROUPED, "groups": [{"params": "hed/*"}]}}).optimizer
    with pytest.raises(ValueError, match=r"group 0: .*'hed/\*' matches no leaf.*body/bias"):
        base.build().init(params)


@pytest.mark.parametrize(
    ("group", "part"),
    [
        ({"parms": "a"}, "groups[0].params: missing; allowed: a path pattern"),
        ({"params": []}, "groups[0].params: got () (a list)"),
        ({"params": [1]}, "groups[0].params: got (1,) (a list)"),
        ({"params": "a", "centralize": 1}, "groups[0].centralize: got 1 (a number)"),
        ({"params": "a", "lr": 0.1}, "groups[0].lr: sgd has no argument 'lr'. PyTorch's lr is"),
        ({"params": "a", "learning_rate": "1"}, 'groups[0].learning_rate: got "1" (text)'),
        ({"params": "a", "optimizer": "lionn"}, "Did you mean 'lion'?"),
        ({"params": "a", "optimizer": "lion", "momentum": 0.1}, "momentum: the group has an"),
        ({"params": "a", "optimizer": {"name": "sgd", "groups": []}}, "a group has no groups"),
        ("a", 'groups[0]: got "a" (text)'),
    ],
    ids=str,
)
def test_faults_of_groups(group, part):
    refused({"optimizer": {**GROUPED, "groups": [group]}}, part)


def test_objects_of_optax_are_taken_where_they_make_sense():
    base = optax.sgd(0.1)
    named = load_config(
        {"optimizer": {"name": "schedule_free", "learning_rate": 0.1, "base_optimizer": base}}
    ).optimizer
    assert named.get("base_optimizer") is base
    named.build().init(jnp.ones(2))
    sgd = {"name": "sgd", "learning_rate": 0.1}
    refused({"optimizer": {**sgd, "momentum": lambda step: 0.9}}, "optimizer.momentum: got")
    refused({"optimizer": {**sgd, "momentum": base}}, "optimizer.momentum: got")
    half = {**sgd, "accumulator_dtype": jnp.bfloat16}
    refused({"optimizer": half}, "accumulator_dtype: sgd has no argument", "it: 'optax.sgd'")
    dtypes = load_config({"optimizer": {**half, "name": "optax.sgd"}}).optimizer
    assert dtypes.build().init(jnp.ones(2)) is not None


@pytest.mark.parametrize("size", [400, 5000])
def test_very_large_integers_are_refused(size):
    refused({"optimizer": {"name": "sgd", "learning_rate": 10**size}}, "allowed: a finite number")
    refused({"grad_accumulation": {"every": 10**size}}, "grad_accumulation.every: got")
    refused({"dim_reduce": {"alpha": 10**size}}, "dim_reduce.alpha: got")


def test_a_config_that_contains_itself():
    config = {"boost": {}}
    config["boost"]["boost"] = config
    refused(config, "contains itself")


def test_functions_are_taken_as_rates():
    rate = optax.constant_schedule(0.1)
    config = load_config({"optimizer": {"name": "sgd", "learning_rate": rate}})
    assert config.optimizer.get("learning_rate") is rate
    assert config == load_config({"optimizer": {"name": "sgd", "learning_rate": rate}})


# Round trips and the schema


def test_to_dict_round_trips():
    config = load_config(
        {
            "grad_freeze": {"full_fraction": 0.3},
            "grad_accumulation": {"every": 4},
            "optimizer": {"name": "adam", "learning_rate": 0.1, "eps": 1e-6},
        }
    )
    for defaults in (True, False):
        text = json.dumps(config.to_dict(defaults=defaults))
        assert load_config(json.loads(text)) == config
    assert config.to_dict(defaults=False)["grad_freeze"] == {"full_fraction": 0.3}
    every = load_config({"grad_accumulation": {"every": lambda step: 1}}).to_dict()
    assert every["grad_accumulation"]["every"].startswith("<")


def test_the_schema_knows_every_key():
    schema = json_schema()
    assert set(schema["properties"]) == {*BoostConfig.model_fields, "$schema"}
    for section, keys in WHOLE.items():
        reference = schema["properties"][section]["$ref"].rsplit("/", 1)[1]
        properties = schema["$defs"][reference]["properties"]
        assert set(keys) <= set(properties)
        for key in keys:
            assert properties[key].get("default") == DEFAULTS[section][key]
            assert properties[key]["description"]
    assert schema["$defs"]["Common"]["properties"]["grad_accumulation_step"]["minimum"] == 1
    assert "sgd" in schema["$defs"]["optimizer"]["properties"]["name"]["enum"]


def test_the_schema_agrees_with_the_loader():
    validate = jsonschema.Draft202012Validator(json_schema())
    optimizer = {"name": "sgd", "learning_rate": 0.1}
    for right in (
        WHOLE,
        {},
        {"optimizer": optimizer},
        {"grad_accumulation": {"every": 2}},
        {"adasum": {"axis_name": "data", "inner_axis": "local"}},
        {"adasum": {"on": "update", "local_steps": 2, "outer": optimizer}},
        {"thor": {"damping": 0.1, "learning_rate": DECAY, "clip": "tensor", "early": []}},
        {"loss_scale": {"dynamic": False, "init": 0.5}},
        {"loss_scale_group": {"groups": ["a", ["b", "c"]], "init": [4, 2.5], "min_scale": 1}},
    ):
        assert validate.is_valid(right)
        load_config(right)
    for wrong in (
        {"boost": {"grad_freze": True}},
        {"boost": {"adasum": "False"}},
        {"boost": {"adasum": None}},
        {"grad_freeze": {"full_fraction": None}},
        {"grad_freeze": {"total_steps": 0}},
        {"grad_accumulation": {"every": 2.5}},
        {"optimizer": {**optimizer, "momentm": 1}},
        {"optimizer": {"name": "adamq"}},
        {"optimizer": {**optimizer, "momentum": "0.9"}},
        {"clip": {"global_norm": 0}},
        {"common": {"device_number": 0}},
        {"adasum": {"axis_name": ""}},
        {"adasum": {"on": None}},
        {"thor": {"damping": 0}},
        {"thor": {"damping": "0.1"}},
        {"thor": {"damping": {"name": "exponential_decay", "rate": 1}}},
        {"thor": {"clip": "norm"}},
        {"thor": {"split_indices": None}},
        {"loss_scale": {"init": 0}},
        {"loss_scale": {"factor": 1}},
        {"loss_scale": {"dynamic": 0}},
        {"loss_scale": {"window": 2**31}},
        {"loss_scale_group": {"groups": "a"}},
        {"loss_scale_group": {"groups": ["a", []]}},
        {"loss_scale_group": {"groups": []}},
        {"loss_scale_group": {"groups": None}},
        {"loss_scale_group": {"init": []}},
        {"loss_scale_group": {"init": [1, "2"]}},
        {"loss_scale_group": {"max_scale": 1e39}},
        {"adasum": {"on": "update", "local_steps": 2, "outer": {"name": "sgd", "rate": 1}}},
    ):
        assert not validate.is_valid(wrong)
        refused(wrong)


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
_keys = st.sampled_from(
    ["mode", "adasum", "damping", "param_groups", "every", "rho", "name", "learning_rate", "x"]
)
_sections = st.sampled_from([*BoostConfig.model_fields, "bost"])


@given(
    st.dictionaries(_sections, _values | st.dictionaries(_keys, _values, max_size=3), max_size=3)
)
def test_any_dictionary_is_read_or_refused_with_paths(raw):
    try:
        config = load_config(raw)
    except ConfigError as fault:
        message = str(fault)
    else:
        assert load_config(config.to_dict()) == config == load_config(raw)
        return
    lines = message.splitlines()
    assert lines[0].split()[0] == str(sum(line.startswith("- ") for line in lines))
    assert any(line.startswith(f"- {section}") for line in lines for section in raw)


def test_the_names_are_public():
    assert boostax.load_config is load_config
    assert issubclass(boostax.ConfigError, ValueError)


def test_the_docs_list_every_key_with_its_default():
    page = pathlib.Path(__file__).parents[1] / "docs" / "config.md"
    chapters = page.read_text(encoding="utf-8").split("\n### ")
    rows = {part.split("\n")[0].split(":")[0]: part.split("\n") for part in chapters}
    for section, model in SECTIONS.items():
        for key, field in model.model_fields.items():
            (row,) = (line for line in rows[section] if line.startswith(f"| `{key}`"))
            default = list(field.default) if isinstance(field.default, tuple) else field.default
            nothing = "`null`" if (section, key) in NULLABLE else "not set"
            assert (nothing if default is None else f"`{json.dumps(default)}`") in row
            assert field.description in row


# Equal configs mean the same training


@pytest.mark.parametrize(
    "section",
    [
        {"microbatch": 4},
        {"every": 1},
        {"every": 3},
        {"grad_accumulation_step": 2, "nonfinite": "off"},
        {"nonfinite": "skip_micro"},
        {"nonfinite": "skip_window", "every": 1},
    ],
)
def test_equal_configs_build_the_same_chain(section):
    config = load_config(
        {"boost": {"mode": "manual", "grad_accumulation": True}, "grad_accumulation": section}
    )
    again = load_config(config.to_dict())
    assert config == again
    windowed = section.get("every", section.get("grad_accumulation_step", 1)) != 1
    assert config.has_window == again.has_window == (windowed or "nonfinite" in section)
    built = []
    for one in (config, again, load_config(config.to_dict(defaults=False))):
        boost = boostax.AutoBoost("O0", one)
        parts = [(i.name, dict(i.settings)) for i in _info.walk(boost.optimizer(optax.sgd(0.1)))]
        assert ("accumulate" in [name for name, _ in parts]) == config.has_window
        built.append((parts, boost.describe().order, boost.resolution))
    assert built[0][0] == built[1][0] == built[2][0]
    assert built[0][1] == built[1][1] == built[2][1]
    assert built[0][2].decisions == built[1][2].decisions
    if config.has_window:
        assert built[0][0][0][1]["nonfinite"] == section.get("nonfinite", "skip_micro")


# Every fault is told when the config is read


@pytest.mark.parametrize("name", ["self", "cls", "config", "raw", "sections", "model_config"])
def test_any_name_of_a_section_is_a_fault_and_no_traceback(name):
    refused({name: 1}, "1 fault", f"- {name}: unknown section")
    with pytest.raises(ConfigError, match=f"{name}: unknown section"):
        BoostConfig(**{name: 1})


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("centralize", "axes", {3: 0}),
        ("centralize", "axes", {"": 0}),
        ("centralize", "axes", {"*/kernel": True}),
        ("grad_freeze", "patterns", []),
        ("grad_freeze", "patterns", ["a/*", ""]),
        ("grad_accumulation", "every", int),
        ("common", "grad_accumulation_step", float),
    ],
)
def test_values_that_would_fail_later_are_refused(section, key, value):
    refused({section: {key: value}}, f"{section}.{key}: got")


ADAMW = {"name": "adamw", "learning_rate": 1e-3}


@pytest.mark.parametrize(
    "mask",
    [
        {"a": "False"},
        {"a": 1},
        {"a": {"kernel": True, "bias": None}},
        {"a": {}},
        {},
        {3: True},
        {"a": [True]},
    ],
)
def test_a_mask_holds_only_booleans(mask):
    refused({"optimizer": {**ADAMW, "mask": mask}}, "optimizer.mask: got", "true and false")


def test_a_mask_like_the_parameters():
    mask = {"a": {"kernel": True, "bias": np.bool_(False)}}
    config = load_config({"optimizer": {**ADAMW, "mask": mask, "weight_decay": 0.5}})
    turned = {"a": {"bias": False, "kernel": True}}
    assert config == load_config({"optimizer": {**ADAMW, "mask": turned, "weight_decay": 0.5}})
    assert hash(config) == hash(load_config(json.loads(json.dumps(config.to_dict()))))
    assert config.to_dict()["optimizer"]["mask"] == turned
    tx, params = config.optimizer.build(), {"a": {"kernel": jnp.ones(1), "bias": jnp.ones(1)}}
    update, _ = tx.update(
        {"a": {"kernel": jnp.zeros(1), "bias": jnp.zeros(1)}}, tx.init(params), params
    )
    # No gradient, so that only the decay is left: 1e-3 * 0.5 on the kernel.
    np.testing.assert_allclose(update["a"]["kernel"], [-5e-4], rtol=1e-6)
    np.testing.assert_array_equal(update["a"]["bias"], [0.0])


def test_objects_of_a_schedule_hold_numbers_by_name():
    def with_cycles(*cycles):
        rate = {"name": "sgdr_schedule", "cosine_kwargs": list(cycles)}
        return {"optimizer": {"name": "sgd", "learning_rate": rate}}

    here = "optimizer.learning_rate.cosine_kwargs[0]"
    refused(with_cycles({1: 2, "a": 3}), f"{here}.1: got")
    refused(with_cycles({"init_value": "0"}), f'{here}.init_value: got "0" (text)')
    refused(with_cycles({"init_value": -1.0}), f"{here}.init_value: got -1.0")


@pytest.mark.parametrize("value", [int, b"1", np.ones(3), jnp.ones(3), object(), -1e-3, 1j])
def test_what_is_no_learning_rate(value):
    refused({"optimizer": {"name": "sgd", "learning_rate": value}}, "optimizer.learning_rate: got")


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("b1", 2.0, "of at least 0 and below 1"),
        ("b1", 1, "of at least 0 and below 1"),
        ("b2", -0.1, "of at least 0 and below 1"),
        ("eps", -1, "of at least 0"),
        ("eps_root", -1, "of at least 0"),
        ("weight_decay", -1e-4, "of at least 0"),
        ("mu_dtype", "object", "a float dtype"),
        ("mu_dtype", "U5", "a float dtype"),
        ("mu_dtype", "int8", "a float dtype"),
        ("mu_dtype", jnp.int8, "a float dtype"),
        ("mu_dtype", int, "a float dtype"),
        ("mu_dtype", np.ones(2), "a float dtype"),
        ("mask", np.ones(2), "path patterns"),
    ],
)
def test_ranges_of_an_optimizers_arguments(key, value, allowed):
    refused({"optimizer": {**ADAMW, key: value}}, f"optimizer.{key}: got", allowed)


def test_ranges_of_momentum_and_schedules():
    sgd = {"name": "sgd", "learning_rate": 0.1}
    refused({"optimizer": {**sgd, "momentum": -3}}, "optimizer.momentum: got -3")
    refused({"optimizer": {**sgd, "momentum": 1.0}}, "optimizer.momentum: got 1.0")
    assert load_config({"optimizer": {**sgd, "momentum": 0}}).optimizer.get("momentum") == 0
    rate = {"name": "cosine_decay_schedule", "init_value": -1.0, "decay_steps": 4}
    refused({"optimizer": {**sgd, "learning_rate": rate}}, "learning_rate.init_value: got -1.0")
    rate = {"name": "constant_schedule", "value": -1.0}
    refused({"optimizer": {**sgd, "learning_rate": rate}}, "learning_rate.value: got -1.0")


@pytest.mark.parametrize("kind", ["optimizer", "transformation", "schedule"])
def test_the_defaults_of_optax_are_within_the_ranges(kind):
    seen = 0
    for name, function in catalogue(kind).items():
        for key, parameter in inspect.signature(function).parameters.items():
            limit = limits(kind, name, key)
            if limit and isinstance(parameter.default, (int, float)):
                assert _outside(parameter.default, key, limit) == [], (name, key)
                seen += 1
    assert seen >= (100 if kind != "schedule" else 2)


@pytest.mark.parametrize(
    "steps",
    [
        {"10": 0.5, "010": 0.1, " 1_0 ": 0.3},
        {"010": 0.5},
        {" 10": 0.5},
        {"1_0": 0.5},
        {"-1": 0.5},
        {"10": 0.5, 10: 0.5},
        {10.0: 0.5},
        {True: 0.5},
        {"10": -0.5},
        {"10": float("nan")},
        {"9" * 5000: 0.5},
    ],
)
def test_steps_are_whole_numbers_each_once(steps):
    rate = {"name": "piecewise_constant_schedule", "init_value": 1, "boundaries_and_scales": steps}
    refused(
        {"optimizer": {"name": "sgd", "learning_rate": rate}},
        "optimizer.learning_rate.boundaries_and_scales: got",
    )


def test_a_dtype_is_kept_by_name():
    names = [
        load_config({"optimizer": {**ADAMW, "mu_dtype": dtype}})
        for dtype in ("bfloat16", jnp.bfloat16, jnp.dtype("bfloat16"))
    ]
    assert names[0] == names[1] == names[2]
    assert names[1].to_dict()["optimizer"]["mu_dtype"] == "bfloat16"


def test_the_schema_knows_ranges_masks_and_missing_names():
    validator = jsonschema.Draft202012Validator(json_schema())
    assert validator.is_valid({"optimizer": GROUPED})
    for group in ({"parms": "a"}, {"params": []}, {"params": "a", "lr": 0.1}, "a"):
        assert not validator.is_valid({"optimizer": {**GROUPED, "groups": [group]}})
    mask = {"a": {"kernel": True, "bias": False}}
    assert validator.is_valid({"optimizer": {**ADAMW, "mask": mask, "b1": 0.9, "eps": 0}})
    steps = {"name": "piecewise_constant_schedule", "init_value": 1.0}
    for wrong in (
        {"mask": {"a": "False"}},
        {"mask": {}},
        {"b1": 1.0},
        {"eps": -1},
        {"learning_rate": -1},
        {"learning_rate": {**steps, "boundaries_and_scales": {"010": 0.5}}},
        {"learning_rate": {"name": "constant_schedule", "value": -1}},
    ):
        assert not validator.is_valid({"optimizer": {**ADAMW, **wrong}})
        refused({"optimizer": {**ADAMW, **wrong}})
    (fault,) = validator.iter_errors({"optimizer": {"learning_rate": 0.1}})
    assert fault.message == "'name' is a required property"


def test_every_further_name_of_a_setting_is_a_fault():
    message = refused({"clip": {"global_norm": 1.0, "value": 1.0, "adaptive": 1.0}}, "2 faults")
    for key in ("value", "adaptive"):
        assert f"clip.{key}: says the same as clip.global_norm" in message
    refused(
        {
            "grad_accumulation": {"every": 2, "grad_accumulation_step": 2},
            "common": {"grad_accumulation_step": 2},
        },
        "2 faults",
        "grad_accumulation.grad_accumulation_step: says the same as grad_accumulation.every",
        "common.grad_accumulation_step: says the same as grad_accumulation.every",
    )


def test_what_json_lacks_is_listed_with_the_other_faults(tmp_path):
    text = """{
        "boost": {"adasum": "False", "mode": "auto", "mode": "auto"},
        "grad_freeze": {"freeze_p": NaN},
        "dim_reduce": {"rho": -Infinity, "alpha": Infinity},
        "optimizer": {"name": "sgd", "learning_rate": NaN, "momentum": {"a": [{"b": 1, "b": 2}]}},
        "less_bn": {}, "less_bn": {}
    }"""
    path = tmp_path / "config.json"
    path.write_text(text)
    parts = [
        "boost.mode: the key 'mode' stands twice in one object",
        "optimizer.momentum.a[0].b: the key 'b' stands twice",
        "less_bn: the key 'less_bn' stands twice",
        'boost.adasum: got "False" (text)',
        "grad_freeze.freeze_p: got NaN (a number); allowed: a number from 0 to 1",
        "dim_reduce.rho: got -Infinity",
        "dim_reduce.alpha: got Infinity",
        "optimizer.learning_rate: got NaN",
        "optimizer.momentum: got",
    ]
    message = refused(path, "9 faults", *parts)
    assert message.count("\n- ") == 9
    with pytest.raises(ConfigError, match="9 faults"):
        BoostConfig.model_validate_json(text)
    refused({3: {}, "bost": {}}, "2 faults", "the key 3 is not text", "bost: unknown section")


def test_pydantics_own_entrances_raise_the_same_error():
    for wrong in ({"boost": {"adasum": 1}}, {"bost": {}}, [], None, 3):
        with pytest.raises(ConfigError):
            BoostConfig.model_validate(wrong)
        with pytest.raises(ConfigError):
            BoostConfig.model_validate_json(json.dumps(wrong))
    for broken in ("{", b"\xff", "NaN"):
        with pytest.raises(ConfigError):
            BoostConfig.model_validate_json(broken)
    right = {"grad_freeze": {"param_groups": 3}}
    config = BoostConfig.model_validate(right)
    assert config == load_config(right) == BoostConfig.model_validate_json(json.dumps(right))
    assert BoostConfig.model_validate(config) is config
