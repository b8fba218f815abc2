"""A small folder of code and prose, as a corpus for tests of Ouro's training."""

from __future__ import annotations

from pathlib import Path

PROSE = "The licence of this text says that it may be read, and that nobody is to blame. "


def make_library(root: Path) -> Path:
    """Enough for a corpus in both domains, with the traps that collecting it has to leave out."""
    root.mkdir(parents=True, exist_ok=True)
    for index in range(24):
        body = "".join(
            f"    def step_{n}(self, value):\n        return self.value + {n}\n" for n in range(12)
        )
        (root / f"module_{index}.py").write_text(f"class Thing{index}:\n    '''Does {index}.'''\n{body}")
    for index in range(8):
        (root / f"notes_{index}.txt").write_text(f"Note {index}. " + PROSE * 6)
    (root / "LICENSE.txt").write_text(PROSE * 8)
    (root / "test").mkdir()
    (root / "test" / "test_it.py").write_text("assert 'never seen'\n")
    (root / "_sysconfigdata_here.py").write_text("paths = ['/of/one/machine']\n")
    (root / "latin.py").write_bytes(b"# caf\xe9\n")
    (root / "pydoc_data").mkdir()
    (root / "pydoc_data" / "topics.py").write_text(
        "topics = " + repr({f"topic{n}": f"Topic {n}. " + PROSE for n in range(12)})
    )
    return root
