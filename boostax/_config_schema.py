"""The JSON Schema of a config, for editors: every section, key, range, default and meaning."""

from __future__ import annotations

from typing import Any

from boostax._config_catalogue import accepts, catalogue, limits
from boostax._config_groups import group_schema
from boostax._config_sections import NULLABLE, SECTIONS

__all__ = ["json_schema"]

_TYPES: dict[str, Any] = {
    "number": {"type": "number"},
    "integer": {"type": "integer"},
    "boolean": {"type": "boolean"},
    "text": {"type": "string"},
    "dtype": {"type": "string", "examples": ["float32", "bfloat16"]},
    "null": {"type": "null"},
    "schedule": {"$ref": "#/$defs/schedule"},
    "schedules": {"type": "array", "items": {"$ref": "#/$defs/schedule"}},
    "transformation": {
        "anyOf": [
            {"$ref": "#/$defs/transformation"},
            {"type": "array", "items": {"$ref": "#/$defs/transformation"}, "minItems": 1},
        ]
    },
    "mask": {
        "anyOf": [
            {"type": "array", "items": {"type": "string"}, "examples": [["*/kernel"]]},
            {"$ref": "#/$defs/mask"},
        ]
    },
    "steps": {
        "type": "object",
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
        "additionalProperties": {"type": "number", "minimum": 0},
    },
    "list": {"type": "array", "items": {"type": "number"}},
    "objects": {
        "type": "array",
        "items": {"type": "object", "additionalProperties": {"type": "number", "minimum": 0}},
        "minItems": 1,
    },
    "function": None,  # JSON can't write one
}


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a config file."""
    from boostax.config import BoostConfig

    schema = BoostConfig.model_json_schema()
    definitions = schema["$defs"]
    by_title = {model.__name__: name for name, model in SECTIONS.items()}
    for title, definition in definitions.items():
        section = by_title[title]
        for key, field in definition["properties"].items():
            if (section, key) not in NULLABLE:
                _refuse_null(field)
            field.pop("title", None)
    for section in SECTIONS:
        # The default of a section is that of its keys; writing it again only clutters an editor.
        schema["properties"][section].pop("default", None)
    for kind in ("schedule", "transformation", "optimizer"):
        definitions[kind] = _by_name(kind)
    definitions["mask"] = {
        "type": "object",
        "minProperties": 1,
        "additionalProperties": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/mask"}]},
    }
    schema["properties"]["optimizer"] = {
        "$ref": "#/$defs/optimizer",
        "description": "The base optimizer by name, with its arguments: boostax's own, or any of optax "
        "or optax.contrib.",
    }
    for key in ("damping", "learning_rate"):
        field = definitions["Thor"]["properties"][key]
        number = {k: field.pop(k) for k in ("type", "exclusiveMinimum")}
        field["anyOf"] = [number, {"$ref": "#/$defs/schedule"}]
    outer = SECTIONS["adasum"].model_fields["outer"].description
    definitions["AdaSum"]["properties"]["outer"] = {
        "$ref": "#/$defs/optimizer",
        "description": outer,
    }
    # Editors find the schema by this key of the file itself; load_config passes over it.
    schema["properties"]["$schema"] = {"type": "string"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "boostax config",
        "description": "Which techniques boostax uses, and how.",
        "type": "object",
        "additionalProperties": False,
        "properties": schema["properties"],
        "$defs": definitions,
    }


def _refuse_null(field: dict[str, Any]) -> None:
    if "default" in field and field["default"] is None:
        del field["default"]
    options = [option for option in field.get("anyOf", []) if option != {"type": "null"}]
    if len(options) == 1:
        del field["anyOf"]
        field.update({k: v for k, v in options[0].items() if k not in field})
    elif options:
        field["anyOf"] = options


def _by_name(kind: str) -> dict[str, Any]:
    names = list(catalogue(kind))
    rules = []
    for name in names:
        arguments = {
            key: _takes(words, limits(kind, name, key))
            for key, words in accepts(kind, name).items()
        }
        beside = group_schema(arguments) if kind == "optimizer" else {}
        then = {
            "properties": {"name": True, **arguments, **beside},
            "additionalProperties": False,
        }
        rules.append(
            {
                "if": {"required": ["name"], "properties": {"name": {"const": name}}},
                "then": then,
            }
        )
    return {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"enum": names, "description": f"An optax {kind}."}},
        "allOf": rules,
    }


def _takes(words: frozenset[str], limit: dict[str, float]) -> Any:
    options = [
        {**_TYPES[word], **limit} if word in ("number", "integer") else _TYPES[word]
        for word in sorted(words)
        if _TYPES[word] is not None
    ]
    if len(options) == 1:
        return options[0]
    return {"anyOf": options} if options else False
