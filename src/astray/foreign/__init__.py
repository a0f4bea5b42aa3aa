"""Other tools: what reads and writes the files of each, and its front door (public as `astray.compat`)."""
