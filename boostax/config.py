"""The config: one object that says which techniques are used and how.

A config is a dict or a JSON file with the sections and keys of mindspore.boost's
``boost_config_dict`` and a few of our own (``optimizer``, ``clip``, ``adasum``...). It is checked
strictly: every fault is listed, with its JSON path, in one :class:`ConfigError`. Reading a config
never runs code from it, opens a connection or unpickles anything.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import pydantic
from pydantic.json_schema import SkipJsonSchema

from boostax._config_checks import together
from boostax._config_dim_reduce import DimReduce
from boostax._config_json import parse_json, repeated
from boostax._config_less_bn import LessBN
from boostax._config_loss_scale import LossScale, LossScaleGroup
from boostax._config_named import Fault, Named, parse, plain, show
from boostax._config_sections import (
    ALTERNATIVES,
    BY_NAME,
    NULLABLE,
    SECTIONS,
    AdaSum,
    Boost,
    Centralize,
    Clip,
    Common,
    Compare,
    GradAccumulation,
    GradFreeze,
)
from boostax._config_thor import Thor
from boostax._config_types import Allowed
from boostax.errors import ConfigError, did_you_mean

__all__ = ["BoostConfig", "load_config"]

_TOP = "(top level)"


class BoostConfig(pydantic.BaseModel):
    """A checked, frozen config; equal for a JSON file and the equal dict, and hashable.

    Make one with :func:`load_config`, or by keywords: ``BoostConfig(boost={"mode": "manual"})``.
    Missing sections and keys take their defaults.

    Attributes:
      boost: the mode and the flags of the techniques.
      common: settings that several techniques share.
      less_bn: how models are rewritten, and ``gc_flag`` for gradient centralization.
      grad_freeze: the groups and the schedule of freezing.
      grad_accumulation: windows over steps, and micro-batches inside one.
      centralize: where and on which layers gradients are centralized.
      adasum: what AdaSum combines, how, and over which axes.
      thor: how layers are captured and preconditioned.
      dim_reduce: where the basis comes from, and the steps in its subspace.
      loss_scale: one loss scale, dynamic or fixed.
      loss_scale_group: groups of parameters, each with a loss scale.
      clip: clipping of the gradient.
      compare: name and level of an arm of ``boostax compare``; changes nothing else.
      optimizer: the base optimizer by name, or None when the caller brings one.

    Raises:
      ConfigError: a section, key or value is not allowed; all faults are listed.

    Example:
      >>> config = BoostConfig(optimizer={"name": "sgd", "learning_rate": 0.1})
      >>> config.grad_freeze.param_groups, config.optimizer.name
      (10, 'sgd')
    """

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True
    )

    boost: Boost = Boost()
    common: Common = Common()
    less_bn: LessBN = LessBN()
    grad_freeze: GradFreeze = GradFreeze()
    grad_accumulation: GradAccumulation = GradAccumulation()
    centralize: Centralize = Centralize()
    adasum: AdaSum = AdaSum()
    thor: Thor = Thor()
    dim_reduce: DimReduce = DimReduce()
    loss_scale: LossScale = LossScale()
    loss_scale_group: LossScaleGroup = LossScaleGroup()
    clip: Clip = Clip()
    compare: Compare = Compare()
    optimizer: SkipJsonSchema[Named | None] = None

    def __init__(self, /, **sections: Any) -> None:
        checked, faults = _read(sections)
        if faults:
            raise ConfigError(_message(faults))
        super().__init__(**checked)

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> BoostConfig:
        """Check a mapping as :func:`load_config` does; pydantic's options have no effect."""
        del options
        return obj if isinstance(obj, BoostConfig) else _build(obj, "")

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> BoostConfig:
        """Check JSON text as :func:`load_config` checks a file."""
        del options
        try:
            text = json_data if isinstance(json_data, str) else json_data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise ConfigError("the config is not UTF-8 text") from None
        return _build(parse_json(text, ""), "")

    @property
    def every(self) -> int | Callable[..., Any]:
        """Micro-batches per update, from whichever key gave it; default 1."""
        given = (
            self.grad_accumulation.every,
            self.grad_accumulation.grad_accumulation_step,
            self.common.grad_accumulation_step,
        )
        return next((value for value in given if value is not None), 1)

    @property
    def has_window(self) -> bool:
        """Whether grad_accumulation spans several calls, or its nonfinite policy is asked for."""
        return self.every != 1 or self.grad_accumulation.nonfinite is not None

    def given(self, section: str) -> frozenset[str]:
        """Return the keys of a section that were given rather than defaulted."""
        if section == "optimizer":
            return frozenset({"name"} if self.optimizer else ())
        return frozenset(getattr(self, section).model_fields_set)

    def to_dict(self, *, defaults: bool = True) -> dict[str, Any]:
        """Return the config as JSON would have it.

        Functions become their names in angle brackets, and can't be loaded again.

        Args:
          defaults: whether to write the keys that were not given as well. Default True.

        Example:
          >>> BoostConfig(less_bn={"gc_flag": False}).to_dict(defaults=False)
          {'less_bn': {'gc_flag': False}}
        """
        result: dict[str, Any] = {}
        for section in SECTIONS:
            values = getattr(self, section)
            # Of two names for one setting, only the one that was given is written.
            unset = {
                key
                for names in ALTERNATIVES
                for where, key in names
                if where == section
                and key not in values.model_fields_set
                and any(k in self.given(w) for w, k in names)
            }
            result[section] = {
                key: plain(value)
                for key in type(values).model_fields
                if key not in unset
                and (defaults or key in values.model_fields_set)
                and ((value := getattr(values, key)) is not None or (section, key) in NULLABLE)
            }
        if self.optimizer is not None:
            result["optimizer"] = self.optimizer.to_dict()
        return {section: keys for section, keys in result.items() if keys}


