"""OutputPipe: reads what user code prints, line by line."""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable


class OutputPipe:
    """The read end of a pipe that the nodes of a run print to."""

    def __init__(self, read_fd: int, show: Callable[[str], None]) -> None:
        """`show` is called with every line."""
        self.read_fd = read_fd
        os.set_blocking(read_fd, False)
        self._show = show
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial_line = ""

    def read_lines(self) -> bool:
        """Show the complete lines. Returns True while there may be more."""
        try:
            data = os.read(self.read_fd, 65536)
        except BlockingIOError:
            return False
        *lines, self._partial_line = (self._partial_line + self._decoder.decode(data)).split("\n")
        for line in lines:
            self._show(line)
        return bool(data)

    def close(self) -> None:
        """Show the rest. No process writes to the pipe any more."""
        while self.read_lines():
            pass
        if self._partial_line:
            self._show(self._partial_line)
        os.close(self.read_fd)
