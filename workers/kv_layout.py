"""How an engine may keep a block: a word that settings and engines share."""

from typing import Literal

KvLayout = Literal["HND", "NHD"]
"""Order of heads (H), tokens (N) and elements (D) within a layer's KV of one block."""
