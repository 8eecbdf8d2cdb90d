"""Which techniques exist, their order, and what excludes what: data, each row with its reason.

With its table of exclusions (``_exclusions``) this is the only place that knows two techniques at
once. A new technique adds its row and its exclusions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from boostax._config_dim_reduce import NO_BASIS
from boostax._config_loss_scale import NO_GROUPS
from boostax._config_named import Fault
from boostax._config_notes import notes
from boostax._exclusions import EXCLUSIONS, NEEDS_VALUE, WINDOWS, Exclusion
from boostax.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from boostax.config import BoostConfig

__all__ = [
    "EXCLUSIONS",
    "LEVELS",
    "NEEDS_VALUE",
    "ORDER",
    "TECHNIQUES",
    "Decision",
    "Exclusion",
    "Place",
    "Resolution",
    "Technique",
    "resolve",
]


@dataclasses.dataclass(frozen=True)
class Technique:
    """One technique that a config can switch on.

    Attributes:
      name: its flag in the section ``boost``, and its section.
      seam: ``"model"``, ``"gradient"`` or ``"update"``; where it acts.
      does: what it does, in a few words.
    """

    name: str
    seam: str
    does: str


TECHNIQUES: dict[str, Technique] = {
    row.name: row
    for row in (
        Technique("less_bn", "model", "drops batch norms, normalises the head"),
        Technique("grad_freeze", "update", "freezes a varying prefix of the layers"),
        Technique("grad_accumulation", "update", "updates once per window of micro-batches"),
        Technique("centralize", "update", "removes the mean of each unit's gradient"),
        Technique("adasum", "update", "combines the devices' gradients by AdaSum"),
        Technique("thor", "update", "preconditions each layer's gradient by its factors"),
        Technique("dim_reduce", "update", "steps along the directions that training has taken"),
        Technique("loss_scale_group", "gradient", "keeps one loss scale per group"),
        Technique("loss_scale", "gradient", "keeps float16 gradients in range by one scale"),
    )
}

# As in mindspore.boost. gc_flag of the section less_bn carries centralize along.
LEVELS: dict[str, tuple[str, ...]] = {
    "O0": (),
    "O1": ("less_bn", "grad_freeze"),
    "O2": ("less_bn", "grad_freeze", "adasum"),
}


@dataclasses.dataclass(frozen=True)
class Place:
    """One place in the chain: a part's name, the technique it belongs to, and why it is there."""

    part: str
    technique: str | None
    why: str


# Outermost first. Unscaling and the finite decision come before, at the gradient seam.
ORDER: tuple[Place, ...] = (
    Place("accumulate", "grad_accumulation", "everything after it happens once a window"),
    Place("freeze", "grad_freeze", "frozen leaves count in no norm and keep their whole state"),
    Place("adasum", "adasum", "what follows sees one gradient on all devices"),
    Place("local_steps", "adasum", "each device makes updates of its own between two exchanges"),
    Place("centralize", "centralize", "before the clip, so that the norm is that of what is used"),
    Place("clip", None, "on the window's mean gradient of the trainable leaves"),
    Place("thor", "thor", "each layer's gradient between the inverses of its two factors"),
    Place(
        "dim_reduce", "dim_reduce", "in place of clip, thor and optimizer: nothing may follow it"
    ),
    Place("optimizer", None, "sees the gradient that all the others have shaped"),
    Place("adasum_update", "adasum", "on the updates; each device has moments of its own"),
    # Behind AdaSum, which counts a vector by its direction: what rounding leaves of one that
    # centralization brings to zero would count in full.
    Place("centralize_update", "centralize", "on the final update, weight decay included"),
)


State = Literal["on", "off", "left out"]


@dataclasses.dataclass(frozen=True)
class Decision:
    """Whether a technique is on, and why."""

    technique: str
    state: State
    reason: str


