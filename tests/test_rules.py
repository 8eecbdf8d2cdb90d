"""Levels, modes, exclusions and what is reported."""

import pytest

from boostax import rules
from boostax._config_dim_reduce import NO_BASIS
from boostax._config_loss_scale import NO_GROUPS
from boostax.config import load_config
from boostax.errors import ConfigError
from boostax.rules import EXCLUSIONS, ORDER, TECHNIQUES, resolve


def states(config, level="O0"):
    return {d.technique: d.state for d in resolve(load_config(config), level).decisions}


def test_levels():
    assert resolve(load_config(), "O0").enabled == ()
    assert resolve(load_config(), "O1").enabled == ("less_bn", "grad_freeze", "centralize")
    assert resolve(load_config(), "O2").enabled == (
        "less_bn",
        "grad_freeze",
        "adasum",
        "centralize",
    )
    assert states({}, "O1") == {
        "less_bn": "on",
        "grad_freeze": "on",
        "grad_accumulation": "off",
        "centralize": "on",
        "adasum": "off",
        "thor": "off",
        "dim_reduce": "off",
        "loss_scale_group": "off",
        "loss_scale": "off",
    }
    assert states({}, "O2")["adasum"] == "on"


@pytest.mark.parametrize("level", ["O9", "o1", "", 1, None])
def test_unknown_levels(level):
    with pytest.raises(ConfigError, match=r"level: got .*'O0', 'O1', 'O2'"):
        resolve(load_config(), level)


def test_gc_flag_carries_centralization():
    assert states({"less_bn": {"gc_flag": False}}, "O1")["centralize"] == "off"
    assert (
        states({"less_bn": {"gc_flag": False}, "boost": {"mode": "enable_all"}})["centralize"]
        == "off"
    )


def test_auto_reports_the_flags_that_the_level_overrode():
    config = load_config(
        {"boost": {"grad_freeze": False, "grad_accumulation": True, "adasum": True}}
    )
    notes = "\n".join(resolve(config, "O1").notes)
    assert "boost.grad_freeze is false, but mode 'auto' overrides it: on" in notes
    assert "boost.grad_accumulation is true, but mode 'auto' overrides it: off" in notes
    assert "boost.adasum is true, but mode 'auto' overrides it: off" in notes
    assert resolve(load_config(), "O1").notes == ()


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_manual_obeys_the_flags_at_every_level(level):
    config = {"boost": {"mode": "manual", "grad_accumulation": True, "centralize": True}}
    resolution = resolve(load_config(config), level)
    assert resolution.enabled == ("grad_accumulation", "centralize")
    assert "changes nothing" in resolution.notes[0]
    assert resolve(load_config({"boost": {"mode": "manual"}}), level).enabled == ()


def test_enable_all_and_disable_all():
    everything = {"boost": {"mode": "enable_all"}}
    unready = {"loss_scale_group", "dim_reduce"}
    assert set(resolve(load_config(everything)).enabled) == set(TECHNIQUES) - unready
    grouped = {**everything, "loss_scale_group": {"groups": ["a/*", "b/*"]}}
    assert set(resolve(load_config(grouped)).enabled) == set(TECHNIQUES) - {
        "loss_scale",
        "dim_reduce",
    }
    config = load_config({"boost": {"mode": "disable_all", "grad_freeze": True}})
    resolution = resolve(config, "O2")
    assert resolution.enabled == ()
    assert "mode 'disable_all' overrides it: off" in resolution.notes[0]


def test_sections_of_what_is_off_are_reported():
    config = load_config(
        {
            "grad_freeze": {"param_groups": 4},
            "dim_reduce": {"rho": 0.5},
            "common": {"grad_accumulation_step": 4, "device_number": 4},
            "less_bn": {"gc_flag": False},
            "adasum": {"on": "update"},
        }
    )
    notes = resolve(config, "O0").notes
    assert len(notes) == 5
    assert any(note.startswith("section adasum is accepted and has no effect") for note in notes)
    for part in ("section grad_freeze", "section dim_reduce", "common.grad_acc", "common.device"):
        assert any(note.startswith(part) and "no effect" in note for note in notes)


