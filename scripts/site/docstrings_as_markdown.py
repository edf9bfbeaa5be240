"""The docstrings' markup (roles, ``.. math::``, doctests) as Markdown, which is what the site is written in."""

from __future__ import annotations

import re
from typing import Any

import griffe


def as_markdown(text: str) -> str:
    """A docstring as Markdown: formulas between dollars, doctests in fences, roles as code."""
    lines, done, i = text.splitlines(), [], 0
    while i < len(lines):
        margin = " " * (len(lines[i]) - len(lines[i].lstrip()))
        stripped = lines[i].strip()
        if stripped.startswith(">>>"):
            end = next((k for k in range(i, len(lines)) if not lines[k].strip()), len(lines))
            done += [f"{margin}```pycon", *lines[i:end], f"{margin}```"]
            i = end
        elif stripped.startswith(".. math::"):
            end = i + 1
            while end < len(lines) and (not lines[end].strip() or lines[end].startswith(f"{margin}   ")):
                end += 1
            formula = " ".join([stripped.removeprefix(".. math::").strip(), *(x.strip() for x in lines[i + 1 : end])])
            done += ["", f"{margin}$$", f"{margin}{formula.strip()}", f"{margin}$$", ""]
            i = end
        else:
            done.append(lines[i])
            i += 1
    return "\n".join(x if x.lstrip().startswith((">>>", "...")) else _roles(x) for x in done)


def _roles(line: str) -> str:
    line = re.sub(r":math:`([^`]+)`", r"$\1$", line)
    line = re.sub(r":\w+:`~[\w.]*?(\w+)`", r"`\1`", line)
    line = re.sub(r":\w+:`([^`]+)`", r"`\1`", line)
    return re.sub(r"::$", ":", line) if not line.lstrip().startswith(":::") else line


class DocstringsAsMarkdown(griffe.Extension):
    """Changes each docstring as it is collected, before its sections are parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
