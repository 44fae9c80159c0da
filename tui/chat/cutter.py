"""Where a growing Markdown text is cut into parts that look alone as they would together.

A part ends at an empty line outside a code block once it is large, and at any line, at last at any
space, once it is twice that. A code block or a table that is cut goes on in the next part: its
first line, or its two header lines, are repeated there, and the code block is closed here.

Size is what a part costs to show: characters, and more for lines, table cells and items of a list,
which become a widget or several.
"""

import re

PART = 3000
LINE, CELL, ITEM = 90, 60, 270      # characters that a line, a table's cell, an item count for
_FENCE = re.compile(r" *(`{3,}|~{3,})(.*)")        # in a list, too
_ITEM = re.compile(r"\s*([-+*]|\d{1,9}[.)])\s")
_BREAK = re.compile(r"[\s|]")        # a cell counts for more than its character
_RULE = re.compile(r" {0,3}\|?[ :|-]*-[ :|-]*\|?\s*$")


class Cutter:
    """parts: texts, the last one of which grows."""

    def __init__(self):
        self.parts = [""]
        self._size = 0
        self._line = ""         # the last line, so far
        self._open = None       # (characters, first line) of the code block that is open
        self._before = ""       # the line before
        self._head = None       # header lines of the table that is open

    def feed(self, text):
        """Add text. Returns what each part gets: the first is the growing one's, the others new."""
        added = [""]
        for line in text.splitlines(keepends=True):
            at = 0
            while at < len(line):
                piece = line[at:self._reach(line, at)]
                at += len(piece)
                added[-1] += piece
                self.parts[-1] += piece
                self._size += len(piece) + CELL * piece.count("|")
                self._line = (self._line + piece)[-4 * PART:]
                if piece.endswith("\n"):
                    self._size += LINE
                    self._end_line()
                self._cut(added)
        return added

    def _reach(self, line, at):
        """Where the next place in a line is, after `at`, at which a cut may be due."""
        if self._size < 3 * PART:
            # as far as surely needs no cut inside, whatever its cells count for
            return at + max(1, (3 * PART - self._size) // (1 + CELL))
        end = at + max(1, 4 * PART - self._size)
        found = _BREAK.search(line, at, end)
        return found.end() if found else end

    def _end_line(self):
        line, self._line = self._line.rstrip("\n"), ""
        found = _FENCE.match(line)
        if self._open is not None:
            if found and found[1].startswith(self._open[0]) and not found[2].strip():
                self._open = None
        elif found and not ("`" in found[1] and "`" in found[2]):
            self._open, self._head = (found[1], line), None
        elif _ITEM.match(line):
            self._size += ITEM
            self._head = None
        elif self._head is None and "|" in self._before and "-" in line and _RULE.match(line):
            self._head = f"{self._before}\n{line}\n"
        elif "|" not in line:
            self._head = None
        self._before = line

    def _cut(self, added):
        whole = not self._line
        calm = whole and not self._before.strip() and self._open is None
        if not (self._size >= PART and calm or self._size >= 2 * PART and whole
                or self._size >= 3 * PART and self._line[-1:].isspace()
                or self._size >= 4 * PART):
            return
        again = ""
        if self._open is not None:
            ticks, first = self._open
            end = ("" if whole else "\n") + ticks + "\n"
            added[-1] += end
            self.parts[-1] += end
            again = first.strip() + "\n"
        elif self._head is not None and whole:
            again = self._head
        added.append(again)
        self.parts.append(again)
        self._size = len(again)
        self._before, self._line = "", ""