def test_split_points_of_one_buffer_are_reported():
    config = {"common": {"gradient_split_groups": [2]}, "adasum": {"granularity": "tree"}}
    (note,) = resolve(load_config(config), "O2").notes
    assert note.startswith(
        "common.gradient_split_groups is accepted and has no effect: with adasum"
    )
    assert resolve(load_config({"adasum": {"granularity": "tree"}}), "O2").notes == ()


LBFGS = {"optimizer": {"name": "lbfgs"}, "grad_accumulation": {"every": 2}}


def test_exclusions_are_refused_with_the_reason():
    flags = {"mode": "manual", "grad_accumulation": True, "grad_freeze": True, "centralize": True}
    with pytest.raises(ConfigError) as error:
        load_config({**LBFGS, "boost": flags, "centralize": {"on": "update"}})
    message = str(error.value)
    assert "boost.grad_accumulation: grad_accumulation does not go with this optimizer" in message
    assert "use grad_accumulation.microbatch" in message
    assert "boost.grad_freeze" in message
    assert "boost.centralize" in message
    with pytest.raises(ConfigError, match=r"boost.grad_freeze: .*curvature pairs"):
        resolve(load_config({"optimizer": {"name": "lbfgs"}}), "O1")


def test_enable_all_leaves_out_what_is_excluded_and_says_why():
    resolution = resolve(load_config({**LBFGS, "boost": {"mode": "enable_all"}}))
    assert resolution.enabled == ("less_bn", "loss_scale", "centralize")
    reasons = {d.technique: d.reason for d in resolution.decisions if d.state == "left out"}
    assert set(reasons) == {
        "dim_reduce",
        "grad_accumulation",
        "grad_freeze",
        "adasum",
        "thor",
        "loss_scale_group",
    }
    assert "left out" in str(resolution)


def test_the_tables_are_consistent():
    assert len({place.part for place in ORDER}) == len(ORDER)
    assert all(place.technique is None or place.technique in TECHNIQUES for place in ORDER)
    assert all(place.why for place in ORDER)
    for row in EXCLUSIONS:
        assert row.keeps in {*TECHNIQUES, "optimizer"}
        assert row.drops in TECHNIQUES
        assert row.reason
    assert set(rules.LEVELS) == {"O0", "O1", "O2"}


def test_it_prints_as_a_table():
    text = str(resolve(load_config(), "O2"))
    assert text.startswith("level O2, mode auto\n")
    assert "adasum" in text
    assert "boost.model(model, *inputs) applies it" in text


def test_notes_on_thor():
    def notes(**section):
        config = {"boost": {"mode": "manual", "thor": True}, "thor": section}
        return resolve(load_config(config)).notes

    assert notes(learning_rate=0.1, kl_clip=0.01) == ()
    assert notes(clip="tensor", kl_clip=0.01, learning_rate=0.1) == (
        "thor.kl_clip is accepted and has no effect: thor.clip is 'tensor', and only the KL clip "
        "reads it",
        "thor.learning_rate is accepted and has no effect: thor.clip is 'tensor', and only the KL "
        "clip reads it",
    )
    idle = notes(mode="reference", early=[0], factor_decay=0.5, pi_split=False, learning_rate=0.1)
    assert [note.split(" ")[0] for note in idle] == [
        "thor.early",
        "thor.factor_decay",
        "thor.pi_split",
        "thor.learning_rate",
    ]


def test_a_group_loss_scale_takes_the_place_of_the_one_scale():
    flags = {"mode": "manual", "loss_scale": True, "loss_scale_group": True}
    groups = {"groups": ["a/*", "b/*"]}
    with pytest.raises(
        ConfigError, match=r"boost.loss_scale: loss_scale does not go with loss_sca"
    ):
        load_config({"boost": flags, "loss_scale_group": groups})
    for name in ("loss_scale", "loss_scale_group"):
        one = {"mode": "manual", name: True}
        assert resolve(load_config({"boost": one, "loss_scale_group": groups})).enabled == (name,)
    resolution = resolve(
        load_config(
            {
                "boost": {"mode": "enable_all"},
                "loss_scale_group": groups,
                "loss_scale": {"init": 4.0},
            }
        )
    )
    left = {d.technique: d.reason for d in resolution.decisions if d.state == "left out"}
    assert list(left) == ["dim_reduce", "loss_scale"]
    assert "one scale for all or by one a group" in left["loss_scale"]
    assert (
        "section loss_scale is accepted and has no effect: loss_scale is left out"
        in resolution.notes
    )


