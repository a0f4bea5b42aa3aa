"""The records of a running program → files, or the last steps in memory.

background_writer.py   the program's side of every writer: a bounded queue, a thread, forks
record_queue.py        that queue, and its rows cut where steps end
run_writer.py          the queue → the files of one rank, while the program runs: as rows come, or step by step
rank_files.py          the open files of one rank, and the order in which they are written
values_writer.py       the bytes of tensors → safetensors files, by several threads
buffer_pool.py         host memory for these bytes
flight_recorder.py     the queue → the last steps in memory, written on demand
step_buffer.py         the rows and values of the last steps
step_listener.py       shows each step to a listener
snapshot.py            what a flight recorder holds → a run
"""
