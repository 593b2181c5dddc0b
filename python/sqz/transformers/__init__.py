"""Fixed contexts in Hugging Face transformers 4.56 and newer (docs/transformers.md).

    import sqz.transformers

    sqz.transformers.capture(model, input_ids, "manual.h5")    # then: sqz-index build --capture manual.h5 -o manual.sqz
    with sqz.transformers.FixedContext(model, "manual.sqz", budget=0.125) as context:
        model.generate(**tokenizer(question, add_special_tokens=False, return_tensors="pt"), max_new_tokens=64)
        context.stats()

Needs torch and transformers; capture() also h5py.
"""

from .capture import Captured, capture
from .context import FixedContext
from .fingerprint import fingerprint

__all__ = ["Captured", "FixedContext", "capture", "fingerprint"]
