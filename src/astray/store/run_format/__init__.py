"""astray's own format: two Arrow streams, safetensors files and a little JSON. docs/reference/format.md describes it.

schema.py      the columns of the two tables
folder.py      the folders of a run: claimed, cleared, listed
rows.py        rows while they wait to be written (natively in `_columns.cpp`), and the Arrow buffers of their columns
encoder.py     rows → record batches → a table's file
ipc.py         finds the batches of such a file
decoder.py     a table's file → tables in memory
reader.py      a folder → a `RunData`
shard_file.py  one safetensors file of values: valid at every moment while it is filled, and read back
disk_io.py     the threads that write bytes
"""
