"""What the program is set to: `flags` (torch itself), `attributes` (modules), `watching` (when each is looked at)."""
