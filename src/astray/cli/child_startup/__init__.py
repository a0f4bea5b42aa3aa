"""A folder that `astray run` puts in front of PYTHONPATH: Python imports its `sitecustomize` in every child process."""
