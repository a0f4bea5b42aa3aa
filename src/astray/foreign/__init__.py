"""Other tools: what reads and writes the files of each, and its front door (public as `astray.compat`).

hooktools/, msprobe/, saving_hook/, torch_npu/   one package a tool
array_files.py   files of one array (.npy), and files that `torch.load` opens
dump_rows.py     the rows of a dump, as its reader finds them → the tables of a `Run`
live_writer.py   a running program's records → the writer of another tool's format
"""
