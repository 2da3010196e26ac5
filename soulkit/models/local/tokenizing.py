"""Which tokenizer ids belong to."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenizer_print(tokenizer: PreTrainedTokenizerBase) -> str:
    """First 16 hex digits of the SHA-256 of what a tokenizer does to a text.

    Equal prints give equal ids. How the last batch was padded or cut is state of the object, not of
    the tokenizer, and left out.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        rules: Any = sorted(tokenizer.get_vocab().items())
    else:
        whole = json.loads(fast.to_str())
        rules = {k: v for k, v in whole.items() if k not in ("padding", "truncation")}
    text = json.dumps(rules, ensure_ascii=True, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
