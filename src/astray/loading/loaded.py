"""What was loaded, as a record and as a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from astray.loading.plan import Assignment
from astray.wording import counted

_MOST = 8


@dataclass(frozen=True)
class LoadedWeights:
    """What `load_from` has written, and what it has not.

    >>> loaded = astray.load_from("runs/torch", layer)
    >>> print(loaded)
    40 tensors of GPT were loaded from runs/torch: 40 by name, 10 of them laid out anew.
      transpose     h.0.qkv.weight, h.0.proj.weight, …
    >>> loaded.names["h.0.ln_1.weight"], loaded.layouts["h.0.qkv.weight"]
    ('h.0.ln_1.weight', 'transpose')

    model, source: what they are called. names: for each tensor of the model that of the source.
    layouts: how the model's tensors lie that are laid out otherwise than the source's. how: how each was paired.
    converted: the dtypes of those that were converted. kept: tensors of the model that the source's framework has
    nothing for. unused: tensors of the source that the model has nothing for.
    """

    model: str
    source: str
    names: dict[str, str]
    layouts: dict[str, str]
    how: dict[str, str]
    converted: dict[str, str]
    kept: tuple[str, ...]
    unused: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        ways = ", ".join(f"{count:,} {how}" for how, count in Counter(self.how.values()).items())
        anew = f"; {len(self.layouts):,} of them laid out anew" if self.layouts else ""
        were = "was" if len(self.names) == 1 else "were"
        yield f"{counted(len(self.names), 'tensor')} of {self.model} {were} loaded from {self.source}: {ways}{anew}."
        by_layout: dict[str, list[str]] = {}
        for name, layout in self.layouts.items():
            by_layout.setdefault(layout, []).append(name)
        for layout, names in by_layout.items():
            yield f"  {layout:<12}  {_listed(names)}"
        guessed = [f"{name} from {self.names[name]}" for name, how in self.how.items() if how.startswith("by shape")]
        for what, several in (
            ("check these", guessed),
            ("converted", [f"{name} ({dtypes})" for name, dtypes in self.converted.items()]),
            ("left as is", self.kept),
            ("not used", self.unused),
        ):
            if several:
                yield f"  {what:<12}  {_listed(several)}"

    @classmethod
    def of(
        cls, model: str, source: str, assignments: list[Assignment], kept: list[str], unused: list[str]
    ) -> LoadedWeights:
        """What a plan says, once it is carried out."""
        return cls(
            model,
            source,
            {one.target.name: one.source.name for one in assignments},
            {one.target.name: str(one.layout) for one in assignments if one.layout is not None},
            {one.target.name: one.how for one in assignments},
            {
                one.target.name: f"{one.source.dtype} to {one.target.dtype}"
                for one in assignments
                if one.source.dtype != one.target.dtype
            },
            tuple(kept),
            tuple(unused),
        )


def _listed(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST:,} more" if len(names) > _MOST else "")
