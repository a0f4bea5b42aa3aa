"""The records of a running program → files, or the last steps in memory."""
