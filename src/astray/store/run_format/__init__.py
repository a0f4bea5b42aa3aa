"""astray's own format: two Arrow streams, safetensors files and a little JSON. docs/reference/format.md describes it.

schema.py          the columns of the two tables
folder.py          the folders of a run: claimed, cleared, listed
rows.py            rows while they wait to be written; `_columns.cpp` keeps them as columns
cells.py           one column of them, and the Arrow buffers it becomes
encoder.py         rows → record batches → a table's file
ipc.py             finds the batches of such a file
decoder.py         a table's file → tables in memory
reader.py          a folder → a `Run`
validation.py      leaves out rows and values that are damaged
tensor_values.py   the bytes of tensors, to and from safetensors files
shard_file.py      one safetensors file, valid at every moment while it is filled
disk_io.py         the threads that write bytes
"""
