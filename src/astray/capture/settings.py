"""What to record, checked once before anything is touched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from astray.errors import RecordError
from astray.steps import Steps

KEEPS = ("stats", "fingerprint", "sample", "tensors")
LEVELS = ("module",)

SAMPLES = 1024
QUEUE_BYTES = 256 << 20


@dataclass(frozen=True)
class Settings:
    """The settings of one recording.

    keep: "stats" records statistics and the fingerprint (one read gives both), "fingerprint" the fingerprint alone,
        "sample" adds a few values at fixed positions, "tensors" every value. Several may be combined.
    steps: which steps to record, as `Steps` takes them: "0:10:2", a list of numbers, None for all.
    samples: how many values "sample" keeps of each tensor.
    queue_bytes: how much may wait for the disk before the program is made to wait.
    """

    level: tuple[str, ...] = ("module",)
    keep: frozenset[str] = frozenset({"stats"})
    steps: Steps = Steps()
    samples: int = SAMPLES
    queue_bytes: int = QUEUE_BYTES

    @classmethod
    def check(
        cls,
        *,
        level: str | Iterable[str] = "module",
        keep: str | Iterable[str] = "stats",
        steps: str | int | Sequence[int] | range | None = None,
        samples: int = SAMPLES,
        queue_bytes: int = QUEUE_BYTES,
    ) -> Settings:
        """Settings from what a user wrote, or a RecordError that names the nearest right word."""
        for name, value, least in (("samples", samples, 1), ("queue_bytes", queue_bytes, 1 << 20)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise RecordError(f"{name}={value!r} is not a whole number of at least {least:,}.")
        return cls(
            level=tuple(_words("level", level, LEVELS)),
            keep=frozenset(_words("keep", keep, KEEPS)),
            steps=Steps.parse(steps),
            samples=samples,
            queue_bytes=queue_bytes,
        )

    @property
    def wants_statistics(self) -> bool:
        return self.keep != {"fingerprint"}

    def as_dict(self) -> dict[str, Any]:
        """For run.json."""
        return {
            "level": list(self.level),
            "keep": sorted(self.keep),
            "steps": str(self.steps),
            "samples": self.samples,
            "queue_bytes": self.queue_bytes,
        }


def _words(name: str, given: str | Iterable[str], known: tuple[str, ...]) -> list[str]:
    if not isinstance(given, str | list | tuple | set | frozenset):
        raise RecordError(f"{name}={given!r} is no word. It can be {', '.join(map(repr, known))}, or several of them.")
    words = [word.strip() for word in given.split(",")] if isinstance(given, str) else list(given)
    for word in words:
        if word not in known:
            near = get_close_matches(str(word), known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise RecordError(f"{name}={word!r} is not known. It can be {', '.join(map(repr, known))}.{hint}")
    if not words:
        raise RecordError(f"{name} is empty. It can be {', '.join(map(repr, known))}, or several of them.")
    return words
