"""Other tools: readers and writers of their files, and their calls (public as `astray.compat`).

hooktools/, msprobe/, saving_hook/, torch_npu/   a package for each tool
array_files.py   files of one array (.npy), and files that `torch.load` opens
dump_rows.py     the calls and tensors that a reader adds → the tables of a `Run`
live_writer.py   a running program's records → the writer of another tool's format
"""
