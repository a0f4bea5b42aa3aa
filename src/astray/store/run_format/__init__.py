"""astray's own format: two Arrow streams, safetensors files and a little JSON. docs/format.md describes it."""
