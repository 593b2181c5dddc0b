"""Attention over a fixed context from an index built once: libsqz for Python.

    index = sqz.Index("manual.sqz")
    session = sqz.Session(index, budget=0.125)               # device=0 after index.upload(0): a GPU
    out, lse = session.attend(layer, q)                      # q: [tokens, query heads, head_dim] after RoPE
    sqz.merge_states(out, lse, own_out, own_lse)             # with your attention over the tokens since

Tensors are numpy's, torch's, or of whatever else speaks DLPack; none is copied. What the library refuses is a
sqz.Error with its sentence. docs/python.md is the reference.
"""

from sqz._arguments import Context, Contexts, DeviceContexts
from sqz._library import Error, version
from sqz.build import Built, build, calibrate
from sqz.index import Index, IndexInfo, Layer
from sqz.session import Session, Stats, merge_states

__version__ = version
__all__ = ["Built", "Context", "Contexts", "DeviceContexts", "Error", "Index", "IndexInfo", "Layer", "Session", "Stats",
           "build", "calibrate", "merge_states"]
