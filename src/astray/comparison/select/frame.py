"""Rows of a comparison as a pandas DataFrame, made straight from the columns: pyarrow is not needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from astray.comparison.select.columns import Cells
from astray.comparison.select.pairs import Pairs
from astray.errors import UsageError
from astray.store import Coded

if TYPE_CHECKING:
    import pandas


def frame(pairs: Pairs) -> pandas.DataFrame:
    """The rows with every column."""
    try:
        import pandas
    except ImportError:
        raise UsageError(
            "to_pandas needs pandas, which is not installed: pip install pandas. "
            "Without it, pyarrow.table(...) and polars.DataFrame(...) take the same rows."
        ) from None
    columns = {name: _series(pandas, pairs[name]) for name in pairs.names}
    return pandas.DataFrame(columns, copy=False)


def _series(pandas: Any, cells: Cells) -> Any:
    column = cells.column
    if isinstance(column, Coded):
        words = pandas.Index(column.values, dtype=object, tupleize_cols=False)
        return pandas.Categorical.from_codes(column.codes, words)
    if column.dtype.kind in "iu" and not cells.known.all():
        return pandas.arrays.IntegerArray(column, ~cells.known)
    return column
