"""Text that lies beside every Python interpreter, as tokens: its library's sources, and prose of its manual.

Owns what belongs to the corpus, what is held out of it, and the tokenizer made from the rest. Equal libraries
give equal tokens.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from xspec.errors import CheckpointError, ConfigError
from xspec.train.journal import write_atomically

TRAIN, CODE, PROSE = "train", "code", "prose"
DOMAINS = (CODE, PROSE)
END = "<|endoftext|>"  # id 0: between documents, and the end of an answer
TOKENIZER, FACTS = "tokenizer.json", "corpus.json"
SPECIAL_IDS = 1
SMALLEST_VOCAB = 256 + SPECIAL_IDS
PROSE_HELD_OUT = 0.2  # of the prose, of which there is little; licences are all held out
_TOPICS = "pydoc_data/topics.py"
_KINDS = {".py": CODE, ".txt": PROSE, ".rst": PROSE, ".md": PROSE}
# Tests are data of another kind, encodings are tables of characters, the others are not the library's.
_SKIPPED = frozenset(
    {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "lib-dynload"}
)


@dataclass(frozen=True, slots=True)
class Document:
    name: str  # relative path, with the topic where a file holds several
    domain: str
    text: str
    held_out: bool

    @property
    def part(self) -> str:
        """The stream it goes into."""
        return self.domain if self.held_out else TRAIN


@dataclass(frozen=True, slots=True)
class CorpusOptions:
    """`folders` empty: the library of this interpreter. `vocab_size` counts bytes and the end token."""

    folders: tuple[str, ...] = ()
    held_out: float = 0.04  # share of the code files
    vocab_size: int = 1024

    def __post_init__(self) -> None:
        if not SMALLEST_VOCAB <= self.vocab_size <= 65536:
            raise ConfigError(
                f"--vocab_size={self.vocab_size}: allowed: integers from {SMALLEST_VOCAB} (bytes) to 65536"
            )
        if not 0.0 < self.held_out < 1.0:
            raise ConfigError(f"--held_out={self.held_out:g}: allowed: above 0 and below 1")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Streams of tokens [N] int64, an end token after each document. `facts` say what they were made of."""

    tokenizer: tokenizers.Tokenizer
    training: torch.Tensor
    held_out: Mapping[str, torch.Tensor]  # by domain
    facts: Mapping[str, Any]

    @property
    def digest(self) -> str:
        return str(self.facts["digest"])

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.get_vocab_size()

    def byte_counts(self) -> torch.Tensor:
        """[V] bytes of text that each token stands for. A piece has a character a byte, the end has none."""
        pieces = [str(self.tokenizer.id_to_token(index)) for index in range(self.vocab_size)]
        return torch.tensor([0 if piece == END else len(piece) for piece in pieces])

    def windows(self, domain: str, count: int, tokens: int) -> torch.Tensor:
        """[n, tokens] of held-out text, evenly spread over it and without overlap.

        At most `count`, fewer where the text is short. ConfigError if there is not one.
        """
        stream = self.held_out[domain]
        count = min(count, len(stream) // tokens)
        if not count:
            raise ConfigError(f"held-out {domain} has {len(stream)} tokens, too few for {tokens} in a row")
        starts = [index * (len(stream) - tokens) // max(1, count - 1) for index in range(count)]
        return torch.stack([stream[start : start + tokens] for start in starts])


def open_corpus(folder: Path) -> Corpus:
    """What `prepare` left there. CheckpointError if it is damaged."""
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
        held_out = {domain: _read(folder, domain) for domain in DOMAINS}
        return Corpus(tokenizer, _read(folder, TRAIN), held_out, facts)
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{folder} holds no corpus: {error}") from error


def prepare(options: CorpusOptions, folder: Path) -> Corpus:
    """The corpus in `folder`, made if it is not there yet. ConfigError if it was made of something else."""
    documents = _enough(options)
    facts = _facts(documents, options)
    if (folder / FACTS).exists():
        corpus = open_corpus(folder)
        if corpus.digest != facts["digest"]:
            raise ConfigError(
                f"{folder} holds a corpus of other files or of another split (digest {corpus.digest[:16]}, "
                f"now {facts['digest'][:16]}): give another --output or --work_dir"
            )
        return corpus
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(documents, options.vocab_size)
    for name in (TRAIN, *DOMAINS):
        stream = _encode([each for each in documents if each.part == name], tokenizer)
        stream.numpy().astype("<u2").tofile(folder / f"{name}.bin")
    write_atomically(folder / TOKENIZER, tokenizer.to_str(pretty=True))
    write_atomically(folder / FACTS, json.dumps(facts, indent=1) + "\n")  # last: now it counts
    return open_corpus(folder)


def held_out_corpus(options: CorpusOptions, tokenizer: tokenizers.Tokenizer) -> Corpus:
    """For figures of a model that exists: the held-out text in its tokens, and nothing to train on."""
    documents = _enough(options)
    held_out = {
        domain: _encode([each for each in documents if each.part == domain], tokenizer) for domain in DOMAINS
    }
    return Corpus(tokenizer, torch.empty(0, dtype=torch.int64), held_out, _facts(documents, options))


def collect(options: CorpusOptions) -> Iterator[Document]:
    """All documents, in an order that mixes the domains and follows from their names alone."""
    roots = [Path(folder).expanduser() for folder in options.folders]
    for root in roots:
        if not root.is_dir():
            raise ConfigError(f"--corpus={root}: there is no such folder")
    found = [
        each for root in roots or [Path(sysconfig.get_path("stdlib"))] for each in _documents(root, options)
    ]
    yield from sorted(found, key=lambda each: _place(each.name, "order"))


def make_tokenizer(documents: Sequence[Document], vocab_size: int) -> tokenizers.Tokenizer:
    """Byte-level BPE of the training documents: every text can be written, and comes back as it was."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (each.text for each in documents if not each.held_out)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _documents(root: Path, options: CorpusOptions) -> Iterator[Document]:
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        domain = _KINDS.get(path.suffix)
        if domain is None or _SKIPPED & set(path.relative_to(root).parts[:-1]) or not path.is_file():
            continue
        if path.name.startswith("_sysconfigdata"):
            continue  # how one machine built its interpreter
        try:
            text = path.read_text(encoding="utf-8")
        except ValueError:
            continue  # the library has a few sources in other encodings
        if name == _TOPICS:
            for topic, entry in _topics(text, path).items():
                title = f"{name}:{topic}"
                yield Document(title, PROSE, entry, _place(title, "held out") < PROSE_HELD_OUT)
        elif text.strip():
            share = options.held_out if domain == CODE else PROSE_HELD_OUT
            licence = path.stem.lower() in ("license", "licence", "copying")
            yield Document(name, domain, text, licence or _place(name, "held out") < share)


def _topics(text: str, path: Path) -> dict[str, str]:
    """pydoc's topics are a module that only assigns a dict of strings; it is read, not run."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            topics: dict[str, str] = ast.literal_eval(node.value)
            return topics
    raise CheckpointError(f"{path} assigns no dict of topics")


def _place(name: str, purpose: str) -> float:
    """A number from 0 to 1 that belongs to a name: files fall alike in all versions of a library."""
    return int.from_bytes(hashlib.sha256(f"{purpose}:{name}".encode()).digest()[:8]) / 2**64


def _enough(options: CorpusOptions) -> list[Document]:
    documents = list(collect(options))
    for part, what in ((TRAIN, "to train on"), *((domain, f"of {domain} to hold out") for domain in DOMAINS)):
        if not any(each.part == part for each in documents):
            where = ", ".join(options.folders) or "the interpreter's library"
            raise ConfigError(f"--corpus: {where} has no text {what}; --held_out is {options.held_out:g}")
    return documents


def _facts(documents: Sequence[Document], options: CorpusOptions) -> dict[str, Any]:
    digest = hashlib.sha256(f"{options.vocab_size}".encode())
    sizes = dict.fromkeys((TRAIN, *DOMAINS), 0)
    for each in documents:
        text = each.text.encode()
        digest.update(f"\0{each.name}\0{each.held_out}\0".encode() + text)
        sizes[each.part] += len(text)
    return {
        "digest": digest.hexdigest(),
        "python": platform.python_version(),
        "documents": len(documents),
        "bytes": sizes,
    }


def _encode(documents: Sequence[Document], tokenizer: tokenizers.Tokenizer) -> torch.Tensor:
    end = tokenizer.token_to_id(END)
    encoded = tokenizer.encode_batch([each.text for each in documents], add_special_tokens=False)
    return torch.tensor([token for each in encoded for token in (*each.ids, end)], dtype=torch.int64)


def _read(folder: Path, name: str) -> torch.Tensor:
    return torch.from_numpy(np.fromfile(folder / f"{name}.bin", dtype="<u2").astype(np.int64))
