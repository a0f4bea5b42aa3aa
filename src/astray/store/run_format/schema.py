"""The columns of the two tables, in the order of the files.

docs/reference/format.md describes the same for users; a test keeps the two equal. Any change here needs a new format
version. A column added later may be null, since older runs do not have it.

    1  first version
    2  tensors: part
    3  tensors: first_bad, first_bad_value
    4  tensors: value
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Type = Literal["int32", "int64", "uint64", "float64", "bool", "string", "list<int64>"]


class Column(NamedTuple):
    """One column: its name, its Arrow type, and whether it may be null."""

    name: str
    type: Type
    nullable: bool = False


CALLS = (
    Column("seq", "int64"),  # order of execution in this rank; a call's number is smaller than those inside it
    Column("step", "int64"),  # training step
    Column("micro", "int32"),  # which forward inside the step
    Column("kind", "string"),  # module, function, op, parameter, optimizer, collective, custom
    Column("site", "string"),  # qualified module name; for a function the module, a slash and the function
    Column("type", "string"),  # class or function
    Column("call", "int32"),  # n-th call of this site in its micro step
    Column("phase", "string"),  # forward, backward, update
    Column("parent", "int64", True),  # seq of the enclosing call; of a backward call, its forward call
    Column("stack", "int64", True),  # id in stacks.jsonl
    Column("args", "string", True),  # the structure of the arguments with every value that is not a tensor
    Column("recompute", "bool"),  # activation checkpointing runs it again
)

TENSORS = (
    Column("seq", "int64"),  # the call it belongs to
    Column("role", "string"),  # input, output, parameter, gradient, state
    Column("path", "string"),  # where in the arguments or results: 0, 1.2, kwargs.mask
    Column("dtype", "string"),  # the framework's name without its prefix: float32, bfloat16
    Column("shape", "list<int64>"),
    Column("stride", "list<int64>"),  # in elements
    Column("device", "string"),
    Column("requires_grad", "bool"),
    Column("min", "float64", True),  # this and the next five are over the finite elements
    Column("max", "float64", True),
    Column("mean", "float64", True),
    Column("std", "float64", True),  # of the population (ddof 0)
    Column("l2", "float64", True),
    Column("absmax", "float64", True),
    Column("zeros", "int64", True),  # how many elements are zero; likewise nan and inf
    Column("nan", "int64", True),
    Column("inf", "int64", True),
    Column("count", "int64", True),  # how many elements there are
    Column("first_bad", "int64", True),  # index of the first element that is NaN or infinite; null when all are finite
    Column("first_bad_value", "float64", True),  # what it is
    Column("fingerprint", "uint64", True),  # exact and order-sensitive
    Column("blob_file", "int32", True),  # number of the values file; null when values were not kept
    Column("blob_offset", "int64", True),  # from the start of that file
    Column("blob_bytes", "int64", True),
    Column("sampled", "int64", True),  # how many values, when only a sample of them was kept
    Column("part", "string", True),  # which slice, when only that part of the tensor was kept
    Column("placement", "string", True),  # mesh and sharding, when it is a shard of something larger
    Column("note", "string", True),  # what a reader should know about this row
    Column("value", "int64", True),  # which value it is: the same number for the same memory in the same version
)
