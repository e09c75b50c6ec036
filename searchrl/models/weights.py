# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Model folders of Hugging Face: reads and writes the models of `families`.

`families` translates config.json and the names of tensors, and `tensors` reads
and writes the tensors.
"""

from collections.abc import Mapping, Sequence
import hashlib
import json
import pathlib
import re
import shutil
from typing import Any

import jax
import jax.numpy as jnp

from searchrl.models import families
from searchrl.models import gguf_files
from searchrl.models import tensors
from searchrl.models import transformer
from searchrl.models.tensors import ShardingOf
from searchrl.models.transformer import Params, TransformerConfig

_GENERATION = 'generation_config.json'
_END = 2**20  # bytes at each end of a file that `sketch` reads
_TEMPLATES = 'additional_chat_templates'  # folder of named chat templates
_TOKENIZER = (  # files of the tokenizer, the chat template and generation
    'tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json',
    'added_tokens.json', 'vocab.json', 'vocab.txt', 'merges.txt',
    'tokenizer.model*', 'spiece.model', 'sentencepiece*.model', '*.tiktoken',
    'tekken.json', 'chat_template.*', f'{_TEMPLATES}/*.jinja', _GENERATION)
_FETCHED = ('*.json', 'model*.safetensors', *(
    pattern for pattern in _TOKENIZER if not pattern.endswith('.json')))
_ASSETS = pathlib.Path(__file__).parents[1] / 'assets'
# Models that the package ships.
SHIPPED = ('tiny_base', 'tiny_instruct', 'tiny_proposer', 'tiny_raw')


def locate(path: str | pathlib.Path, field: str = 'model.path') -> str:
  """Returns the local folder of a model, fetched from the hub if necessary.

  Args:
    path: Path of a folder, a name in `SHIPPED`, a GGUF file (see
      `gguf_files.unpacked`), or a hub id, such as 'Qwen/Qwen2.5-7B'. With a
      branch, tag or commit it is 'Qwen/Qwen2.5-7B@main'. Only json, safetensors
      and tokenizer files are fetched. Any other text is returned unchanged, as
      the path of a folder that may not exist.
    field: Config field that names the model, for errors.

  Raises:
    FileNotFoundError: A hub id is not a local folder, and the hub lacks the
      model or cannot be reached; or there is no such GGUF file.
    ValueError: The GGUF file cannot be unpacked.
  """
  path = str(path)
  hub_id = re.fullmatch(
      r'([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([A-Za-z0-9][\w./-]*))?', path)
  if path in SHIPPED and not pathlib.Path(path).exists():
    return str(_ASSETS / path)
  if gguf_files.is_name(path) and not pathlib.Path(path).is_dir():
    return str(gguf_files.unpacked(path))
  if pathlib.Path(path).exists() or not hub_id:
    return path
  import huggingface_hub  # slow to import
  try:
    return huggingface_hub.snapshot_download(
        hub_id[1], revision=hub_id[2], allow_patterns=list(_FETCHED))
  except Exception as error:  # the hub raises its own, of many kinds
    reason = str(error).partition('\n')[0].strip('. ')
    raise FileNotFoundError(
        f'{field} must be a folder or a hub id, but {path} is no folder and '
        f'could not be fetched: {type(error).__name__} {reason}. Check the '
        'name and the revision, or fetch it elsewhere and give the folder.'
    ) from error


def read_json(folder: str | pathlib.Path
             ) -> tuple[dict[str, Any], pathlib.Path]:
  """Returns the content of a model's config.json, and its path.

  Raises:
    FileNotFoundError: The folder does not exist or has no config.json.
    ValueError: The file is not a JSON object.
  """
  path = pathlib.Path(folder)
  if not path.is_dir():
    raise FileNotFoundError(
        f'model.path must be a folder, but {path} is none. Give the folder of '
        'a Hugging Face checkpoint (config.json, *.safetensors, '
        'tokenizer.json), or a hub id.')
  path = path / 'config.json'
  if not path.is_file():
    raise FileNotFoundError(
        f'model.path must hold a config.json, but {path.parent} has none.')
  try:
    return dict(json.loads(path.read_text(encoding='utf-8'))), path
  except (ValueError, TypeError) as error:
    raise ValueError(
        f'{path} must hold a JSON object, but: {type(error).__name__} {error}. '
        'Fetch it again.') from error


def read_config(folder: str) -> TransformerConfig:
  """Returns the shape that a config.json of transformers 4 or 5 describes.

  Raises:
    FileNotFoundError: The folder does not exist or has no config.json.
    ValueError: The file is not JSON, the shape is incomplete, or the
      architecture, rotary embedding or attention is not implemented here.
  """
  raw, path = read_json(folder)
  try:
    return families.parse(raw, path)
  except (KeyError, TypeError, ZeroDivisionError) as error:
    raise ValueError(
        f'{path} must hold the whole shape of a model, but: '
        f'{type(error).__name__} {error}. Fetch it again.') from error


def digest(folder: str) -> str:
  """Returns a digest, of twelve hex digits, of a folder's files of weights."""
  whole = hashlib.sha256()
  for file in sorted(pathlib.Path(folder).glob('*.safetensors')):
    with file.open('rb') as data:
      hashlib.file_digest(data, lambda: whole)
  return whole.hexdigest()[:12]


