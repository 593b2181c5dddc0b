"""sqz-generate at a terminal: its prompt and Ctrl-D. Arguments: sqz-index, sqz-generate, a model, a text."""

import os
import pty
import select
import subprocess
import sys
import tempfile
import time

index_tool, generate, model, text = sys.argv[1:5]
try:
    for side in pty.openpty():
        os.close(side)
except OSError as error:
    print(f"skipped: no terminals here: {error}")
    sys.exit(77)
with tempfile.TemporaryDirectory() as folder:
    index = os.path.join(folder, "a.sqz")
    subprocess.run([index_tool, "build", "-m", model, text, "--max-tokens", "3000", "-o", index, "-q"], check=True,
                   stdout=subprocess.DEVNULL)
    child, side = pty.fork()
    if child == 0:
        os.execv(generate, [generate, "-m", model, "-i", index, "--max-tokens", "4"])
    said = ""
    # What is waited for, one behind the other, and what is typed then.
    for part, keys in (("Ctrl-D leaves", b""), ("> ", b"The Count\n"), ("tokens in", b""), ("> ", b"\x04"), (None, b"")):
        end = time.monotonic() + 120
        while part is None or part not in said:
            try:
                ready = select.select([side], [], [], max(0, end - time.monotonic()))[0]
                piece = os.read(side, 65536) if ready else b""
            except OSError:  # the other side is closed
                piece = b""
            if not piece:
                break
            said += piece.decode(errors="replace")
        assert part is None or part in said, f"no {part!r} in {said!r}"
        said = said[said.index(part) + len(part):] if part else said
        os.write(side, keys) if keys else None
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, said