def load_config(config: Any = None) -> BoostConfig:
    """Read a config from a dict, a JSON file or a ready :class:`BoostConfig`.

    Args:
      config: a mapping of sections; the path of a JSON file (str or path object); a
        ``BoostConfig``, which is returned as it is; or None, ``{}`` or ``""`` for the defaults.
        numpy numbers and booleans count as Python's. Default None.

    Returns:
      The frozen config.

    Raises:
      ConfigError: the file can't be read, is no JSON, has a key twice, or the config has faults;
        the message lists all of them with their JSON path, what was got and what is allowed.
      TypeError: ``config`` is none of the above.

    Example:
      >>> load_config({"grad_freeze": {"param_groups": 4}}).grad_freeze.param_groups
      4
      >>> load_config({"boost": {"grad_freze": True}})  # doctest: +IGNORE_EXCEPTION_DETAIL
      Traceback (most recent call last):
      ConfigError: 1 fault in the config:
      - boost.grad_freze: unknown key. Did you mean 'grad_freeze'?
    """
    if isinstance(config, BoostConfig):
        return config
    if config is None or (isinstance(config, str) and config == ""):
        return BoostConfig()
    if isinstance(config, (str, os.PathLike)):
        return _load_file(config)
    if isinstance(config, Mapping):
        return _build(config, "")
    raise TypeError(
        f"config must be a dict, the path of a JSON file, a BoostConfig or None, got "
        f"{type(config).__name__}"
    )


