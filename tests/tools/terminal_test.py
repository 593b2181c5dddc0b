"""sqz-generate at a terminal: its prompt and Ctrl-D. Arguments: sqz-index, sqz-generate, a model, a text."""

import os
import pty
import select
import subprocess
import sys
import tempfile

index_tool, generate, model, text = sys.argv[1:5]


class Terminal:
    def __init__(self, arguments):
        self.child, self.side = pty.fork()
        if self.child == 0:
            os.execv(arguments[0], arguments)
        self.said = ""

    def read(self, seconds):
        if not select.select([self.side], [], [], seconds)[0]:
            return False
        try:
            piece = os.read(self.side, 65536)
        except OSError:  # the other side is closed
            piece = b""
        self.said += piece.decode(errors="replace")
        return bool(piece)

    def wait_for(self, part, since=0):
        for _ in range(600):
            if part in self.said[since:]:
                return
            self.read(0.2)
        raise AssertionError(f"no {part!r} in {self.said!r}")

    def type(self, keys):
        at = len(self.said)
        os.write(self.side, keys)
        return at

    def code(self):
        while self.read(60):
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])


def main():
    with tempfile.TemporaryDirectory() as folder:
        index = os.path.join(folder, "a.sqz")
        subprocess.run([index_tool, "build", "-m", model, text, "--max-tokens", "3000", "-o", index, "-q"],
                       check=True, stdout=subprocess.DEVNULL)
        command = [generate, "-m", model, "-i", index, "--max-tokens"]

        loop = Terminal([*command, "4"])
        loop.wait_for("Ctrl-D leaves")
        loop.wait_for("> ")
        at = loop.type(b"The Count\n")
        loop.wait_for("tokens in", at)
        loop.wait_for("> ", at)
        loop.type(b"\x04")
        assert loop.code() == 0, loop.said


try:
    for side in pty.openpty():
        os.close(side)
except OSError as error:
    print(f"skipped: no terminals here: {error}")
    sys.exit(77)
main()
