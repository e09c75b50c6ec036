# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of Hugging Face folders: text to ids, ids to text, ids to bytes.

Tokens that a policy sampled are only decoded, to be parsed. Their text is never
encoded again. The environment's text is encoded once, as plain data.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import itertools
import json
import os
import pathlib
import re
from typing import Any

os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')

_BYTE = re.compile(r'<0x([0-9A-Fa-f]{2})>')
# Maximum number of passages whose ids are kept, and of the characters of each:
# together about 50 MB.
_PASSAGES, _LONGEST = 2**13, 4096
# A template may write today's date. A run that is resumed tomorrow must have
# the same prompts, so the day is always the default of Llama's templates.
_TODAY = ("{% macro strftime_now(format) %}{{ {'%Y-%m-%d': '2024-07-26'}"
          ".get(format, '26 Jul 2024') }}{% endmacro %}\n")


class Tokenizer:
  """Wraps a fast tokenizer of transformers; `load` makes one from a folder.

  Attributes:
    vocab_size: Size of the vocabulary; ids are in [0, vocab_size).
    missing_ids: Ids below vocab_size that have no token.
    eos_ids: Ids that the model's files name as ends of a sequence. The chat
      template may use another one; see `chat.ends`.
    pad_id: Id that fills arrays. It is the first of `eos_ids` if there is no
      padding token, so masks must not be made from it.
    leading_space: Text with which a prompt must begin, so that its first word
      is encoded as within a text: ' ' for SentencePiece, else ''.
  """

  def __init__(self, fast: Any, eos_ids: Sequence[int] = ()):
    """Wraps a fast tokenizer of transformers.

    Args:
      fast: The tokenizer.
      eos_ids: Ids that end a sequence; default: the tokenizer's own.

    Raises:
      ValueError: No id ends a sequence, or one is not in the vocabulary.
    """
    self._fast = fast
    self.vocab_size = max(fast.get_vocab().values()) + 1
    self._pieces = fast.convert_ids_to_tokens(list(range(self.vocab_size)))
    self.missing_ids = tuple(
        id_ for id_, piece in enumerate(self._pieces) if piece is None)
    if not eos_ids and fast.eos_token_id is not None:
      eos_ids = (fast.eos_token_id,)
    if not eos_ids or any(not 0 <= id_ < self.vocab_size for id_ in eos_ids):
      raise ValueError(
          'eos_token_id must be one or some of the ids from 0 to '
          f'{self.vocab_size - 1}, but is {tuple(eos_ids)}. Correct it in '
          'generation_config.json or config.json, or eos_token in '
          'tokenizer_config.json.')
    self.eos_ids = tuple(eos_ids)
    self.pad_id = (self.eos_ids[0] if fast.pad_token_id is None
                   else fast.pad_token_id)
    self._known: dict[str, tuple[int, ...]] = {}  # ids of recent passages
    self._encode_own = functools.lru_cache(256)(
        lambda text: self._encode([text])[0])
    self._is_byte_level = _is_byte_level(fast.backend_tokenizer.decoder)
    self._anchor = self._find_anchor()
    self.leading_space = ' ' if self._anchor else ''

  def encode(self, text: str) -> tuple[int, ...]:
    """Returns ids of the library's own text; special tokens become their ids.

    The text continues the text before it, so the space that SentencePiece puts
    before a text is left out. Half a surrogate pair, which is not a character,
    becomes a question mark.
    """
    return self._encode_own(text)

  def encode_first(self, text: str, *, special: bool = True) -> tuple[int, ...]:
    """Returns ids of a text that begins a sequence.

    They are what a call of the tokenizer itself returns: they begin with
    `start_ids`, and with SentencePiece's space before the first word. If the
    text itself begins with BOS, BOS is not added again.

    Args:
      text: The text.
      special: True if special tokens in it become their ids.
    """
    return self.with_start(*self._ids([text], split_special_tokens=not special))

  def with_start(self, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Returns ids with `start_ids` at their beginning, added if missing."""
    start = self.start_ids
    return ids if ids[:len(start)] == start else (*start, *ids)

  @functools.cached_property
  def start_ids(self) -> tuple[int, ...]:
    """Ids that the tokenizer puts before every text: BOS of Llama, or none.

    They begin every sequence, except a chat, whose template writes them.
    """
    (plain,), whole = self._ids(['a']), tuple(self._fast.encode('a'))
    return whole[:next((i for i in range(len(whole))
                        if whole[i:i + len(plain)] == plain), 0)]

  def encode_data(self, text: str) -> tuple[int, ...]:
    """Returns ids of text from outside, which have no special token.

    For example, '<|im_end|>' in the text is encoded as ordinary text.

    Raises:
      ValueError: The ids nevertheless include a special token. The unknown
        token is allowed, because some tokenizers cannot write every character.
    """
    return self._encode_data([text])[0]

  def encode_passages(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Returns the ids of each text from outside, without special tokens.

    Ids and errors are as in `encode_data`. The texts are encoded in one batch,
    on all cores. Recent results are kept, because the samples of a question
    find the same passages.
    """
    ids = {text: self._known[text] for text in texts if text in self._known}
    new = [text for text in dict.fromkeys(texts) if text not in ids]
    if new:
      ids |= zip(new, self._encode_data(new))
    if len(self._known) >= _PASSAGES:
      self._known = {}
    self._known |= {text: ids[text] for text in new if len(text) <= _LONGEST}
    return [ids[text] for text in texts]

  def _encode_data(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
    ids = self._encode(texts, split_special_tokens=True)
    return [self._encode_apart(text) if self._special(of_text) else of_text
            for text, of_text in zip(texts, ids)]

  def _special(self, ids: tuple[int, ...]) -> frozenset[int]:
    """Returns the special ids among some ids, except the unknown token's."""
    return self.special_ids.intersection(ids) - {self._fast.unk_token_id}

  def _encode_apart(self, text: str) -> tuple[int, ...]:
    """Returns ids of a text in which the names of special tokens are split.

    Such a name is also a piece of some vocabularies (Unigram). Its first
    character and its rest are therefore encoded apart.
    """
    names = '|'.join(re.escape(self.token(id_)) for id_ in self.special_ids)
    parts = re.split(f'(?={names})|(?<=(?={names}).)', text, flags=re.S)
    ids = tuple(itertools.chain.from_iterable(
        self._encode(parts, split_special_tokens=True)))
    if special := self._special(ids):
      raise ValueError(
          f'text from outside may hold no special token, but encoding '
          f'{text[:60]!r} gave ids {sorted(special)}. Take the token out of '
          'the text.')
    return ids

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids, without special tokens."""
    if self._is_byte_level:
      return b''.join([self.token_bytes[id_] for id_ in ids]).decode(
          errors='replace')
    return self._fast.decode(
        list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

  def write(self, ids: Sequence[int], *, first: bool = False) -> str:
    """Returns the text of ids, including special tokens, for data files.

    `encode` turns the text into these ids again, if the tokenizer splits it in
    the same way. If the ids begin a sequence, `encode_first` does so instead.

    Args:
      ids: Ids to decode.
      first: True if the ids begin a sequence.
    """
    anchor = self._anchor_ids if self._anchor and not first else ()
    before, text = (self._fast.decode(
        list(part), skip_special_tokens=False,
        clean_up_tokenization_spaces=False) for part in (
            anchor, (*anchor, *ids)))
    return text.removeprefix(before)

  def token(self, id_: int) -> str:
    """Returns an id's entry in the vocabulary: 'Ġthe', '<|im_end|>', ..."""
    return self._fast.convert_ids_to_tokens(int(id_))

  @property
  def has_chat_template(self) -> bool:
    """True if there is a chat template, which `render` needs."""
    return bool(self._fast.chat_template)

  def render(self, messages: Sequence[Mapping[str, Any]], *,
             tools: Sequence[Mapping[str, Any]] | None = None,
             prompted: bool = False) -> str:
    """Writes a conversation as text, in the form of the chat template.

    The generation prompt is at the end, unless the last message is the
    assistant's and `prompted` is False. The template lists `tools`, the
    descriptions of tools. If the template asks for today's date, it gets a
    fixed day instead.

    Raises:
      ValueError: There is no template, or it refuses these messages.
    """
    if not self.has_chat_template:
      raise ValueError(
          'this dialogue needs a tokenizer with a chat template, but the one '
          f'of {self._fast.name_or_path or "this model"} has none. Put a '
          'chat_template.jinja beside tokenizer.json, or choose a dialogue '
          'without chat such as searchrl.agent.dialogue:search_r1.')
    tools = None if tools is None else list(tools)
    try:
      return self._fast.apply_chat_template(
          list(messages), tools=tools, tokenize=False,
          add_generation_prompt=messages[-1]['role'] != 'assistant' or prompted,
          chat_template=_TODAY + self._fast.get_chat_template(tools=tools))
    except ImportError:
      raise
    except Exception as error:  # jinja raises many kinds
      raise ValueError(
          'the chat template must be able to write messages of '
          f'{", ".join(m["role"] for m in messages)}, but: '
          f'{type(error).__name__} {error}. Choose another dialogue, or put '
          'another chat_template.jinja beside tokenizer.json.') from error

  @functools.cached_property
  def special_ids(self) -> frozenset[int]:
    """Ids that `encode_data` never returns and that decoding leaves out."""
    added = self._fast.added_tokens_decoder
    return frozenset(self._fast.all_special_ids).union(
        id_ for id_, token in added.items() if token.special)

  @functools.cached_property
  def token_bytes(self) -> tuple[bytes, ...]:
    """UTF-8 bytes that each id adds to a text; empty for special tokens.

    Joined, they are the decoded text, except for the space that SentencePiece
    and WordPiece put before the first word, which decoding leaves out. (A text
    of WordPiece cannot begin in the middle of a word.) The stop automaton is
    compiled from these bytes, so it finds a stop string however it was
    tokenised.
    """
    to_bytes = _piece_reader(self._fast.backend_tokenizer.decoder)
    return tuple(
        b'' if piece is None or id_ in self.special_ids else to_bytes(piece)
        for id_, piece in enumerate(self._pieces))

  def _encode(self, texts: Sequence[str], **options) -> list[tuple[int, ...]]:
    ids = self._ids([self._anchor + text for text in texts], **options)
    if not self._anchor:
      return ids
    anchor, size = self._anchor_ids, len(self._anchor_ids)
    return [of_text[size:] if of_text[:size] == anchor
            else self._ids([text], **options)[0]  # they have merged
            for text, of_text in zip(texts, ids)]

  def _ids(self, texts: Sequence[str], **options) -> list[tuple[int, ...]]:
    texts = [text.encode(errors='replace').decode()  # half a pair: a ?
             for text in texts]
    return [*map(tuple, self._fast(
        texts, add_special_tokens=False, return_attention_mask=False,
        **options)['input_ids'])]

  @functools.cached_property
  def _anchor_ids(self) -> tuple[int, ...]:
    return self._ids([self._anchor])[0]

  def _find_anchor(self) -> str:
    """Returns a character to write before a text, so that it gets no space.

    The tokenizer then puts its space before this character, and merges the
    character with no other. It is '' if the tokenizer puts no space at all.
    """
    alone, word, both = self._ids(['\x01', 'a', '\x01a'])
    puts_space = self.decode((*alone, *word)) == self.decode(alone) + ' a'
    continues = both[:len(alone)] == alone
    return '\x01' if alone and puts_space and continues else ''


def cut(tokenizer: Any, text: str, tokens: int) -> str:
  """Returns the beginning of a text from outside, of at most `tokens` tokens.

  It ends with a whole character.
  """
  ids = tokenizer.encode_data(text)
  if len(ids) <= tokens:
    return text
  for end in range(tokens, 0, -1):
    beginning = tokenizer.decode(ids[:end]).rstrip('\ufffd')
    if len(tokenizer.encode_data(beginning)) <= tokens:
      return beginning
  return ''


def plain_start(text: str, tokenizer: Any) -> str:
  """Returns the start of a text that can share a token with text before it.

  It is '' if the text does not begin with white space. Otherwise it ends before
  the first special token: ' <|im_end|> a' -> ' '. It must be encoded together
  with the text before it.
  """
  if not text[:1].isspace():
    return ''
  for id_ in tokenizer.encode(text):
    token = tokenizer.token(id_)
    if id_ in tokenizer.special_ids and token in text:  # not the unknown token
      return text[:text.index(token)]
  return text


def _piece_reader(decoder) -> Callable[[str], bytes]:
  """Returns a function from an entry of the vocabulary to its UTF-8 bytes."""
  join = ' '.join if decoder is None else decoder.decode
  if _is_byte_level(decoder):
    to_byte = {c: b for b, c in _byte_characters().items()}
    return lambda piece: (
        bytes(to_byte[c] for c in piece) if all(c in to_byte for c in piece)
        else piece.encode())
  bytes_fall_back = join(['<0x41>']) == 'A'

  def read(piece: str) -> bytes:
    byte = _BYTE.fullmatch(piece)
    if byte and bytes_fall_back:
      return bytes([int(byte[1], 16)])
    # The bytes within a text, because a text's first piece loses its space.
    return join(['a', piece])[len(join(['a'])):].encode()

  return read


def _is_byte_level(decoder) -> bool:
  """Returns whether a decoder reads each character as a byte, as GPT-2's."""
  return decoder is not None and decoder.decode(['Ġ']) == ' '


def _byte_characters() -> dict[int, str]:
  """Returns the printable character of each byte in byte-level BPE (GPT-2)."""
  printable = [*range(ord('!'), ord('~') + 1), *range(0xA1, 0xAD),
               *range(0xAE, 0x100)]
  table = {b: chr(b) for b in printable}
  spare = (b for b in range(256) if b not in table)
  return table | {b: chr(256 + n) for n, b in enumerate(spare)}


def load(folder: str) -> Tokenizer:
  """Returns the tokenizer of a model folder or hub id.

  It is loaded once, unless a file of the folder changes. The ids that end a
  sequence come from a local folder's generation_config.json or else
  config.json, which may name several, or else from the tokenizer.

  Raises:
    FileNotFoundError: A local folder has no tokenizer.json.
    ValueError: A file is damaged, or an id that ends a sequence is not in the
      tokenizer's vocabulary.
  """
  path = pathlib.Path(folder)
  if path.exists() and not (path / 'tokenizer.json').is_file():
    raise FileNotFoundError(
        f'model.path must hold a tokenizer.json, but {path} has none. Save the '
        "model's tokenizer beside its weights.")
  return _load(folder, frozenset(
      (str(file), file.stat().st_mtime_ns)
      for pattern in ('*', 'additional_chat_templates/*')
      for file in path.glob(pattern) if file.is_file()))


@functools.lru_cache(4)
def _load(folder: str, files: frozenset[tuple[str, int]]) -> Tokenizer:
  """Loads a tokenizer. `files` are the names and times of the folder's files."""
  del files  # they only tell one state of the folder from another
  from transformers import PreTrainedTokenizerFast  # slow to import
  try:
    # The class that tokenizer_config.json names may split words by another rule
    # than tokenizer.json: GPT2Tokenizer does not know the digits of SmolLM2.
    fast = PreTrainedTokenizerFast.from_pretrained(folder)
  except ImportError:
    raise
  except Exception as error:  # the parser raises many kinds
    raise ValueError(
        f'model.path must hold a tokenizer, but that of {folder} cannot be '
        f'loaded: {type(error).__name__} {error}. Fetch its files again.'
    ) from error
  path = pathlib.Path(folder)
  return Tokenizer(fast, _eos_ids(path / 'generation_config.json')
                   or _eos_ids(path / 'config.json'))


def _eos_ids(path: pathlib.Path) -> tuple[int, ...]:
  """Returns the ids that a JSON file names as ends of a sequence, or ()."""
  if not path.is_file():
    return ()
  try:
    value = json.loads(path.read_text(encoding='utf-8')).get('eos_token_id')
    value = [] if value is None else value
    ids = tuple(value if isinstance(value, list) else [value])
    if any(type(id_) is not int for id_ in ids):
      raise ValueError(f'eos_token_id is {value!r}')
  except (ValueError, AttributeError) as error:
    raise ValueError(
        f'{path} must hold a JSON object whose eos_token_id is an id or a list '
        f'of ids, but: {type(error).__name__} {error}. Fetch it again.') from (
            error)
  return ids
