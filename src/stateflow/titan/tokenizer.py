"""Tokenizers for the torchtitan host: bytes by default, or a Hugging Face tokenizer from a local folder."""

from collections.abc import Iterable
from pathlib import Path

from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer
from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger

BYTES = "bytes"
_TOKENIZER_FILE = "tokenizer.json"


class ByteTokenizer(BaseTokenizer):
    """UTF-8 bytes as tokens 0..255, then the document marks bos (256) and eos (257). Needs no files.

    Every Python string survives ``decode(encode(text)) == text``, lone surrogates included.
    """

    NUM_BYTES = 256

    def __init__(self) -> None:
        super().__init__()
        self.bos_id = self.NUM_BYTES
        self.eos_id = self.NUM_BYTES + 1

    @property
    def vocab_size(self) -> int:
        return self.NUM_BYTES + 2

    def get_vocab_size(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """The bytes of ``text``, with a bos in front and an eos behind if asked for."""
        tokens = list(text.encode("utf-8", "surrogatepass"))
        if add_bos:
            tokens.insert(0, self.bos_id)
        if add_eos:
            tokens.append(self.eos_id)
        return tokens

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of ``token_ids``; marks and unused ids are skipped, what is not UTF-8 becomes U+FFFD."""
        data = bytes(token for token in map(int, token_ids) if 0 <= token < self.NUM_BYTES)
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return data.decode("utf-8", "replace")


def build_tokenizer(job_config: JobConfig) -> BaseTokenizer:
    """The tokenizer that ``[stateflow] tokenizer`` names.

    "bytes" gives a :class:`ByteTokenizer`; anything else is the path of a Hugging Face ``tokenizer.json``
    or of the folder that holds it (with ``tokenizer_config.json`` beside it, which says what bos and eos
    are).

    Raises:
        ValueError: there is no such file or folder, or it holds no tokenizer that can be read.
    """
    choice = job_config.stateflow.tokenizer
    if choice == BYTES:
        return ByteTokenizer()
    if not isinstance(choice, str) or not choice:
        raise ValueError(
            f'stateflow.tokenizer is {choice!r}; set it to "{BYTES}" or a path to {_TOKENIZER_FILE}'
        )

    path = Path(choice).expanduser()
    if not path.exists():
        raise ValueError(
            f'stateflow.tokenizer: no file or folder {choice!r}; set it to "{BYTES}" or to the path of a '
            f"Hugging Face {_TOKENIZER_FILE} or its folder"
        )
    if path.is_file():
        if path.name != _TOKENIZER_FILE:
            raise ValueError(
                f"stateflow.tokenizer: {choice!r} must be called {_TOKENIZER_FILE}, "
                "because what bos and eos are is read from the files beside it; rename it"
            )
        path = path.parent
    try:
        tokenizer = HuggingFaceTokenizer(str(path))
    except Exception as error:  # the tokenizers library raises bare Exception for a file that it cannot read
        raise ValueError(f"stateflow.tokenizer: cannot read a tokenizer from {choice!r}: {error}") from None
    missing = [name for name in ("bos", "eos") if getattr(tokenizer, f"{name}_id") is None]
    if missing:
        logger.warning(
            f"The tokenizer in {path} has no {' and no '.join(missing)} token (see tokenizer_config.json): "
            "documents are not fully marked off from each other."
        )
    return tokenizer