def test_a_group_loss_scale_without_groups_is_refused_or_left_out():
    with pytest.raises(
        ConfigError, match=r"- loss_scale_group.groups: missing; .* set loss_scale_gr"
    ):
        load_config({"boost": {"mode": "manual", "loss_scale_group": True}})
    load_config({"boost": {"loss_scale_group": True}})
    resolution = resolve(load_config({"boost": {"mode": "enable_all"}}))
    left = {d.technique: d.reason for d in resolution.decisions if d.state == "left out"}
    assert left["loss_scale_group"] == NO_GROUPS


def test_notes_on_loss_scales():
    def notes(name, **section):
        config = {"boost": {"mode": "manual", name: True}, name: section}
        return resolve(load_config(config)).notes

    assert notes("loss_scale", init=8.0, window=3, factor=2.0) == ()
    idle = notes("loss_scale", dynamic=False, init=8.0, window=3, max_scale=2.0)
    assert [note.split(" ")[0] for note in idle] == ["loss_scale.window", "loss_scale.max_scale"]
    assert all("loss_scale.dynamic is false" in note for note in idle)
    assert notes("loss_scale_group", groups=["*"], window=3) == ()
    idle = notes("loss_scale_group", groups=["*"], rule="reference", window=3, init=4.0)
    assert [note.split(" ")[0] for note in idle] == ["loss_scale_group.window"]


BASIS = {"pca_mat_path": "basis.npz"}


@pytest.mark.parametrize(
    ("name", "sections", "reason"),
    [
        ("thor", {}, "takes the place of clip, thor"),
        ("grad_freeze", {}, "moves every leaf"),
        ("adasum", {}, "change the point"),
        ("grad_accumulation", {"grad_accumulation": {"every": 2}}, "microbatch with every = 1"),
        ("centralize", {"centralize": {"on": "update"}}, 'use centralize.on = "gradient"'),
    ],
)
def test_dim_reduce_is_terminal(name, sections, reason):
    sections = {"dim_reduce": BASIS, **sections}
    flags = {"mode": "manual", "dim_reduce": True, name: True}
    with pytest.raises(ConfigError, match=f"boost.{name}: {name} does not go with dim_reduce") as e:
        load_config({"boost": flags, **sections})
    assert reason in str(e.value)
    resolution = resolve(load_config({"boost": {"mode": "enable_all"}, **sections}))
    assert "dim_reduce" in resolution.enabled
    assert name not in resolution.enabled


def test_what_goes_with_dim_reduce_and_what_it_replaces():
    flags = {"mode": "manual", "dim_reduce": True, "centralize": True, "grad_accumulation": True}
    config = {
        "boost": {**flags, "loss_scale": True},
        "grad_accumulation": {"microbatch": 2},
        "dim_reduce": {**BASIS, "alpha": 0.0, "gamma": 0.5},
        "optimizer": {"name": "lbfgs"},
        "clip": {"global_norm": 1.0},
    }
    resolution = resolve(load_config(config))
    assert resolution.enabled == ("loss_scale", "grad_accumulation", "centralize", "dim_reduce")
    told = "\n".join(resolution.notes)
    assert "takes the place of the base optimizer (lbfgs)" in told
    assert "clip.global_norm is accepted and has no effect" in told
    assert "dim_reduce.gamma is accepted and has no effect: with alpha = 0" in told


def test_dim_reduce_without_a_basis_is_refused_or_left_out():
    with pytest.raises(ConfigError, match=r"- dim_reduce.pca_mat_path: missing; .*weight_load_dir"):
        load_config({"boost": {"mode": "manual", "dim_reduce": True}})
    resolution = resolve(load_config({"boost": {"mode": "enable_all"}}))
    left = {d.technique: d.reason for d in resolution.decisions if d.state == "left out"}
    assert left["dim_reduce"] == NO_BASIS
