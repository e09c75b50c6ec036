# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Small tokenizers of every kind and chat templates, for tests of chats."""

import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
import transformers

from searchrl.agent import dialogue as dialogues
from searchrl.agent import tokenizer as ours

_CALL = '{"name": "search", "arguments": {"query_list": ["who?"]}}'
TEXT = ['the search for an answer goes on and on, the question too'] * 9 + [
    f'<tool_call>\n{_CALL}\n</tool_call>',
    '<think>\nhm\n</think>\n\n<answer> Paris </answer>',
    'Doc 1 (Title: "Paris")\nthe town\n\nDoc 2 (Title: "é 日本")'] * 3

# In the manner of Qwen 2.5: tools in the system message, tool answers in a
# user's turn; nothing is changed.
QWEN2 = r'''
{%- set given = messages[0].role == 'system' %}
{{- '<|im_start|>system\n' ~ (messages[0].content if given else 'Be useful.') }}
{%- if tools %}
{{- '\n\nYou have tools:\n<tools>' }}
{%- for tool in tools %}{{ '\n' ~ (tool | tojson) }}{% endfor %}
{{- '\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' ~ m.content
    ~ '\n</tool_response><|im_end|>\n' }}
{%- elif m.role != 'system' %}
{{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}'''

# In the manner of Qwen 3: thoughts are rewritten in a form of its own, and
# KEEP selects the turns; a last turn without any gets an empty one.
_QWEN3 = r'''
{%- if tools %}
{{- '<|im_start|>system\n<tools>\n' ~ (tools[0] | tojson)
    ~ '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- set last = namespace(user=0) %}
{%- for m in messages if m.role == 'user' %}
{%- set last.user = messages.index(m) %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' ~ m.content
    ~ '\n</tool_response><|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1]
    if '</think>' in m.content else '' %}
{%- set rest = m.content.split('</think>')[-1].lstrip('\n') %}
{{- '<|im_start|>assistant\n' }}
{%- if (thought or loop.last) and KEEP %}
{{- '<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' }}
{%- endif %}
{{- rest ~ '<|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}'''
QWEN3 = _QWEN3.replace('KEEP', 'loop.index0 > last.user')
STRIPS_THINKING = _QWEN3.replace('KEEP', 'loop.last')
NEVER_THINKS = _QWEN3.replace('KEEP', 'false')
OPENS_THINKING = QWEN3.replace(
    "'<|im_start|>assistant\\n' }}{% endif %}",
    "'<|im_start|>assistant\\n<think>\\n' }}{% endif %}")

# In the manner of Llama 3: the date of today, stripped messages, and the answer
# of a tool as a JSON string.
LLAMA3 = r'''
{%- if date_string is not defined %}
{%- set date_string = strftime_now('%d %b %Y') %}
{%- endif %}
{{- bos_token ~ '<|start_header_id|>system<|end_header_id|>\n\nToday: ' }}
{{- date_string }}
{{- ' or ' ~ strftime_now('%Y-%m-%d') ~ '<|eot_id|>' }}
{%- for m in messages %}
{{- '<|start_header_id|>' ~ ('ipython' if m.role == 'tool' else m.role) }}
{{- '<|end_header_id|>\n\n' }}
{%- if m.role == 'tool' %}{{ m.content | tojson }}
{%- elif m.tool_calls %}
{%- set call = m.tool_calls[0].function %}
{{- '{"name": "' ~ call.name ~ '", "parameters": ' }}
{{- (call.arguments | tojson) ~ '}' }}
{%- else %}
{%- if tools and loop.first %}
{{- 'You may call: ' ~ (tools | tojson) ~ '\n\n' }}
{%- endif %}
{{- m.content | trim }}
{%- endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}'''

# In the manner of Mistral: control words in brackets, strict about ids of
# calls, a space before a message, the tool's answer inside a JSON object.
MISTRAL = r'''
{{- bos_token }}
{%- if tools %}
{{- '[AVAILABLE_TOOLS] ' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '[INST] ' ~ m.content ~ '[/INST]' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}
{{- raise_exception('ids have 9 characters') }}
{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' ~ (m.content | tojson) }}
{{- ', "call_id": "same"}[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' %}{{ ' ' ~ (m.content | trim) ~ eos_token }}
{%- else %}{{ raise_exception('no role ' ~ m.role) }}
{%- endif %}
{%- endfor %}'''


def byte_level(template: str | None = None, *, eos='<|im_end|>', special=(),
               added=(), prefix=False) -> ours.Tokenizer:
  """Returns a tokenizer like GPT-2's: every byte is a character."""
  raw = tokenizers.Tokenizer(models.BPE())
  raw.normalizer = normalizers.NFC()
  raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
  raw.decoder = decoders.ByteLevel()
  raw.train_from_iterator(TEXT, trainers.BpeTrainer(
      vocab_size=400, show_progress=False,
      initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
  special = ['<|endoftext|>', '<|im_start|>', '<|im_end|>', '<|begin|>',
             '<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>', *special]
  raw.add_special_tokens(special)
  raw.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in added])
  return wrap(raw, template, bos_token='<|begin|>', eos_token=eos,
              pad_token='<|endoftext|>')


