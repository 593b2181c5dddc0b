"""sqz-generate at a terminal: its prompt, and what Ctrl-C ends. Arguments: sqz-index, sqz-generate, a model, a text."""

import os
import pty
import select
import signal
import subprocess
import sys
import tempfile

index_tool, generate, model, text = sys.argv[1:5]
CONTROL_C, CONTROL_D = b"\x03", b"\x04"


class Terminal:
    def __init__(self, arguments):
        self.child, self.side = pty.fork()
        if self.child == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
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

    def wait_for(self, what, since=0):
        """Reads until `what` stands behind `since`."""
        for _ in range(600):
            if what in self.said[since:]:
                return len(self.said)
            self.read(0.2)
        raise AssertionError(f"no {what!r} in {self.said!r}")

    def type(self, keys):
        at = len(self.said)
        try:
            os.write(self.side, keys)
        except OSError:  # it has ended
            pass
        return at

    def code(self):
        while self.read(60):
            pass
        os.kill(self.child, signal.SIGKILL)  # if it is still there
        return os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])


def main():
    with tempfile.TemporaryDirectory() as folder:
        index = os.path.join(folder, "a.sqz")
        subprocess.run([index_tool, "build", "-m", model, text, "--max-tokens", "3000", "-o", index, "-q"],
                       check=True, stdout=subprocess.DEVNULL)
        command = [generate, "-m", model, "-i", index, "--max-tokens", "20000"]

        loop = Terminal(command)
        loop.wait_for("> ")
        at = loop.type(b"The Count\n")
        loop.wait_for(" ", at + len("The Count\r\n") + 20)  # some of the answer
        at = loop.type(CONTROL_C)
        loop.wait_for("interrupted; read", at)
        loop.wait_for("> ", at)  # and the next prompt
        assert "stopping" not in loop.said, loop.said
        at = loop.type(b"The castle\n")
        loop.wait_for(" ", at + len("The castle\r\n") + 20)
        at = loop.type(CONTROL_C)
        loop.wait_for("^C", at)
        loop.type(CONTROL_C)
        while "\n> " not in loop.said[at:] and loop.read(60):
            pass
        loop.type(CONTROL_C)  # where the two came at once, and counted as one
        assert loop.code() == 130, loop.said
        # The second answer has a line of its own unless the second Control-C ended it first.
        assert loop.said.count("interrupted; read") in (1, 2) and "2 answers, " in loop.said, loop.said

        idle = Terminal(command)
        idle.wait_for("> ")
        idle.type(CONTROL_C)
        assert idle.code() == 130 and "0 answers" in idle.said, idle.said

        ended = Terminal(command)
        ended.wait_for("> ")
        ended.type(CONTROL_D)
        assert ended.code() == 0, ended.said


try:
    for side in pty.openpty():
        os.close(side)
except OSError as error:
    print(f"skipped: no terminals here: {error}")
    sys.exit(77)
main()
