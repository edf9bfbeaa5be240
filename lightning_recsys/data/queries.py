"""Tables that a query to a database file makes: ``sqlite:///clicks.db?query=SELECT ...``.

Inside, such a table has a path as files have: the database's, and behind it the query without slashes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, cast
from urllib.parse import quote, unquote

Database: TypeAlias = Literal["sqlite", "duckdb"]

_WRITTEN = re.compile(r"(sqlite|duckdb)://(.*)", re.DOTALL)
# Before it may stand a folder: that in which such a path was made absolute.
_PATH = re.compile(r"(?:.*/)?(sqlite|duckdb):(/.*)\?query=([^/?]*)")


class Query(NamedTuple):
    """A query, and the file that it is put to.

    Attributes:
        database: Which program has written the file.
        file: The database's file, its path absolute.
        sql: One statement that gives rows, in the database's own words.
    """

    database: Database
    file: Path
    sql: str

    @property
    def path(self) -> Path:
        """The table's name where others have that of a file."""
        return Path(f"{self.database}:{self.file}?query={quote(self.sql, safe='')}")

    def __str__(self) -> str:
        return f"{self.database}:///{self.file}?query={self.sql}"


def written_query(text: object, *, root: Path = Path()) -> Query | None:
    """The query that a user has written where a path may stand; ``None`` where it is a path.

    Args:
        text: As SQLAlchemy writes it: three slashes before a relative path, four before an absolute one. The query is
            all that follows ``?query=``, as it is.
        root: The folder in which relative paths start.

    Raises:
        ValueError: it has no file or no query.

    >>> written_query("sqlite:////data/clicks.db?query=SELECT * FROM clicks").file.as_posix()
    '/data/clicks.db'
    """
    if not isinstance(text, str) or (found := _WRITTEN.fullmatch(text)) is None:
        return None
    file, has_query, sql = found[2].partition("?query=")
    if not file.startswith("/") or not file.strip("/") or not has_query or not sql.strip():
        raise ValueError(
            f"a query to a database is written {found[1]}:///clicks.db?query=..., with four slashes before an absolute "
            f"path, got {text!r}."
        )
    return Query(cast(Database, found[1]), (root / Path(file[1:]).expanduser()).absolute(), sql)


def query_of(path: Path) -> Query | None:
    """The query of a path that :attr:`Query.path` has made, absolute or not; ``None`` of the path of a file."""
    found = _PATH.fullmatch(str(path))
    return None if found is None else Query(cast(Database, found[1]), Path(found[2]), unquote(found[3]))