@dataclasses.dataclass(frozen=True)
class Resolution:
    """What a config means at a level; prints as a table.

    Attributes:
      level: ``"O0"``, ``"O1"`` or ``"O2"``.
      mode: the config's mode.
      decisions: one for each technique, in the order of ``TECHNIQUES``.
      notes: flags that were overridden, sections without effect, and the like.
    """

    level: str
    mode: str
    decisions: tuple[Decision, ...]
    notes: tuple[str, ...]

    @property
    def enabled(self) -> tuple[str, ...]:
        """The techniques that are on, in the order of the chain."""
        on = [d.technique for d in self.decisions if d.state == "on"]
        in_chain = [p.technique for p in ORDER if p.technique in on]
        return tuple(
            dict.fromkeys([n for n in on if n not in in_chain] + [n for n in in_chain if n])
        )

    def __str__(self) -> str:
        from boostax.training.describe import format_table

        lines = [f"level {self.level}, mode {self.mode}"]
        rows = [(d.technique, d.state, d.reason) for d in self.decisions]
        lines += format_table(("technique", "state", "why"), rows)
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def check_level(level: Any) -> str:
    """Return the level, or raise a ConfigError for an unknown one."""
    if not isinstance(level, str) or level not in LEVELS:
        hint = did_you_mean(level.upper(), LEVELS) if isinstance(level, str) else ""
        raise ConfigError(f"level: got {level!r}; allowed: {', '.join(map(repr, LEVELS))}.{hint}")
    return level


def faults(config: BoostConfig) -> list[Fault]:
    """Return what the rules refuse whatever the level: explicit requests in mode ``manual``."""
    if config.boost.mode != "manual":
        return []
    wanted = {name for name, (on, _) in _wanted(config, "O0").items() if on}
    found = [
        Fault(row.key, f"missing; {row.reason}; or leave the flag out, and {row.instead}")
        for row in _unready(config, wanted)
    ]
    return found + [
        Fault(f"boost.{row.drops}", _exclusion_text(row)) for row in _clashes(config, wanted)
    ]


def resolve(config: BoostConfig, level: str = "O0") -> Resolution:
    """Decide which techniques are on, and say why.

    Args:
      config: a checked config.
      level: ``"O0"``, ``"O1"`` or ``"O2"``; decides in mode ``auto``. Default ``"O0"``.

    Returns:
      The decisions and notes.

    Raises:
      ConfigError: the level is unknown, or techniques that are on exclude each other.

    Example:
      >>> from boostax.config import load_config
      >>> resolve(load_config(), "O1").enabled
      ('less_bn', 'grad_freeze', 'centralize')
    """
    check_level(level)
    mode = config.boost.mode
    wanted = _wanted(config, level)
    on = {name for name, (value, _) in wanted.items() if value}
    # In mode manual that is a fault of the config.
    left_out = {row.technique: row.reason for row in _unready(config, on)}
    clashes = _clashes(config, on - set(left_out))
    if clashes and mode != "enable_all":
        raise ConfigError(_clash_lines(clashes))
    left_out |= {row.drops: _exclusion_text(row) for row in clashes}
    decisions = []
    for name, (value, reason) in wanted.items():
        if not value:
            decisions.append(Decision(name, "off", reason))
        elif name in left_out:
            decisions.append(Decision(name, "left out", left_out[name]))
        else:
            how = "; boost.model(model, *inputs) applies it" if name == "less_bn" else ""
            decisions.append(Decision(name, "on", reason + how))
    resolution = Resolution(level, mode, tuple(decisions), ())
    return _with_notes(config, resolution, _own_parts(config))


@dataclasses.dataclass(frozen=True)
class _Unready:
    """A technique that a config does not say enough about: what is missing, and what to do instead."""

    technique: str
    key: str
    reason: str
    instead: str


def _unready(config: BoostConfig, on: set[str]) -> list[_Unready]:
    rows = []
    if config.loss_scale_group.groups is None:
        instead = "pass loss_scale=boostax.GroupLossScale(...) to train_step"
        rows.append(_Unready("loss_scale_group", "loss_scale_group.groups", NO_GROUPS, instead))
    if not config.dim_reduce.has_source:
        instead = "pass boostax.dim_reduce(basis) as the optimizer"
        rows.append(_Unready("dim_reduce", "dim_reduce.pca_mat_path", NO_BASIS, instead))
    return [row for row in rows if row.technique in on]


