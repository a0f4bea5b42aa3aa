"""Front doors for people who come from other tools: their names and defaults, each a thin file over astray itself."""