def sketch(folder: str) -> dict[str, str]:
  """Returns a digest of each file of weights of a folder, by file name.

  A digest covers only the size and the first and the last MiB of a file, to
  take little time. Two trainings still differ, as an update changes all
  tensors.
  """
  digests = {}
  for file in sorted(pathlib.Path(folder).glob('*.safetensors')):
    with file.open('rb') as data:
      size = data.seek(0, 2)
      data.seek(0)
      ends = data.read(_END)
      data.seek(max(size - _END, 0))
      digests[file.name] = hashlib.sha256(
          b'%d' % size + ends + data.read()).hexdigest()[:12]
  return digests


def load(
    folder: str,
    config: TransformerConfig,
    *,
    sharding_of: ShardingOf | None = None,
    dtype: Any = jnp.float32,
) -> Params:
  """Loads params from a folder's safetensors, leaf by leaf onto devices.

  Args:
    folder: Local folder; see `locate`.
    config: Shape that `read_config` returns for the same folder.
    sharding_of: Function from a leaf's logical axes to its sharding. Only the
      slices of local devices are read. Default: the default device.
    dtype: Data type of all params, whatever type the files hold.

  Raises:
    FileNotFoundError: The folder has no safetensors.
    ValueError: A file is damaged; or a tensor is missing, unexpected or has a
      wrong shape.
  """
  # Older exporters wrote rotary tables, which are recomputed here.
  stored = tensors.Folder(pathlib.Path(folder), lambda name: (
      None if name.endswith('.rotary_emb.inv_freq') else name))
  names = families.FAMILIES[config.architecture].names
  if config.tie_word_embeddings:
    _drop_tied(stored, f'{names["embed"]}.weight', f'{names["head"]}.weight')
  return tensors.load(
      stored, names, transformer.abstract(config),
      transformer.logical_axes(config), sharding_of=sharding_of, dtype=dtype)


def _drop_tied(stored: tensors.Folder, embedding: str, head: str,
               rows: int = 4096) -> None:
  """Makes a folder ignore the logits matrix of a model with tied embeddings.

  Some files store it, though it must equal the embedding. The two are compared
  `rows` rows at a time.

  Raises:
    ValueError: The folder's logits matrix differs from the embedding.
  """
  if head not in stored.shapes:
    return
  size = stored.shapes[head][0]
  slices = [(slice(i, min(i + rows, size)), slice(None))
            for i in range(0, size, rows)]
  if stored.shapes[head] != stored.shapes.get(embedding) or not all(
      (stored.read(embedding, i) == stored.read(head, i)).all()
      for i in slices):
    raise ValueError(
        f'{head} must equal {embedding} if embeddings are tied, but does not '
        f'in {stored.path}. Set tie_word_embeddings to false in its '
        'config.json.')
  del stored.shapes[head]


def save(
    folder: str | pathlib.Path,
    params: Params,
    config: TransformerConfig,
    *,
    tokenizer_from: str | pathlib.Path,
    eos_id: int | Sequence[int],
    dtype: str = 'float32',
    shard_bytes: int = 5 * 10**9,
) -> None:
  """Writes a folder for transformers: config, weights and tokenizer.

  An interrupted call leaves no incomplete folder. One tensor is on the host at
  a time. With several processes, all must call this function; the first one
  writes.

  Args:
    folder: Path of a folder that is new, empty, or an earlier export. An
      earlier export is replaced; other files in it are kept.
    params: Params on the host or on any devices.
    config: Shape of the params.
    tokenizer_from: Folder or hub id whose tokenizer files are copied.
    eos_id: Id, or ids, that end a generation. config.json names them, and so
      does a generation_config.json that is copied.
    dtype: Data type in the files, 'float32' or 'bfloat16'.
    shard_bytes: Largest size of one file in bytes. Larger weights become
      several files with an index.

  Raises:
    ValueError: The dtype is not one of these, a parameter is NaN or infinite,
      or the folder contains other folders.
  """
  check_finite(params, 'a model that is exported')
  ids = [eos_id] if isinstance(eos_id, int) else list(eos_id)
  raw = families.describe(config, dtype, ids[0] if len(ids) == 1 else ids)
  if jax.process_index() == 0:
    source = pathlib.Path(locate(tokenizer_from))
    if (source / 'config.json').is_file():
      theirs = read_json(source)[0]
      raw |= {name: theirs[name] for name in ('bos_token_id', 'pad_token_id')
              if name in theirs}
  export(folder, params, families.FAMILIES[config.architecture].names, raw,
         tokenizer_from=tokenizer_from, dtype=dtype, shard_bytes=shard_bytes)