def _load_file(path: str | os.PathLike[Any]) -> BoostConfig:
    shown = os.fsdecode(path)
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except OSError as error:
        raise ConfigError(
            f"{shown}: can't read the config: {error.strerror or error}; give the path of a JSON file"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{shown}: the config is not UTF-8 text; save it as UTF-8") from None
    except ValueError as error:  # a null byte in the path
        raise ConfigError(f"{shown}: {error}") from None
    return _build(parse_json(text, f"{shown}: "), f"{shown}: ")


def _build(raw: Any, prefix: str) -> BoostConfig:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{prefix}the top level must be an object with sections, got {show(raw)}")
    try:
        sections, faults = _read(raw)
        faults = repeated(raw) + faults
    except RecursionError:
        raise ConfigError(f"{prefix}the config is nested too deeply, or contains itself") from None
    if faults:
        raise ConfigError(prefix + _message(faults))
    return BoostConfig(**sections)


def _message(faults: list[Fault]) -> str:
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    return f"{count} in the config:\n" + "\n".join(f"- {fault}" for fault in faults)


def _read(raw: Mapping[Any, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """Return the sections, with faulty values left at their defaults, and all faults."""
    from boostax import rules

    faults: list[Fault] = []
    sections: dict[str, Any] = {}
    known = [*SECTIONS, "optimizer"]
    for name, value in raw.items():
        value = _normalise(value)
        if name == "$schema" and isinstance(value, str):
            continue  # for the editor
        if not isinstance(name, str):
            faults.append(Fault(_TOP, f"the key {name!r} is not text"))
        elif name not in known:
            faults.append(_unknown(name, name, known, "section"))
        elif name == "optimizer":
            sections[name], found = _read_optimizer(value)
            faults += found
        else:
            sections[name], found = _read_section(name, value)
            faults += found
    for names in ALTERNATIVES:
        given = [f"{s}.{k}" for s, k in names if s in raw and k in (_mapping(raw[s]) or {})]
        faults += [
            Fault(path, f"says the same as {given[0]}; give one of them") for path in given[1:]
        ]
    # Faulty values are their defaults by now, so that the rules can list their faults as well.
    config = BoostConfig.model_construct(**sections)
    told = {fault.path for fault in faults}
    faults += [f for f in together(config) + rules.faults(config) if f.path not in told]
    return sections, faults


def _mapping(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, pydantic.BaseModel):
        return {key: getattr(value, key) for key in value.model_fields_set}
    return value if isinstance(value, Mapping) else None


def _read_optimizer(value: Any) -> tuple[Named | None, list[Fault]]:
    if value is None:
        return None, [Fault("optimizer", "got null; leave the section out to bring an optimizer")]
    return _read_named(value, "optimizer", "optimizer")


def _read_named(value: Any, path: str, kind: str) -> tuple[Any, list[Fault]]:
    if isinstance(value, Named) and value.kind == kind:
        return value, []
    if kind == "schedule" and not isinstance(value, (Mapping, Named)):
        return value, []  # a number or a function, for the section's own types
    return parse(value, path, kind)


def _read_section(name: str, value: Any) -> tuple[Any, list[Fault]]:
    """Return the section with faulty values left at their defaults, and the faults."""
    section = SECTIONS[name]
    raw = _mapping(value)
    if raw is None:
        fault = Fault(name, f"got {show(value)}; allowed: an object with keys of this section")
        return section(), [fault]
    faults: dict[str, Fault] = {}
    for key, entry in raw.items():
        if key not in section.model_fields:
            faults[key] = _unknown(f"{name}.{key}", key, section.model_fields, "key")
        elif entry is None and (name, key) not in NULLABLE:
            faults[key] = Fault(f"{name}.{key}", f"got null; allowed: {_allowed(name, key)}")
    found: list[Fault] = []
    raw = dict(raw)
    for key in [key for key in raw if (name, key) in BY_NAME and key not in faults]:
        raw[key], new = _read_named(raw[key], f"{name}.{key}", BY_NAME[name, key])
        found += new
        if new:
            del raw[key]
    for _ in range(2):
        try:
            right = {str(k): v for k, v in raw.items() if k not in faults}
            return section.model_validate(right), [*faults.values(), *found]
        except pydantic.ValidationError as error:
            for entry in error.errors(include_url=False):
                key = str(entry["loc"][0])
                problem = f"got {show(raw[key])}; allowed: {_allowed(name, key)}"
                faults[key] = Fault(f"{name}.{key}", problem + _nearest(name, key, raw[key]))
    raise AssertionError(f"{name}: the defaults don't validate")


def _allowed(section: str, key: str) -> str:
    metadata = SECTIONS[section].model_fields[key].metadata
    return next(entry.text for entry in metadata if isinstance(entry, Allowed))


def _nearest(section: str, key: str, value: Any) -> str:
    allowed = _allowed(section, key)
    if not isinstance(value, str) or not allowed.startswith("one of"):
        return ""
    hint = did_you_mean(value, allowed.split("'")[1::2])
    return f".{hint}" if hint else ""


def _unknown(path: str, name: Any, known: Any, what: str) -> Fault:
    names = ", ".join(str(k) for k in known)
    return Fault(path, f"unknown {what}.{did_you_mean(name, known)} Known: {names}")


def _normalise(value: Any) -> Any:
    """Turn numpy's scalars into Python's and lists into tuples, all the way down."""
    if isinstance(value, Mapping):
        return {_normalise(k): _normalise(v) for k, v in value.items()}
    if type(value) in (list, tuple):  # optax's transformations are tuples of a type of their own
        return tuple(_normalise(v) for v in value)
    # numpy and JAX scalars, without importing either.
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if getattr(value, "shape", None) == () and kind and kind in "biuf":
        return value.item()
    if type(value) is not float and isinstance(value, float) and math.isfinite(value):
        return float(value)
    return value
