"""How raw configuration is put together: environment over file, and errors that name the key."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import msgspec

from kvstore.core.errors import ConfigError

ENVIRONMENT_PREFIX = "KVSTORE_"
_AT = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_TYPE = re.compile(r"Expected `(?P<type>[^`]*)`(?P<bound> [<>]=? [\d.]+)?(?:, got `(?P<got>\w+)`)?")
_TYPE_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text in quotes",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}
_BOUND_WORDS = {">=": "at least", ">": "above", "<=": "at most", "<": "below"}
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of `over` laid over those of `base`, key by key."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        result[key] = merge(below, value) if both else value  # type: ignore[arg-type]
    return result


def apply_environment(
    raw: Mapping[str, Any],
    environ: Mapping[str, str],
    kind: type,
    convert: Callable[..., Any],
) -> dict[str, Any]:
    """`raw` with variables such as KVSTORE_TIERS__HOST__SIZE laid over it.

    A variable counts if it holds a double underscore or names a top-level key, so that
    KVSTORE_SOCKET and the like are left alone. Lists are written as TOML or JSON.
    """
    result = dict(raw)
    for variable, text in sorted(environ.items()):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        keys = variable.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        if len(keys) == 1 and keys[0] not in get_type_hints(kind):
            continue
        try:
            leaf = _leaf_type(kind, keys)
            value = convert(_parse_text(text), leaf, strict=False)
        except ConfigError as error:
            raise ConfigError(f"environment variable {variable}: {error}") from None
        for key in reversed(keys):
            value = {key: value}
        result = merge(result, msgspec.to_builtins(value, enc_hook=str))
    return result


def _leaf_type(kind: type, keys: list[str]) -> Any:
    here: Any = kind
    for depth, key in enumerate(keys):
        fields = get_type_hints(here, include_extras=True) if _is_section(here) else {}
        if key not in fields:
            raise ConfigError(_unknown_key(".".join(keys[: depth + 1]), list(fields)))
        here = fields[key]
    return here


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _parse_text(text: str) -> Any:
    if text.lstrip().startswith(("[", "{")):
        for parse in (json.loads, lambda t: tomllib.loads(f"value = {t}")["value"]):
            try:
                return parse(text)
            except ValueError:
                continue
    return text


def explain(message: str, root: type) -> str:
    """One sentence for a msgspec error: the key first, then what is wrong and the fix."""
    match = _AT.fullmatch(message)
    assert match is not None
    what, path = match["what"], match["path"] or ""
    unknown = _UNKNOWN.fullmatch(what)
    if unknown:
        key = f"{path}.{unknown[1]}" if path else unknown[1]
        return _unknown_key(key, _fields_at(root, path))
    allowed = _choices_at(root, path)
    if allowed:
        what = f"the value is not known; pass one of {', '.join(allowed)}"
    elif typed := _TYPE.fullmatch(what):
        what = _type_sentence(typed)
    return f"{path}: {what}" if path else what


def _type_sentence(match: re.Match[str]) -> str:
    wanted = _TYPE_WORDS.get(match["type"].split(" | ")[0], match["type"])
    if match["bound"]:
        sign, number = match["bound"].split()
        return f"the value is out of range; pass {wanted} {_BOUND_WORDS[sign]} {number}"
    got = _TYPE_WORDS.get(match["got"] or "", "something else")
    return f"the value is {got}; pass {wanted}"


def _unknown_key(key: str, known: list[str]) -> str:
    name = key.rpartition(".")[2]
    near = difflib.get_close_matches(name, known, n=1)
    fix = f"did you mean {near[0]}" if near else f"remove it or use one of {', '.join(known)}"
    return f"{key} is no setting; {fix}" if known else f"{key} is no setting; remove it"


def _type_at(root: type, path: str) -> Any:
    here: Any = root
    for step in filter(None, re.split(r"[.\[]", path)):
        if step.endswith("]"):
            here = here.__args__[0]
        else:
            here = get_type_hints(here, include_extras=True)[step]
    return here


def _fields_at(root: type, path: str) -> list[str]:
    here = _type_at(root, path)
    return list(get_type_hints(here)) if _is_section(here) else []


def _choices_at(root: type, path: str) -> list[str]:
    """The values of a Literal setting; empty for others."""
    here = _type_at(root, path) if path else root
    values = getattr(here, "__args__", ())
    return [v for v in values if isinstance(v, str)]
