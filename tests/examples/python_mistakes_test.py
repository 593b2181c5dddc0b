"""What python/sqz says of a user's mistakes. Arguments: the library, the module's folder, an index."""

import os
import subprocess
import sys

os.environ["SQZ_LIBRARY"], folder, path = sys.argv[1:4]
sys.path.insert(0, folder)
import sqz  # noqa: E402


def in_another_process(program, **environment):
    return subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {folder!r})\n" + program],
                          env={**os.environ, **environment}, capture_output=True, text=True, check=False)


missing = in_another_process("import sqz", SQZ_LIBRARY="/nowhere/libsqz.so.0")
assert "ImportError: " in missing.stderr and "set SQZ_LIBRARY" in missing.stderr, missing.stderr

index = sqz.Index(path)
try:
    sqz.Session(index, bugdet=1)
    raise AssertionError("an option that is none passed")
except TypeError as error:
    assert "bugdet" in str(error), error

text = repr(sqz.Index(path).describe())  # the index lives as long as what it says
assert text.startswith("IndexInfo(format_version=") and "producer=b'sqz 0.1.0'" in text, text

# A session that is alive when the interpreter ends, and the module's names are gone.
end = in_another_process(f"import builtins, sqz\nindex = sqz.Index({path!r})\n"
                         "builtins.kept = sqz.Session(index, selector=1)\nsqz._lib = None")
assert end.returncode == 0 and end.stderr == "", end.stderr