def _wanted(config: BoostConfig, level: str) -> dict[str, tuple[bool, str]]:
    """Return for every technique whether mode, level and flags ask for it, and which of them."""
    mode = config.boost.mode
    result = {}
    for name in TECHNIQUES:
        if mode == "auto":
            on, reason = name in LEVELS[level], f"level {level} decides"
        elif mode == "manual":
            on = getattr(config.boost, name)
            reason = f"boost.{name} is {str(on).lower()}"
        else:
            on, reason = mode == "enable_all", f"mode {mode}"
        result[name] = (on, reason)
    if result["less_bn"][0] and not result["centralize"][0]:
        reason = f"less_bn.gc_flag is {str(config.less_bn.gc_flag).lower()}"
        if mode == "auto":
            reason += f", and level {level} includes less_bn"
        result["centralize"] = (config.less_bn.gc_flag, reason)
    elif mode == "enable_all" and not config.less_bn.gc_flag and not config.boost.centralize:
        result["centralize"] = (False, "less_bn.gc_flag is false")
    return result


def optimizer_parts(tx: Any) -> frozenset[str]:
    """Return the names of the functions that an optax transformation is made of."""
    from boostax import _info

    return frozenset(info.name for info in _info.walk(tx))


def with_optimizer(
    config: BoostConfig,
    resolution: Resolution,
    parts: frozenset[str],
    among: Iterable[str] | None = None,
) -> Resolution:
    """Return what is on around a base optimizer with these parts.

    With ``enable_all``, what does not go with it is left out; in the other modes that is a
    ConfigError. ``among`` are the techniques to look at, by default all that are on.
    """
    clashes = _clashes(config, set(resolution.enabled if among is None else among), parts)
    if "dim_reduce" in resolution.enabled:
        parts = frozenset()  # it takes their place
    inside = sorted(parts & (WINDOWS | {"freeze"}))
    clips = [key for key in type(config.clip).model_fields if getattr(config.clip, key) is not None]
    lines = [
        f"clip.{key}: does not go with this optimizer: it holds {inside[0]}, and a clip around that "
        "would see each call's gradient of all leaves; put the clip inside it"
        for key in clips
        if inside and among is None
    ]
    if clashes and resolution.mode != "enable_all":
        lines = [_clash_lines(clashes), *lines]
    if lines:
        raise ConfigError("\n".join(lines))
    left_out: dict[str, str] = {}
    for row in clashes:
        left_out.setdefault(row.drops, _exclusion_text(row))
    return without(config, resolution, left_out, parts)


def without(
    config: BoostConfig,
    resolution: Resolution,
    left_out: Mapping[str, str],
    parts: frozenset[str],
) -> Resolution:
    """Return the resolution with techniques left out, each with its reason, and its notes anew."""
    told = dataclasses.replace(
        resolution,
        decisions=tuple(
            Decision(d.technique, "left out", left_out[d.technique])
            if d.technique in left_out
            else d
            for d in resolution.decisions
        ),
    )
    return _with_notes(config, told, parts)


def _with_notes(config: BoostConfig, resolution: Resolution, parts: frozenset[str]) -> Resolution:
    wanted = _wanted(config, resolution.level)
    return dataclasses.replace(resolution, notes=tuple(notes(config, wanted, resolution, parts)))


def _own_parts(config: BoostConfig) -> frozenset[str]:
    """Return the parts of the optimizer that the config names."""
    return frozenset() if config.optimizer is None else optimizer_parts(config.optimizer.build())


def _clashes(
    config: BoostConfig, on: set[str], parts: frozenset[str] | None = None
) -> list[Exclusion]:
    if parts is None:
        parts = _own_parts(config)
    # Where dim_reduce takes its place, the optimizer is in nobody's way.
    present = on if "dim_reduce" in on else on | {"optimizer"}
    return [
        row
        for row in EXCLUSIONS
        if row.keeps in present and row.drops in on and row.applies(config, parts)
    ]


def _clash_lines(clashes: list[Exclusion]) -> str:
    return "\n".join(f"boost.{row.drops}: {_exclusion_text(row)}" for row in clashes)


def _exclusion_text(row: Exclusion) -> str:
    keeps = "this optimizer" if row.keeps == "optimizer" else row.keeps
    return f"{row.drops} does not go with {keeps}: {row.reason}"
