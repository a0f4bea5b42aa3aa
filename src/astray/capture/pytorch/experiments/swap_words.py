"""What `swap` is told in words: `h.2.attn=cpu`, `float64`, `mypkg.sampling.top_p`. Imports no framework.

`astray run --swap` checks its options here before the script runs; `destination` reads the same words.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from astray.errors import UsageError

EAGER = "eager"

DEVICES = frozenset(
    "cpu cuda hpu ipu maia meta mlu mps mtia musa npu privateuseone vulkan xla xpu".split()  # noqa: SIM905
)
"""The types of devices, also those that another package brings."""

DTYPES = frozenset(
    "float64 double float32 float float16 half bfloat16".split()  # noqa: SIM905
    + "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz".split()  # noqa: SIM905
)

EXAMPLES = "'cpu', 'cuda:1', 'float64', 'cpu,float64', 'eager', or 'mypkg.fixes.softmax'"

Word = Literal["device", "dtype", "eager", "callable"]


class SwapOption(NamedTuple):
    """One `--swap`: what is swapped, and to what."""

    what: str
    to: str

    def __str__(self) -> str:
        return f"{self.what}={self.to}"


def read_option(text: str) -> SwapOption:
    """The two parts of `WHAT=TO`; a regular expression may have equals signs of its own.

    >>> read_option("h.2.attn=cpu,float64")
    SwapOption(what='h.2.attn', to='cpu,float64')
    """
    what, equals, to = text.rpartition("=")
    if not equals or not what or not to:
        raise UsageError(
            f"--swap {text} is not WHAT=TO. Give a module, function or callable and where it is to run, such as "
            "--swap 'layers.3.*=cpu'."
        )
    words = words_of(to)
    kinds = [kind_of(word) for word in words]
    if None in kinds:
        wrong = words[kinds.index(None)]
        raise UsageError(
            f"--swap {text}: {wrong} is neither a device nor a floating point dtype nor the dotted name of a callable. "
            f"Say {EXAMPLES.replace(chr(39), '')}."
        )
    check_together(to, [kind for kind in kinds if kind is not None])
    check_pattern(what)
    return SwapOption(what, to)


def words_of(to: str) -> list[str]:
    return [word.strip() for word in to.split(",")]


def kind_of(word: str) -> Word | None:
    """What a word stands for.

    >>> kind_of("cuda:1"), kind_of("torch.float64"), kind_of("mypkg.fixes.softmax"), kind_of("flaot64")
    ('device', 'dtype', 'callable', None)
    """
    if word == EAGER:
        return "eager"
    if word.removeprefix("torch.") in DTYPES:
        return "dtype"
    if re.fullmatch(r"(\w+?)(:\d+)?", word) and word.partition(":")[0] in DEVICES:
        return "device"
    return "callable" if is_dotted(word) else None


def is_dotted(name: str) -> bool:
    """Whether it could be the dotted name of something in a module."""
    parts = name.split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def check_together(to: object, kinds: list[Word]) -> None:
    """Raises unless these words make one destination: a device, a dtype, both, or one of the others alone."""
    alone = [kind for kind in kinds if kind in ("eager", "callable")]
    if not kinds or len(set(kinds)) < len(kinds) or (alone and len(kinds) > 1):
        raise UsageError(
            f"to={to!r} is not one destination. It is a device, a floating point dtype, both, 'eager', or a callable: "
            f"{EXAMPLES}."
        )


def check_pattern(what: str) -> None:
    """Raises for what is neither a name nor a regular expression."""
    module, _, function = what.rpartition("/")
    for part in (module, function):
        try:
            re.compile(part)
        except re.error as error:  # noqa: PERF203 - there are two
            raise UsageError(f"{what} is neither a name nor a regular expression: {error}.") from None


class FunctionPattern(NamedTuple):
    """A function or op, and the modules it is swapped in: `h\\..*\\.attn/softmax`; outside of all, `/softmax`."""

    module: str
    function: str

    @classmethod
    def read(cls, what: str) -> FunctionPattern:
        module, _, function = what.rpartition("/")
        return cls(module, function)

    @property
    def is_op(self) -> bool:
        """Whether it is an op, which has a namespace in front: `aten.mm`, `aten\\..*`; and not `soft.*`."""
        return re.match(r"[A-Za-z_]\w*\\?\.(?![*+?{])", self.function) is not None

    @property
    def is_outside(self) -> bool:
        """Whether functions outside of every module fit."""
        return re.fullmatch(self.module, "") is not None
