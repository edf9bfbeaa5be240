"""A first schema for an unknown file, with a remark on everything that was assumed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lightning_recsys.data.files import find_files, stored_bytes
from lightning_recsys.data.guesses.column_guesses import ALMOST, MISSING, DateOrder, Guess, Sample, guess_column
from lightning_recsys.data.guesses.sniffing import is_number, sniff, told_apart
from lightning_recsys.data.guesses.verdicts import Verdict, judge, short_loss
from lightning_recsys.data.queries import written_query
from lightning_recsys.data.tables.columns import GROUPED_BY_DOTS
from lightning_recsys.data.tables.features import Categorical
from lightning_recsys.data.tables.label import LabelRule
from lightning_recsys.data.tables.reading import partitions_of, read_header
from lightning_recsys.data.tables.schema import FEATURES, Schema, feature_name, yaml_on_a_line
from lightning_recsys.data.tables.schema_parts import Label, Split, TableFormat

_LABEL_NAMES = ("label", "click", "clicked", "is_click", "target", "y", "conversion", "converted", "purchase", "rating")
_POSITIVE = ("1", "true", "yes", "y", "click", "clicked", "positive")
_DECIMAL_COMMA = re.compile(r"[+-]?(\d+|\d{1,3}(\.\d{3})+),\d+")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
_MOST_SUGGESTED = 3  # bins and crosses that are named
_CROSS_ROWS = 10  # that a pair of values needs for an id of its own, where a cross is named
_LEFT_OUT = 0.05  # share of a numbering over several columns that may lie between two of them, unseen


def guess_schema(
    path: str | Path | Sequence[str | Path],
    label: str | None = None,
    *,
    dates: DateOrder | None = None,
) -> Schema:
    """Guess what the columns of a table mean, from a sample of 200,000 rows of its first file.

    Numbers become dense features, or categories where they are few; whether whole numbers are ids, the rows decide, and
    names only where these do not. Words become categories, or bags where they are lists. What is constant, different in
    every row, or gives the label away is ignored. ``to_yaml`` of the result writes all of it down with the reasons,
    ready to be corrected.

    Args:
        path: CSV, TSV or the like, JSON lines, Parquet, Arrow or ORC: a file, folder, glob or archive, or a list;
            or a query to a database, as ``sqlite:///clicks.db?query=SELECT ...``.
        label: The column that says what is a click; looked for if absent.
        dates: Whether ``01/02/2026`` is of February or of January; found out if absent and other dates of the sample
            tell.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file is no table, or the files have different columns; there is no column ``label``, or none that
            looks like a label; or dates can be read in two ways.
    """
    patterns = [path] if isinstance(path, str | Path) else path
    first, *others = find_files(patterns)
    sniffed = sniff(first)
    table = sniffed.table
    _check_columns(first, others, table, list(sniffed.columns))
    folders = _guess_partitions([first, *others], list(sniffed.columns))
    columns, marks = _plain_numbers(sniffed.columns)
    there = {token for column in columns.values() for token in set(MISSING).intersection(column)}
    missing = [token for token in MISSING if token in there]
    samples = _samples(columns, sniffed.kinds, dates)
    chosen = _find_label(first, samples, label)
    clicks = samples.pop(chosen)
    rule, reason = _label_rule(clicks)
    labels = _labels(clicks, LabelRule(rule))
    verdict = judge(samples, _guess_columns(samples), labels)
    guesses, drifts = verdict.guesses, verdict.drifts
    fitting = _fitting(samples, guesses)
    strays = [word for name, guess in guesses.items() if guess.key == "dense" for word in samples[name].strays]
    guesses = _with_one_time({**guesses, **folders})
    fitting |= {chosen: clicks.share(~np.isnan(LabelRule(rule).apply(pa.array(clicks.counts))))}

    features = _features(guesses, chosen)
    if not any(features.values()):
        raise ValueError(f"{first}: {_no_feature(guesses)}")
    time = next((column for column, guess in guesses.items() if guess.key == "time"), None)
    drift = None if time is None else drifts.get(time)
    return Schema(
        files={"train": tuple(str(written_query(x) or Path(x).expanduser().absolute()) for x in patterns)},
        table=replace(table, **marks, dates=clicks.dates, missing=tuple(dict.fromkeys(["", *missing, *strays]))),
        label=Label(column=chosen, rule=rule),
        time=time,
        ignore=tuple(column for column, guess in guesses.items() if guess.key == "ignore"),
        split=Split(by="share" if drift is None else "time"),
        num_rows=round(sniffed.num_rows * sum(map(stored_bytes, [first, *others])) / max(stored_bytes(first), 1)),
        present={name: len(sample.values) / max(len(columns[name]), 1) for name, sample in samples.items()}
        | {chosen: len(clicks.values) / max(len(columns[chosen]), 1)}
        | dict.fromkeys(folders, 1.0),
        fitting=fitting,
        comments={column: guess.reason for column, guess in guesses.items()}
        | {name: guesses[x.column or name].reason for found in features.values() for name, x in found.items()}
        | {f"schema.{key}": remark for key, remark in _remarks(first, has_time=time is not None, drift=drift).items()}
        | {"schema.label": reason}
        | _suggestions(verdict, features, list(guesses)),
        dense=features["dense"],
        vectors=features["vectors"],
        categorical=features["categorical"],
        multi_valued=features["multi_valued"],
    )


def _samples(
    columns: Mapping[str, Sequence[str | None]], kinds: Mapping[str, pa.DataType], dates: DateOrder | None
) -> dict[str, Sample]:
    """The columns; how dates are read is found out if it is not given.

    Raises:
        ValueError: dates can be read in two ways.
    """
    samples = {name: Sample(name, column, kinds.get(name)) for name, column in columns.items()}
    dates = dates or _date_order(list(samples.values()))
    return {name: replace(sample, dates=dates) for name, sample in samples.items()} if dates else samples


def _guess_partitions(files: Sequence[Path], names: Sequence[str]) -> dict[str, Guess]:
    """Where the columns belong that only the names of the folders around the files say.

    Raises:
        ValueError: some files are in such folders and others are not.
    """
    said = {path: partitions_of(path) for path in files}
    guesses = {}
    for name in dict.fromkeys(name for found in said.values() for name in found):
        if without := [path for path in files if name not in said[path]]:
            there = next(path for path in files if name in said[path])
            raise ValueError(
                f"{there} is in a folder {name}={said[there][name]}, and {without[0]} is in none of that name. Move it "
                "into one, or name the files that are in such folders."
            )
        values = sorted({value or "" for found in said.values() for value in [found[name]]})
        sample = Sample(name, values)
        if name in names:
            continue
        if len(values) == 1:
            guesses[name] = Guess("ignore", None, "the folder around all files says the same")
        elif not sample.is_numeric and sample.times(None) >= ALMOST:
            guesses[name] = Guess("time", None, f"the {len(values)} folders around the files say the time of the rows")
        else:
            guesses[name] = Guess("categorical", Categorical(), f"folders with {len(values)} values around the files")
    return guesses


def _labels(sample: Sample, rule: LabelRule) -> NDArray[np.float32]:
    """0 or 1 for each row of the sample, NaN where it has no label or the rule does not fit it."""
    coded = pa.array(sample.column, pa.string()).dictionary_encode()
    words = coded.dictionary
    of_words = np.where(np.asarray(pc.is_in(words, value_set=pa.array(MISSING))), np.nan, rule.apply(words))
    labels: NDArray[np.float32] = np.append(of_words, np.nan)[coded.indices.fill_null(-1).to_numpy()]
    return labels


def _guess_columns(samples: Mapping[str, Sample]) -> dict[str, Guess]:
    """Where each column belongs by names and values, its own and those of the others."""
    guesses = {name: guess_column(sample) for name, sample in samples.items()}
    reason = "whole numbers of one numbering over several columns: taken for ids"
    return guesses | {
        name: Guess("categorical", Categorical(), reason)
        for name in _numbered_together(samples)
        if guesses[name].key != "time"
    }


def _with_one_time(guesses: Mapping[str, Guess]) -> dict[str, Guess]:
    """Guesses with one time at most."""
    times = [name for name, guess in guesses.items() if guess.key == "time"]
    return {**guesses, **{name: Guess("ignore", None, "a second time") for name in times[1:]}}


def _no_feature(guesses: Mapping[str, Guess]) -> str:
    """The reasons why no column of a table is a feature."""
    left_out = [f"{column}: {guess.reason}." for column, guess in guesses.items() if guess.key == "ignore"]
    return " ".join(["no column can be a feature.", *left_out, "Write a schema that names one."])


def _features(guesses: Mapping[str, Guess], label: str) -> dict[str, dict[str, Any]]:
    """The features of each kind, each by a name of its own: its column's, where no other feature has that already.

    The ids of a column that is a number as well have ``_id`` behind the name. No feature can be called ``label``, and
    dots in names become underscores.
    """
    wanted = [(guess.key, column, column, guess.options) for column, guess in guesses.items() if guess.key in FEATURES]
    wanted += [("categorical", f"{column}_id", column, guess.ids) for column, guess in guesses.items() if guess.ids]
    own = [column for _, _, column, _ in wanted]
    others = list(dict.fromkeys(["label", label, *(column for column in guesses if column not in own)]))
    named = told_apart([*others, *(feature_name(name) for _, name, _, _ in wanted)])[len(others) :]
    features: dict[str, dict[str, Any]] = {key: {} for key in FEATURES}
    for (key, name, column, options), free in zip(wanted, named, strict=True):
        chosen = name if free == feature_name(name) else free
        features[key][chosen] = options if chosen == column else replace(options, column=column)
    return features


def _suggestions(verdict: Verdict, features: Mapping[str, Mapping[str, Any]], columns: Sequence[str]) -> dict[str, str]:
    """Commented lines of YAML for the best bins and crosses, to be found at the end of the categorical features."""
    called = {feature.column or name: name for name, feature in features["categorical"].items()}
    names = [*(name for found in features.values() for name in found), *columns]
    taken = list(dict.fromkeys(map(feature_name, names)))
    found: list[tuple[str, dict[str, Any], str]] = []
    for bins in verdict.bins[:_MOST_SUGGESTED]:
        remark = (
            f"held-out log loss in bins {short_loss(bins.in_bins)}, on a straight line {short_loss(bins.on_a_line)}"
        )
        found.append((f"{bins.column}_bins", {"column": bins.column, "edges": list(bins.edges)}, remark))
    for cross in verdict.crosses[:_MOST_SUGGESTED]:
        parts = [called[column] for column in cross.columns]
        remark = f"held-out log loss with it {short_loss(cross.together)}, of all without {short_loss(cross.apart)}"
        found.append(("_".join(parts), {"cross": parts, "min_count": _CROSS_ROWS}, remark))
    names = told_apart([*taken, *(feature_name(name) for name, _, _ in found)])[len(taken) :]
    lines = [
        f"{yaml_on_a_line({name: options})[1:-1]}  # {remark}"
        for name, (_, options, remark) in zip(names, found, strict=True)
    ]
    return {"schema.categorical": "\n".join(lines)} if lines else {}


def _numbered_together(samples: Mapping[str, Sample]) -> list[str]:
    """Columns of whole numbers that share one numbering, three at least, as files of libFM and FuxiCTR have it.

    Each column then has a range of its own, and the ranges follow one another with hardly a number left out. Counts,
    ages and years have ranges that overlap or lie far apart.
    """
    ranges = []
    for name, sample in samples.items():
        if sample.is_whole and len(sample.counts) > 1 and not sample.never_repeats:
            ranges.append((int(sample.sorted_numbers[0]), int(sample.sorted_numbers[-1]), name))
    chains: list[list[tuple[int, int, str]]] = [[]]  # the longest that ends with each column
    for first, last, name in sorted(ranges):
        before = [x for x in chains[1:] if 0 < first - x[-1][1] <= 1 + _LEFT_OUT * (last - x[0][0])]
        chains.append([*max(before, key=len, default=[]), (first, last, name)])
    longest = max(chains, key=len)
    used = sum(len(samples[name].counts) for _, _, name in longest)
    if len(longest) < 3 or 2 * used < longest[-1][1] - longest[0][0] + 1:
        return []
    return [name for _, _, name in longest]


def _fitting(samples: Mapping[str, Sample], guesses: Mapping[str, Guess]) -> dict[str, float]:
    """Share of the values that are what their column was taken for, where that can be less than all."""
    fitting = {}
    for name, guess in guesses.items():
        sample = samples[name]
        if guess.key == "dense" and sample.strays:
            fitting[name] = sample.share(~np.isnan(sample.numbers))
        elif guess.key == "time" and not sample.is_numeric:
            fitting[name] = sample.times(sample.dates)
    return fitting


def _remarks(first: Path, *, has_time: bool, drift: str | None) -> dict[str, str]:
    """Remarks on the keys of a guessed schema that are not columns."""
    split = "a tenth of the rows each for validation and test, drawn at random"
    if drift is not None:
        split = f"{drift}. So the latest tenth is for test, and the one before for validation"
    elif has_time:
        split += "; {by: time} holds back the latest instead"
    return {
        "": f"Guessed from a sample of {first.name}. Check it: a remark says why. Every key: docs/schema.md",
        "column_names": "the first line is no header: rename as you like",
        "skip_lines": "lines at the top that are left out: a title, or a header that does not fit the rows",
        "comment": "lines at the top that start like this are left out",
        "encoding": "it is not UTF-8",
        "missing": "what stands for a missing value",
        "decimal": "before the fraction of a number",
        "thousands": "between the thousands of a number",
        "dates": "how 01/02/2026 is read",
        "split": split,
    }


def _check_columns(first: Path, others: Sequence[Path], table: TableFormat, names: list[str]) -> None:
    """See that files have the same columns.

    Raises:
        ValueError: the files have other columns than each other.
    """
    left_out = read_header(first, table).left_out
    for other in others:
        header = read_header(other, table)
        if table.column_names and table.skip_lines and header.left_out[-1:] != left_out[-1:]:
            there = header.left_out[-1] if header.left_out else ""
            raise ValueError(
                f"{first} has the header {left_out[-1]!r:.80}, but {other} has {there!r:.80} in its place. Name files "
                "that are written in one way."
            )
        if not table.column_names and set(found := header.names) != set(names):
            fullest = other if len(found) > len(names) else first
            raise ValueError(
                f"{first} has the columns {', '.join(names)}, but {other} has {', '.join(found)}. These are files of "
                f"different tables: name those of one, such as {fullest}."
            )


def _date_order(samples: list[Sample]) -> DateOrder | None:
    """How dates with slashes are read, by all of them in the sample; ``None`` where there are none.

    Raises:
        ValueError: both ways make sense.
    """
    day = month = 0.0
    found = []
    for sample in samples:
        if not sample.is_numeric and sample.times(None) < ALMOST:
            shares = sample.times("day_first"), sample.times("month_first")
            if max(shares) >= ALMOST:
                found.append(sample)
                day, month = day + shares[0], month + shares[1]
    if found and day == month:
        raise ValueError(
            f"column {found[0].name!r}: does {found[0].values[0]!r} start with the day or with the month? The sample "
            "has no date that tells. Say so: dates=day_first or dates=month_first."
        )
    return ("day_first" if day > month else "month_first") if found else None


def _plain_numbers(
    columns: dict[str, list[str | None]],
) -> tuple[dict[str, list[str | None]], dict[str, Any]]:
    """Columns with their numbers written with a dot, and how the file writes them."""
    marks: dict[str, Any] = {}
    counts = {name: Counter(column) for name, column in columns.items()}
    for pattern, found in ((_DECIMAL_COMMA, {"decimal": ","}), (_THOUSANDS, {"thousands": ","})):
        chosen = [name for name in columns if _has_marks(counts[name], pattern)]
        others = (value for name in columns if name not in chosen for value in counts[name] if value is not None)
        if not chosen or marks or ("decimal" in found and any(re.fullmatch(GROUPED_BY_DOTS, x) for x in others)):
            continue  # where the marks are not those of all columns, numbers with a comma are words
        marks = dict(found)
        if "decimal" in marks and any("." in (value or "") for name in chosen for value in columns[name]):
            marks["thousands"] = "."
        drop, point = marks.get("thousands", ""), marks.get("decimal", ".")
        columns = columns | {
            name: [
                None if x is None else (x.replace(drop, "") if drop else x).replace(point, ".") for x in columns[name]
            ]
            for name in chosen
        }
    return columns, marks


def _has_marks(counts: Counter[str | None], pattern: re.Pattern[str]) -> bool:
    """Whether values are numbers, and so many of them written so that it is no chance."""
    values = {value: count for value, count in counts.items() if value is not None and value not in MISSING}
    marked = {value: count for value, count in values.items() if pattern.fullmatch(value)}
    few = 10 * sum(marked.values()) < sum(values.values())
    return bool(marked) and not few and all(value in marked or is_number(value) for value in values)


def _find_label(path: Path, samples: dict[str, Sample], label: str | None) -> str:
    if label is not None:
        if label not in samples:
            raise ValueError(f"{path} has no column {label!r} to be the label. It has {', '.join(samples)}.")
        return label
    named = sorted((_LABEL_NAMES.index(name.lower()), name) for name in samples if name.lower() in _LABEL_NAMES)
    binary = [name for name, sample in samples.items() if len(sample.counts) == 2]
    if named:
        return named[0][1]
    if len(binary) == 1:
        return binary[0]
    candidates = f" {', '.join(binary)} have two values each." if binary else ""
    raise ValueError(f"{path}: which column is the label? Name it.{candidates} Columns: {', '.join(samples)}.")


def _label_rule(sample: Sample) -> tuple[str | None, str]:
    """The rule that makes a row positive, and the reason for it."""
    counts, total = sample.counts, len(sample.values)
    words = {word.lower() for word in counts}
    if (sample.is_numeric and {float(word) for word in counts} <= {0.0, 1.0}) or words <= {"true", "false"}:
        share = sum(count for word, count in counts.items() if word.lower() in ("true", "1", "1.0")) / total
        return None, f"0 and 1 already; {share:.1%} positive in the sample"
    (_, first), (_, second), *stray = [*counts.most_common(), ("", 0)]
    if stray and ALMOST * total <= first + second < total:
        values = ", ".join(f"{value!r} ({count} rows)" for value, count in stray[:5] if count)
        raise ValueError(
            f"the label {sample.name!r} has two values in almost all rows, and also {values}. What do they mean? "
            "List them under missing and leave such rows out (on_bad_row=skip), or write the schema's label with a "
            f"rule such as {{column: {sample.name}, rule: '== {counts.most_common(1)[0][0]}'}}."
        )
    if sample.is_numeric:
        # The threshold that cuts the sample most evenly.
        shares = {
            threshold: sum(count for word, count in counts.items() if float(word) >= float(threshold)) / total
            for threshold in counts
        }
        threshold = min(shares, key=lambda word: abs(shares[word] - 0.5))
        return f">= {threshold}", f"a number: cut where it is most even, {shares[threshold]:.1%} positive"
    positive = next((word for word in counts if word.lower() in _POSITIVE), min(counts, key=lambda word: counts[word]))
    return f'== "{positive}"', f"a word: taken for the positive one, {counts[positive] / total:.1%} of the sample"