def qwen(template: str = QWEN2) -> ours.Tokenizer:
  return byte_level(template, added=(
      '<tool_call>', '</tool_call>', '<tool_response>', '</tool_response>',
      '<think>', '</think>'))


def llama() -> ours.Tokenizer:
  return byte_level(LLAMA3, eos='<|eot_id|>')


def sentence_piece(template: str | None = None, *,
                   legacy=False) -> ours.Tokenizer:
  """Returns a tokenizer like Llama 2's: words begin with ▁, bytes fall back."""
  raw = tokenizers.Tokenizer(models.BPE())
  raw.pre_tokenizer = pre_tokenizers.Metaspace()
  raw.train_from_iterator(TEXT, trainers.BpeTrainer(
      vocab_size=150, show_progress=False))
  learned = json.loads(raw.to_str())['model']
  names = ['<unk>', '<s>', '</s>', *(f'<0x{b:02X}>' for b in range(256)),
           *learned['vocab']]
  raw = tokenizers.Tokenizer(models.BPE(
      vocab={name: id_ for id_, name in enumerate(names)},
      merges=[tuple(m) for m in learned['merges']], unk_token='<unk>',
      byte_fallback=True, fuse_unk=True))
  if legacy:
    raw.normalizer = normalizers.Sequence(
        [normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
  else:
    raw.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme='first', split=False)
  raw.decoder = decoders.Sequence([
      decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(),
      decoders.Strip(' ', 1, 0)])
  raw.add_special_tokens(['<unk>', '<s>', '</s>'])
  return wrap(raw, template, bos_token='<s>', eos_token='</s>',
              unk_token='<unk>')


def word_piece() -> ours.Tokenizer:
  """Returns a tokenizer like BERT's: the rest of a word begins with ##."""
  raw = tokenizers.Tokenizer(models.WordPiece(unk_token='[UNK]'))
  raw.normalizer = normalizers.BertNormalizer(lowercase=True)
  raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  raw.decoder = decoders.WordPiece()
  raw.train_from_iterator(TEXT + ["isn't it! it's 'ours'."], (
      trainers.WordPieceTrainer(
          vocab_size=120, show_progress=False,
          special_tokens=['[PAD]', '[UNK]', '[SEP]'])))
  return wrap(raw, None, eos_token='[SEP]', pad_token='[PAD]',
              unk_token='[UNK]')


def wrap(raw, template, **names) -> ours.Tokenizer:
  fast = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **names)
  if template is not None:
    fast.chat_template = template
  return ours.Tokenizer(fast)


def written(tokenizer: ours.Tokenizer, ids) -> str:
  """Text of ids, special tokens included."""
  return tokenizer._fast.decode(ids, skip_special_tokens=False)


def unspaced(text: str) -> str:
  """Removes the space that the legacy kind reads after a special token."""
  return text.replace('<s> ', '<s>').replace('</s> ', '</s>')


def passages_read(dialogue, tokenizer, table, results, budget, unknown=None):
  """Checks that passages stay in their place, and returns what is read there.

  Between the frame's own ids no passage has a special id, ends a turn, acts or
  exceeds its budget; and it is whole JSON where the frame is. The id `unknown`
  alone may be special.

  Returns:
    The text, the text that the passages would have uncut, and how many are cut.
  """
  observed = dialogues.observation(
      dialogue, results, tokenizer, passage_tokens=budget)
  before = tokenizer.encode(dialogue.turn_end) + tokenizer.encode(
      dialogue.before)
  after, ids = tokenizer.encode(dialogue.after), observed.tokens
  assert ids[:len(before)] == before and ids[-len(after):] == after
  inside = ids[len(before):-len(after)]
  assert not tokenizer.special_ids.difference({unknown}).intersection(inside)
  state = 0
  for id_ in ids:
    assert not table.hit[state, id_]
    state = table.next_state[state, id_]
  pieces = dialogue.arrange(dialogue.passage, results)
  assert len(inside) <= budget * len(pieces)
  text = tokenizer.decode(inside)
  for _ in range(dialogue.json_levels):  # whole, wherever it was cut
    text = json.loads(f'"{text}"')
  assert dialogue.parse(text).kind == 'invalid'
  return text, ''.join(pieces), observed.passages_cut


def marked_ids(trajectory):
  """The ids of a rollout, and whether each is the policy's own."""
  ids = [(id_, False) for id_ in trajectory.prompt_tokens]
  for turn in trajectory.turns:
    ids += [(id_, True) for id_ in turn.action_tokens]
    ids += [(id_, False) for id_ in turn.observation_tokens]
  return ids
