"""Tables to take away: what `astray compare --csv` and `--xlsx` write, into a folder that is gone once it was sent."""

from __future__ import annotations

import tempfile
from pathlib import Path

from astray.compare.comparison import Comparison
from astray.errors import UsageError

MEDIA = {
    "csv": "text/csv; charset=utf-8",
    "xlsx": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
}


class Exported:
    """A file, and the folder it lies in until `close`."""

    def __init__(self, comparison: Comparison, kind: str, filter: str | None, sort: str | None) -> None:
        if kind not in MEDIA:
            raise UsageError(f"There is no export as {kind!r:.40}; there are {', '.join(MEDIA)}.")
        self._folder = tempfile.TemporaryDirectory(prefix="astray-")
        folder = Path(self._folder.name)
        try:
            if kind == "csv":
                self.path = comparison.to_csv(folder, filter=filter, sort=sort)[0]
            else:
                self.path = comparison.to_xlsx(folder / "pairs.xlsx", filter=filter, sort=sort)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove it."""
        self._folder.cleanup()
