"""TOML tables into dataclasses, with the file and line of every mistake."""

import dataclasses
import re
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from fadefed.errors import ConfigError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class TomlFile:
    """A TOML file, its parsed tables, and enough of its text to name a line."""

    path: str
    text: str
    tables: dict[str, Any]

    @classmethod
    def read(cls, path: str | Path) -> "TomlFile":
        """Read and parse `path`. Raises ConfigError that names the file and, for bad TOML, the line."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}). Check the file's name.") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: is not UTF-8 text. Save it as UTF-8.") from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, path: str = "<text>") -> "TomlFile":
        try:
            return cls(path, text, tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: is not valid TOML: {error}. Mend that line.") from error

    def where(self, table: str, key: str | None = None) -> str:
        """`path, line N`: the line of `key` in `[table]`, or of the table's head."""
        current = ""
        head = None
        for number, line in enumerate(self.text.splitlines(), start=1):
            if match := re.match(r"\s*\[+\s*([\w.\-]+)\s*\]+", line):
                current = match.group(1)
                if current == table:
                    head = number
            elif key and current == table and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
                return f"{self.path}, line {number}"
        return f"{self.path}, line {head}" if head else self.path

    def table(self, name: str, cls: type[T], *, required: bool = False) -> T:
        """Table `[name]` as an instance of the dataclass `cls`.

        Raises ConfigError for an unknown key, a wrong type or a missing required key, naming the line.
        """
        if name not in self.tables:
            if required:
                raise ConfigError(
                    f"{self.path}: the table [{name}] is missing. Add it; docs/federation.md lists its keys."
                )
            return fill(cls, {}, lambda key: f"{self.path}: [{name}]")
        table = self.tables[name]
        if not isinstance(table, dict):
            raise ConfigError(f"{self.path}: '{name}' must be a table; write [{name}] on a line of its own.")
        return fill(cls, table, lambda key: f"{self.where(name, key)}: [{name}]")

    def only(self, *names: str) -> None:
        """Raises ConfigError when the file has a table (or top-level key) other than `names`."""
        for name in self.tables:
            if name not in names:
                raise ConfigError(
                    f"{self.where(name)}: unknown table [{name}]. Known: {', '.join(f'[{n}]' for n in names)}."
                )


def fill(cls: type[T], table: dict[str, Any], where: typing.Callable[[str | None], str]) -> T:
    """A dataclass from a mapping; unknown keys and wrong types raise ConfigError starting with `where(key)`."""
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in table:
        if key not in fields:
            raise ConfigError(f"{where(key)} has no key '{key}'. Known keys: {', '.join(sorted(fields))}.")
    values = {}
    for name, field in fields.items():
        if name in table:
            values[name] = _convert(table[name], hints[name], f"{where(name)} {name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where(None)} lacks the key '{name}'. Add it.")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where(None)}: {error}") from error


def _convert(value: Any, hint: Any, where: str) -> Any:
    """`value` if it fits the type `hint` (an int is welcome where a float is asked for)."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        for option in options:
            try:
                return _convert(value, option, where)
            except ConfigError:
                continue
    elif origin is typing.Literal:
        if value in typing.get_args(hint):
            return value
    elif origin in (list, tuple):
        inner = typing.get_args(hint)[0]
        if isinstance(value, list):
            items = [_convert(item, inner, where) for item in value]
            return items if origin is list else tuple(items)
    elif origin is dict or hint is dict:
        if isinstance(value, dict):
            return value
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif hint is Any or isinstance(value, hint):
        return value
    raise ConfigError(f"{where} = {value!r} is not {_name(hint)}. Give {_name(hint)}.")


def _name(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_name(h) for h in typing.get_args(hint) if h is not type(None))
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(option) for option in typing.get_args(hint))
    if origin in (list, tuple):
        return f"a list, each item {_name(typing.get_args(hint)[0])}"
    return {int: "a whole number", float: "a number", str: "a string in quotes", bool: "true or false"}.get(
        hint, getattr(hint, "__name__", str(hint))
    )
