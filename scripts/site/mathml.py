"""Formulas as MathML, which browsers show by themselves: a page needs no script and no other host for them."""

from __future__ import annotations

from typing import Any
from xml.etree.ElementTree import Element

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor


class _Formulas(Treeprocessor):
    """What ``pymdownx.arithmatex`` has found, ``\\(...\\)`` in a line and ``\\[...\\]`` on its own."""

    def run(self, root: Element) -> None:
        for element in root.iter():
            if element.get("class") == "arithmatex" and element.text:
                text = element.text.strip()
                display = "block" if text.startswith("\\[") else "inline"
                element.text = self.md.htmlStash.store(convert(text[2:-2].strip(), display=display))


class MathML(Extension):
    """``mathml`` among the Markdown extensions, beside ``pymdownx.arithmatex`` with ``generic``."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register the formulas' processor, behind the one for inline patterns."""
        md.treeprocessors.register(_Formulas(md), "mathml", 1)


def makeExtension(**options: Any) -> MathML:
    """Called by Markdown, which knows an extension by its module."""
    return MathML(**options)