def check_finite(params: Params, what: str) -> None:
  """Raises a ValueError that begins with `what` if params are not finite."""
  bad = not_finite(params)
  if bad:
    raise ValueError(
        f'{what} must hold finite numbers, but NaN or infinity is in '
        f'{", ".join(bad[:4])}{f" and {len(bad) - 4} more" if bad[4:] else ""}.'
        ' Start from another checkpoint or model folder.')


def not_finite(tree: Any) -> list[str]:
  """Returns the names of a tree's arrays that contain NaN or infinity."""
  finite = jax.device_get(_are_finite(tree))
  return [jax.tree_util.keystr(path, simple=True, separator='/')
          for path, ok in jax.tree_util.tree_leaves_with_path(finite) if not ok]


@jax.jit
def _are_finite(tree: Any) -> Any:
  return jax.tree.map(lambda x: jnp.isfinite(x).all(), tree)


def export(
    folder: str | pathlib.Path,
    params: Params,
    names: Mapping[str, str],
    raw: Mapping[str, Any],
    *,
    tokenizer_from: str | pathlib.Path,
    dtype: str,
    shard_bytes: int = 5 * 10**9,
) -> None:
  """Writes a model's folder for transformers: config, weights and tokenizer.

  It is for a model of any kind. A call that fails leaves no incomplete folder,
  and the next call deletes that of a killed one. With several processes, all
  must call it; the first one writes.

  Args:
    folder: Path of a folder that is new, empty, or an earlier export.
    params: Params on the host or on any devices.
    names: Part of a tensor's name for each key of the params; see
      `tensors.sources`.
    raw: Content of config.json.
    tokenizer_from: Folder or hub id whose tokenizer files are copied.
    dtype: Data type in the files, 'float32' or 'bfloat16'.
    shard_bytes: Largest size of one file in bytes.

  Raises:
    ValueError: The dtype is not one of these, or the folder contains other
      folders.
  """
  path = pathlib.Path(folder).resolve()
  new = path.with_name(f'.{path.name}.unfinished')
  writes = jax.process_index() == 0
  if writes:
    _check_replaceable(path)
    shutil.rmtree(new, ignore_errors=True)  # left by a run that was killed
    new.mkdir(parents=True)
  try:
    tensors.save(new, params, names, dtype=dtype, shard_bytes=shard_bytes)
    if writes:
      (new / 'config.json').write_text(json.dumps(raw, indent=2) + '\n')
      _copy_tokenizer(pathlib.Path(locate(tokenizer_from)), new)
      if (new / _GENERATION).exists():
        _add_ends(new / _GENERATION, raw.get('eos_token_id'))
      _replace(path, new)
  except BaseException:
    if writes:
      shutil.rmtree(new, ignore_errors=True)  # a full disk needs the room
    raise


def _copy_tokenizer(source: pathlib.Path, target: pathlib.Path) -> None:
  """Copies the files of a folder's tokenizer to another folder."""
  for pattern in _TOKENIZER:
    for file in filter(pathlib.Path.is_file, source.glob(pattern)):
      copy = target / file.relative_to(source)
      copy.parent.mkdir(exist_ok=True)
      shutil.copyfile(file, copy)


def _add_ends(path: pathlib.Path, eos_id: int | list[int] | None) -> None:
  """Adds the token ids that end a generation to a generation_config.json.

  Ids that the file already names are not added again.
  """
  raw = json.loads(path.read_text(encoding='utf-8'))
  named, ids = ([] if x is None else x if isinstance(x, list) else [x]
                for x in (raw.get('eos_token_id'), eos_id))
  missing = [id_ for id_ in ids if id_ not in named]
  if missing:
    raw['eos_token_id'] = [*named, *missing]
    path.write_text(json.dumps(raw, indent=2) + '\n', encoding='utf-8')


def _check_replaceable(path: pathlib.Path) -> None:
  """Raises a ValueError if a path is a file or contains folders.

  A folder of chat templates is allowed. An interrupted replacement of the path
  is undone first.
  """
  old = path.with_name(f'.{path.name}.old')
  if old.exists() and not path.exists():
    old.rename(path)  # undo: a run was killed between the two renames
  inner = [p.name for p in path.glob('*')
           if p.is_dir() and p.name != _TEMPLATES]
  if inner or path.is_file():
    raise ValueError(
        f'{path} must be new or an earlier export, which is replaced as a '
        f'whole, but {f"holds the folder {inner[0]}" if inner else "is a file"}'
        '. Give another folder.')


def _replace(path: pathlib.Path, new: pathlib.Path) -> None:
  """Moves the folder `new` to `path`, where it replaces an earlier folder.

  Files that only the earlier folder has are kept, except weights.
  """
  old = path.with_name(f'.{path.name}.old')
  shutil.rmtree(old, ignore_errors=True)
  if path.exists():
    for file in filter(pathlib.Path.is_file, path.rglob('*')):
      copy = new / file.relative_to(path)
      if not (re.fullmatch(r'model.*\.safetensors(\.index\.json)?', file.name)
              or copy.exists()):
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy)
    path.rename(old)
  new.rename(path)
  shutil.rmtree(old, ignore_errors=True)
