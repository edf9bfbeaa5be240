"""What to say after Hydra ended the program: the wrong name of an override and the right ones, or a folder's."""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException
from omegaconf import AnyNode, DictConfig, OmegaConf
from recipe_tools import command  # noqa: F401 - the help texts call it

from lightning_recsys.cli import recipes_folder

CONFIG_DIR = recipes_folder().resolve().parent / "conf"


def choices(config_name: str) -> str:
    """The groups of a primary config, one per line with their leaves: for its help text."""
    groups = groups_of(config_name, CONFIG_DIR)
    leaves = {group: sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml")) for group in groups}
    return "\n".join(f"  {group + ':':<15} {', '.join(leaves[group])}" for group in groups)


def groups_of(config_name: str, config_dir: Path) -> list[str]:
    """The groups that a primary config names in its defaults."""
    defaults = OmegaConf.load(config_dir / f"{config_name}.yaml").get("defaults", [])
    groups = [str(group) for entry in defaults if isinstance(entry, DictConfig) for group in entry]
    return [group for group in groups if "hydra" not in group]


OmegaConf.register_new_resolver("choices", choices, replace=True)


@contextmanager
def explained_overrides(config_name: str, *, config_dir: Path = CONFIG_DIR) -> Iterator[None]:
    """Around a Hydra main: where Hydra ends the program over an override, name the allowed ones after its message.

    Where it cannot make the run's folder, say so, and how another one is chosen.
    """
    try:
        yield
    except SystemExit as stop:
        if stop.code == 1:
            sys.stderr.writelines(
                f"\n{line}\n" for line in explain(sys.argv[1:], config_name=config_name, config_dir=config_dir)
            )
            _tell_of_folder(stop.__context__)
        raise
    except OSError as error:  # of a sweep's folder, which Hydra makes where it ends no program
        if not _tell_of_folder(error):
            raise
        sys.exit(1)


def _tell_of_folder(error: BaseException | None) -> bool:
    """Say so, where Hydra failed to make the folder of a run or a sweep."""
    if not isinstance(error, OSError):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not any(
        after.f_code.co_name == "mkdir" and frame.f_globals["__name__"].startswith("hydra.")
        for frame, after in pairwise(frames)
    ):
        return False
    sys.stderr.write(
        f"\n{error.filename} cannot be made: {error.strerror}. A run writes to a folder of its own, in logs/ where it"
        " was started. Choose another place: paths.logs=FOLDER, or hydra.run.dir=FOLDER for this run alone.\n"
    )
    return True


def explain(arguments: Sequence[str], *, config_name: str, config_dir: Path = CONFIG_DIR) -> list[str]:
    """One message for each override among ``arguments`` that the config does not know; empty if all are known."""
    parser = OverridesParser.create()
    overrides: list[Override] = []
    for argument in arguments:
        if ("=" in argument or argument.startswith("~")) and not argument.startswith("-"):
            try:
                overrides.append(parser.parse_override(argument))
            except HydraException:  # not in Hydra's grammar: its own message points at the character
                continue
    own_dir, config_name = _own_configurations(arguments, config_name)
    with _search_path(config_dir, own_dir):
        groups = GlobalHydra.instance().config_loader()
        named = config_name if (config_dir / f"{config_name}.yaml").is_file() else "train"
        needed = _needed_groups(named, config_dir)
        messages, chosen, values = [], [], []
        for override in overrides:
            options = groups.get_group_options(override.key_or_group)
            if not options:
                values.append(override)
            elif wrong := _wrong_choice(override, options, is_needed=override.key_or_group in needed):
                messages.append(wrong)
            elif choices := _choices(override):
                first = ",".join(choices[0])
                value = f"[{first}]" if len(choices[0]) > 1 else first
                chosen.append(f"{override.get_key_element()}={value}")
        try:
            config = compose(config_name, overrides=chosen, return_hydra_config=True)
        except HydraException:  # a group that this config does not choose from: Hydra's own message says so
            return messages
        names = {*map(str, config), *groups_of(named, config_dir)} - {"hydra"}
    messages += [message for override in values if (message := _unknown_key(config, override, names))]
    return messages


def _own_configurations(arguments: Sequence[str], config_name: str) -> tuple[str | None, str]:
    """What ``--config-dir`` and ``--config-name`` say on a command line."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-name", "-cn", default=config_name)
    given, _ = parser.parse_known_args(arguments)
    return given.config_dir, given.config_name


@contextmanager
def _search_path(config_dir: Path, own_dir: str | None) -> Iterator[None]:
    """Hydra with our folder of configurations and somebody's own, in the order of the command line."""
    with initialize_config_dir(str(config_dir), version_base="1.3"):
        if own_dir is not None:
            path = create_config_search_path(str(config_dir))
            path.prepend("command-line", f"file://{Path(own_dir).absolute()}", anchor="schema")
            GlobalHydra.instance().clear()
            Hydra.create_main_hydra2("app", path)
        yield


def _choices(override: Override) -> list[list[str]]:
    """The leaves of each choice: one of ``group=leaf``, several of ``group=[leaf,leaf]``, none of ``group=null``."""
    written = [choice for choice in _written(override) if choice is not None]
    return [[str(leaf) for leaf in (choice if isinstance(choice, list) else [choice])] for choice in written]


def _written(override: Override) -> list[Any]:
    """The choices as they are written; a sweep such as ``group=leaf,leaf`` has several."""
    value = override.value()
    if isinstance(value, ChoiceSweep):
        return value.list
    return [*override.sweep_string_iterator()] if override.is_sweep_override() else [value]


def _needed_groups(config_name: str, config_dir: Path) -> set[str]:
    """The groups without which a primary config is none: it chooses a file of each, and has nothing in their places."""
    content = OmegaConf.load(config_dir / f"{config_name}.yaml")
    entries = [entry for entry in content.get("defaults", []) if isinstance(entry, DictConfig)]
    return {str(group) for entry in entries for group, leaf in entry.items() if leaf is not None} - set(content)


def _wrong_choice(override: Override, options: Sequence[str], *, is_needed: bool) -> str | None:
    """The complaint about the choice of a group, if it is wrong."""
    group, choices = override.key_or_group, _choices(override)
    if override.is_delete():
        allowed = ", ".join(sorted(options))
        return f"~{group}: nothing runs without one. Choose another.\nAllowed: {allowed}" if is_needed else None
    if None in _written(override):
        return f"{group}=null: a group takes names, and [] for none of them.\nAllowed: {', '.join(sorted(options))}, []"
    unknown = [leaf for choice in choices for leaf in choice if leaf not in options]
    if unknown:
        return _message(f"{group}={unknown[0]}", unknown[0], options)
    if is_needed and (several := next((choice for choice in choices if len(choice) > 1), None)):
        names = ",".join(several)
        return (
            f"{group}=[{names}]: a list makes one configuration of several files."
            f" Try one after the other: -m {group}={names}"
        )
    return None


def _unknown_key(config: DictConfig, override: Override, top_names: set[str]) -> str | None:
    if override.is_add() or override.is_force_add() or override.is_delete():
        return None
    node: Any = config
    path: list[str] = []
    for key in override.key_or_group.split("."):
        where = ".".join(path)
        if isinstance(node, AnyNode) and node._is_interpolation():
            source, keys = str(node).strip("${}"), override.key_or_group.removeprefix(f"{where}.")
            return f"{override.key_or_group}: {where} is taken from {source}. Write {source}.{keys}=... instead."
        if not isinstance(node, DictConfig):
            return f"{override.key_or_group}: {where} is one value ({node}), it has no keys. Write {where}=... instead."
        names = {str(name) for name in node}  # `in` would not count values that are still missing
        if key not in names:
            allowed = {name for name in names if not name.startswith("_")} if where else top_names
            return _message(override.key_or_group, key, allowed, where)
        path.append(key)
        node = node._get_node(key)  # the node itself: an unresolved value is no error here
        if isinstance(node, DictConfig) and (node._is_none() or node._is_interpolation()):
            return None
    return None


def _message(override: str, name: str, allowed: Iterable[str], where: str = "") -> str:
    allowed = sorted(allowed)
    prefix = f"{where}." if where else ""
    near = get_close_matches(name, allowed, n=3)
    hint = f" Did you mean {' or '.join(prefix + match for match in near)}?" if near else ""
    return f"{override}: no such choice.{hint}\nAllowed{f' in {where}' if where else ''}: {', '.join(allowed)}"


def schema_changes(arguments: Sequence[str]) -> list[str]:
    """The command line with ``+data.schema.key=value`` written so that Hydra takes it beside ``data.schema=FILE``.

    >>> schema_changes(["data.schema=a.yaml", "+data.schema.split.by=time"])
    ['data.schema=a.yaml', '++data.schema_changes.split.by=time']
    >>> schema_changes(["+data.schema.split.by=time"])  # of a schema that stands in the configuration
    ['+data.schema.split.by=time']
    """
    if not any(argument.startswith("data.schema=") for argument in arguments):
        return list(arguments)
    return [re.sub(r"^\+{0,2}data\.schema\.", "++data.schema_changes.", argument) for argument in arguments]


def find_value(arguments: Sequence[str], key: str) -> str | None:
    """The value that the command line gives to ``key``, unquoted; None where it gives none."""
    parser = OverridesParser.create()
    for argument in arguments:
        if argument.startswith(f"{key}="):
            return str(parser.parse_override(argument).value())
    return None
